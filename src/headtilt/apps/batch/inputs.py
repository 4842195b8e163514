"""What a batch run reads: folders, globs, parquet files and WebDataset archives, listed in a stable order.

Listing reads names alone. Each input is then found again by its file and a place in it, so that any machine that sees
the same files can read any part of the list.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import Any

from headtilt.errors import DataError, MissingExtraError, OptionError
from headtilt.sources.images import NAMED_AS_IMAGES

WHOLE = -1  # the place of an input that is a file of its own
BROKEN = -2  # the place of an input that could not be listed
MOST_BYTES = 500_000_000  # of a file in an archive, which is held in memory
PICTURES = ("image", "img", "jpg", "png", "bytes", "image_bytes")
PATHS = ("path", "file", "file_name", "filename", "image_path")


@dataclass(frozen=True, slots=True)
class Input:
    """One image of a source.

    Attributes:
        path: What its row is called; unique within a source unless the source names a file twice.
        file: The file that holds it.
        place: Row of a parquet file, offset in a tar, `WHOLE` for a plain file, `BROKEN` for none.
        size: Bytes of a plain file or in a tar.
        column: Column of a parquet file; why it is broken where it is.
        stamp: When the file was last changed, in nanoseconds; with its size it tells whether it was replaced.
    """

    path: str
    file: str
    place: int = WHOLE
    size: int = 0
    column: str = ""
    stamp: int = 0


def listed(source: str, *, column: str | None = None, leave_out: Path | None = None) -> list[Input]:
    """Return the inputs of a source, in an order that depends on names alone.

    Args:
        source: A folder (with all folders inside; searched for images, .parquet and .tar), a file, a glob, or braces as
            WebDataset writes them: ``shards/{000..127}.tar``.
        column: Column of parquet files that holds the images or their paths; None finds it.
        leave_out: A folder whose files do not count: that of the output, which may lie inside the source.
    """
    found: list[Input] = []
    for path in _files(source):
        if leave_out is not None and leave_out.resolve() in path.resolve().parents:
            continue
        if path.suffix == ".parquet":
            found += _in_parquet(path, column)
        elif path.suffix == ".tar":
            found += _in_tar(path)
        elif path.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.xz")):
            raise OptionError(
                f"source has {path}, a compressed archive, which cannot be read from the middle. Unpack it."
            )
        else:
            found.append(_plain_file(path))
    if not found:
        raise OptionError(
            f"source must name images, parquet files or tars; nothing was found at {source!r}. Check the path, and "
            "quote globs so that the shell does not expand them."
        )
    return found


def payloads(inputs: Iterable[Input]) -> Iterator[tuple[Input, bytes | Path | DataError]]:
    """Yield each input with its bytes or the path of its file, in order; an error for one that cannot be read."""
    for file, group in groupby(inputs, key=lambda item: item.file):
        run = list(group)
        if run[0].place == WHOLE:
            yield from ((item, Path(item.path)) for item in run)
        elif all(item.place == BROKEN for item in run):
            yield from ((item, DataError(item.column)) for item in run)
        elif Path(file).suffix == ".parquet":
            yield from _from_parquet(file, run)
        else:
            yield from _from_tar(file, run)


def _files(source: str) -> list[Path]:
    wanted = NAMED_AS_IMAGES | {".parquet", ".tar"}
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix.lower() in wanted and file.is_file())
    if path.is_file():
        return [path]
    if "{" in source:
        return [Path(file) for file in _expanded(source) if Path(file).exists() or _missing(file)]
    return sorted(Path(file) for file in glob(str(path), recursive=True) if Path(file).is_file())


def _plain_file(path: Path) -> Input:
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError:  # Linux allows any bytes; parquet and JSON do not
        shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return Input(shown, shown, BROKEN, column="the name of the file is not UTF-8. Rename it.")
    size, stamp = _seen(path)
    return Input(name, name, size=size, stamp=stamp)


def _seen(path: Path) -> tuple[int, int]:
    """Return the size of a file and when it was last changed; zeros where there is none."""
    try:
        seen = path.stat()
    except (OSError, ValueError):  # a null byte, which no name of a file holds
        return 0, 0
    return seen.st_size, seen.st_mtime_ns


def _expanded(source: str) -> list[str]:
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise MissingExtraError("webdataset", "batch") from error
    found: list[str] = expand_urls(source)
    return found


def _missing(file: str) -> bool:
    raise DataError(f"source names {file}, which does not exist. Correct the numbers in the braces.")


def parquet() -> Any:
    """Return `pyarrow.parquet`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "batch") from error
    return pyarrow.parquet


def _in_parquet(path: Path, column: str | None) -> list[Input]:
    library = parquet()
    try:
        file = library.ParquetFile(path)
    except Exception as error:  # pyarrow raises its own kinds and OSError
        return [Input(str(path), str(path), BROKEN, column=f"{path.name} is not a readable parquet file ({error}).")]
    with file:
        name, kind = _column(file.schema_arrow, column, path)
        if kind == "path":
            # Relative paths are relative to the file that names them, as in datasets on disk.
            texts = file.read(columns=[name])[name].to_pylist()
            return [_beside(path, text, row) for row, text in enumerate(texts)]
        size, stamp = _seen(path)
        return [Input(f"{path}#{row}", str(path), row, size, name, stamp) for row in range(file.metadata.num_rows)]


def _beside(path: Path, text: str | None, row: int) -> Input:
    if not text:
        return Input(f"{path}#{row}", str(path), BROKEN, column="the row names no file.")
    return _plain_file(path.parent / text)


def _column(schema: Any, column: str | None, path: Path) -> tuple[str, str]:
    """Return the column that holds images, and whether it holds bytes or paths."""
    kinds = {field.name: kind for field in schema if (kind := _kind(field.type)) is not None}
    if column is not None:
        if column not in kinds:
            raise OptionError(f"column must be one of {', '.join(kinds) or 'none'} in {path}; got {column!r}.")
        return column, kinds[column]
    pictures = [name for name, kind in kinds.items() if kind == "bytes"]
    paths = [name for name, kind in kinds.items() if kind == "path" and name.lower() in PATHS]
    for names, usual in ((pictures, PICTURES), (paths, PATHS)):
        chosen = [name for name in names if name.lower() in usual] or names
        if chosen:
            return chosen[0], kinds[chosen[0]]
    raise OptionError(
        f"{path} has no column of image bytes or paths that can be told by its name; it has {', '.join(schema.names)}. "
        "Name it with --column."
    )


def _kind(kind: Any) -> str | None:
    import pyarrow.types as types

    if types.is_struct(kind):  # as Hugging Face datasets store images: {"bytes", "path"}
        return "bytes" if kind.get_field_index("bytes") >= 0 else None
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    return "path" if types.is_string(kind) or types.is_large_string(kind) else None


def _from_parquet(file: str, run: list[Input]) -> Iterator[tuple[Input, bytes | Path | DataError]]:
    """Yield the images of some rows, a row group at a time."""
    rows = iter(run)
    item = next(rows, None)
    try:
        with parquet().ParquetFile(file) as opened:
            start = 0
            for number in range(opened.num_row_groups):
                stop = start + opened.metadata.row_group(number).num_rows
                cells: Any = None
                while item is not None and item.place < stop:
                    if item.place == BROKEN:
                        yield item, DataError(item.column)
                    else:
                        if cells is None:
                            cells = opened.read_row_group(number, columns=[item.column])[item.column]
                        yield item, _cell(cells[item.place - start].as_py(), Path(file).parent)
                    item = next(rows, None)
                start = stop
    except Exception as error:  # a broken page costs the rows from there on their answer, and no other file's
        if isinstance(error, (MissingExtraError, GeneratorExit)):
            raise
        said = DataError(f"{Path(file).name} could not be read ({error}).")
        yield from ((left, said) for left in ([item] if item else []) + list(rows))
        return
    while item is not None:
        yield item, DataError(item.column if item.place == BROKEN else f"{Path(file).name} has no row {item.place}.")
        item = next(rows, None)


def _cell(value: Any, folder: Path) -> bytes | Path | DataError:
    if isinstance(value, dict):
        name = value.get("path")
        value = value.get("bytes")
        if value is None and name:
            return folder / name
    return value if isinstance(value, bytes) else DataError("the row holds no image.")


def _in_tar(path: Path) -> list[Input]:
    """Return the samples of a WebDataset archive: files of one name up to the first dot are one sample."""
    try:
        from webdataset.tariterators import base_plus_ext
    except ImportError as error:
        raise MissingExtraError("webdataset", "batch") from error
    samples: dict[str, Input | None] = {}
    broken: list[Input] = []
    whole, stamp = _seen(path)
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                member.name = member.name.encode(errors="backslashreplace").decode()  # parquet takes UTF-8 alone
                if member.size < 0:  # the next one would lie before it, and be the same again
                    raise tarfile.ReadError(f"{member.name} claims {member.size:,} bytes")
                key, ending = base_plus_ext(member.name)
                if not member.isfile() or key is None:
                    continue
                picture = Path(member.name).suffix.lower() in NAMED_AS_IMAGES and ending is not None
                if picture and samples.get(key) is None:
                    samples[key] = _member(path, member, whole, stamp)
                samples.setdefault(key, None)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError) as error:
        broken = [Input(str(path), str(path), BROKEN, column=f"{path.name} is not a whole tar ({error}).")]
    empty = "the sample holds no image."
    return [item or Input(f"{path}#{key}", str(path), BROKEN, column=empty) for key, item in samples.items()] + broken


def _member(path: Path, member: tarfile.TarInfo, whole: int, stamp: int) -> Input:
    """Return a file of an archive; one that claims more bytes than the archive has is broken."""
    name = f"{path}#{member.name}"
    if member.issparse() or member.offset_data + member.size > whole:
        said = f"{member.name} claims {member.size:,} bytes, and {path.name} does not hold them."
        return Input(name, str(path), BROKEN, column=said)
    if member.size > MOST_BYTES:
        said = f"{member.name} has {member.size:,} bytes, more than {MOST_BYTES:,}."
        return Input(name, str(path), BROKEN, column=said)
    return Input(name, str(path), member.offset_data, member.size, stamp=stamp)


def _from_tar(file: str, run: list[Input]) -> Iterator[tuple[Input, bytes | Path | DataError]]:
    try:
        opened = open(file, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        yield from ((item, DataError(f"{Path(file).name} could not be opened ({error.strerror}).")) for item in run)
        return
    with opened:
        for item in run:
            if item.place == BROKEN:
                yield item, DataError(item.column)
                continue
            opened.seek(item.place)
            content = opened.read(item.size)
            yield item, content if len(content) == item.size else DataError(f"{Path(file).name} ends too early.")
