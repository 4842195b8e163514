"""What a batch run is on disk: its manifest, its inputs, and shards that appear whole or not at all.

``OUT/_headtilt/inputs.parquet`` lists the inputs, a row group for each shard, and ``OUT/_headtilt/manifest.json``
vouches for it and says what was asked. ``OUT/part-00017.parquet`` is there once shard 17 is done: what is missing is
what is left to do, whoever was killed when, and readers of parquet folders skip names with an underscore or a dot.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout  # comes with torch

from headtilt.apps.batch.inputs import Input, parquet
from headtilt.apps.loading import Wrapped, bundle_fingerprint, model_fingerprint
from headtilt.apps.rows import Row
from headtilt.errors import DataError, OptionError, at_least
from headtilt.io.files import written_whole
from headtilt.sources import Adapted

FORMAT = 2
FOLDER, MANIFEST, INPUTS, LOCK = "_headtilt", "manifest.json", "inputs.parquet", "lock"
UNFINISHED = "." + 32 * "[0-9a-f]" + ".tmp"  # how `written_whole` names files that are not whole yet


@dataclass(frozen=True)
class Job:
    """What to do: the same job into the same folder goes on where it stopped.

    Attributes:
        source: Folder, glob, parquet file or WebDataset; see `sources.listed`.
        out: Folder for the rows.
        wrapped: Model and bundle.
        column: Column of parquet files that holds images or paths; None finds it.
        batch: Images per search.
        shard_rows: Rows per file.
        decoders: Processes that decode; None chooses.
    """

    source: str
    out: Path
    wrapped: Wrapped
    column: str | None = None
    batch: int = 64
    shard_rows: int = 2000
    decoders: int | None = None

    def __post_init__(self) -> None:
        at_least("batch", self.batch, 1)
        at_least("shard_rows", self.shard_rows, 1)

    @property
    def arguments(self) -> dict[str, Any]:
        """What must be the same for a folder to be gone on with: where and by how many it is computed may differ."""
        asked = {"model": self.wrapped.model, "bundle": self.wrapped.bundle, "levels": self.wrapped.levels}
        if self.wrapped.bundle is not None:
            asked.pop("levels")
        return {
            "source": self.source,
            **asked,
            "column": self.column,
            "batch": self.batch,
            "shard_rows": self.shard_rows,
        }


@dataclass(frozen=True)
class Run:
    """A job whose inputs are listed.

    Attributes:
        job: What to do.
        count: Inputs, and so rows.
        model_fingerprint: SHA-256 of the classifier.
        bundle_fingerprint: SHA-256 of the bundle, if there is one.
        mended: What was found damaged in the folder and is computed again, in sentences.
    """

    job: Job
    count: int
    model_fingerprint: str
    bundle_fingerprint: str | None
    mended: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """How many files there will be."""
        return -(-self.count // self.job.shard_rows)

    def rows(self, shard: int) -> int:
        """Return how many rows a shard has."""
        return min(self.job.shard_rows, self.count - shard * self.job.shard_rows)

    def path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.job.out / f"part-{shard:0{max(5, len(str(self.shards - 1)))}d}.parquet"

    def missing(self) -> list[int]:
        """Return the shards that are not there yet."""
        there = {entry.name for entry in os.scandir(self.job.out)}
        return [shard for shard in range(self.shards) if self.path(shard).name not in there]

    def damaged(self) -> dict[Path, str]:
        """Return the files that are there and do not hold the rows they should, with what is wrong with each."""
        found = {}
        for shard in sorted(set(range(self.shards)) - set(self.missing())):
            if said := self._wrong(shard):
                found[self.path(shard)] = said
        return found

    def _wrong(self, shard: int) -> str | None:
        """Return what is wrong with a shard's file: unreadable, too short or long, or that of other inputs."""
        expected = self.inputs(shard)
        try:
            with parquet().ParquetFile(self.path(shard), page_checksum_verification=True) as file:
                if file.metadata.num_rows != len(expected):
                    return f"has {file.metadata.num_rows} rows, not {len(expected)}"
                columns = file.read()
        except Exception as error:  # pyarrow raises its own kinds, OSError and KeyError
            return f"cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ends = [(columns["path"][place].as_py(), expected[place].path) for place in (0, -1)]
        if any(there != wanted for there, wanted in ends):
            return "holds the rows of other inputs"
        vouched = {"model_fingerprint": self.model_fingerprint, "bundle_fingerprint": self.bundle_fingerprint}
        wrong = [name for name, value in vouched.items() if set(columns[name].unique().to_pylist()) != {value}]
        return f"has another {wrong[0]}" if wrong else None

    def inputs(self, shard: int) -> list[Input]:
        """Return the inputs of a shard."""
        with parquet().ParquetFile(self.job.out / FOLDER / INPUTS) as file:
            return [Input(**row) for row in file.read_row_group(shard).to_pylist()]

    def errors(self) -> int:
        """Return how many rows hold an error, of the shards that are there; read from the files' own statistics."""
        total = 0
        for shard in set(range(self.shards)) - set(self.missing()):
            with parquet().ParquetFile(self.path(shard)) as file:
                total += sum(value is not None for value in file.read(columns=["error"])["error"].to_pylist())
        return total


def plan(job: Job, adapted: Adapted, inputs: list[Input]) -> Run:
    """Return the run of a job, its inputs listed and its manifest written, or read where the folder has one already.

    Args:
        job: What to do.
        adapted: Its classifier, which tells its fingerprint.
        inputs: Of its source.
    """
    run = Run(job, len(inputs), model_fingerprint(adapted, job.wrapped.model), bundle_fingerprint(job.wrapped.bundle))
    wanted = {
        "format": FORMAT,
        "arguments": job.arguments,
        "model_fingerprint": run.model_fingerprint,
        "bundle_fingerprint": run.bundle_fingerprint,
        "inputs": run.count,
        "inputs_sha256": _digest(inputs),
        "shards": run.shards,
    }
    folder = job.out / FOLDER
    before = _manifest(folder / MANIFEST)
    if before is not None:
        _check_same_job(before, wanted, job.out)
    elif not (folder / MANIFEST).exists() and any(job.out.glob("part-*.parquet")):
        raise OptionError(f"out must be a folder of its own; {job.out} holds other part-….parquet files. Name another.")
    folder.mkdir(parents=True, exist_ok=True)
    # Written anew each time: the list was made anew, and a damaged file of it would not be noticed.
    _write_inputs(folder / INPUTS, inputs, job.shard_rows)
    if (folder / MANIFEST).exists():
        run = replace(run, mended=_remove_damaged(run, vouched=before is not None))
    with whole(folder / MANIFEST) as unfinished:
        unfinished.write_text(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return run


def _remove_damaged(run: Run, *, vouched: bool) -> tuple[str, ...]:
    """Remove the files of a folder that do not hold the rows they should, and return what was wrong with them.

    Args:
        run: Whose folder it is.
        vouched: Whether its manifest is whole; where it is damaged, nobody knows any more of what the rows are.
    """
    out, parts = run.job.out, {run.path(shard).name for shard in range(run.shards)}
    there = sorted(out.glob("part-*.parquet"))
    if vouched and (others := [path for path in there if path.name not in parts]):
        raise OptionError(f"out must hold the files of this run alone; {others[0]} is none of them. Move it away.")
    said = f"cannot be vouched for, since {out / FOLDER / MANIFEST} is damaged"
    wrong = run.damaged() if vouched else dict.fromkeys(there, said)
    for path in wrong:
        path.unlink()
    return tuple(f"{path} {what}: its rows are computed again." for path, what in wrong.items())


def _manifest(path: Path) -> dict[str, Any] | None:
    """Return a manifest; None where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("arguments"), dict) else None


def _check_same_job(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    """Raise unless a folder was begun by the same job."""
    words = {"inputs_sha256": "the files of the source", "inputs": "the number of inputs"}
    before, now = dict(found), dict(wanted)
    before |= before.pop("arguments", {})
    now |= now.pop("arguments")
    other = [name for name in now if before.get(name) != now[name] and name != "shards"]
    if other:
        told = {name: f"was {before.get(name)!r}, is {now[name]!r}" for name in other} | {"inputs_sha256": "changed"}
        said = "; ".join(f"{words.get(name, name)} {told[name]}" for name in other)
        raise OptionError(f"out must be a new folder or that of the same run; in {out}, {said}. Name another folder.")


def _digest(inputs: Iterable[Input]) -> str:
    digest = hashlib.sha256()
    for item in inputs:
        told = f"{item.path}\0{item.place}\0{item.size}\0{item.stamp}\n"
        digest.update(told.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write_inputs(path: Path, inputs: list[Input], shard_rows: int) -> None:
    import pyarrow

    columns = {field.name: [getattr(item, field.name) for item in inputs] for field in fields(Input)}
    with whole(path) as unfinished:
        # A row group is a shard, so that whoever computes it reads no more than that.
        parquet().write_table(pyarrow.table(columns), unfinished, row_group_size=shard_rows)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file then appears under its own name, complete and on disk, or not at all."""
    try:
        with written_whole(path) as unfinished:
            yield unfinished
            with open(unfinished, "rb") as file:
                os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} could not be written ({error}). Make room or mend it, and start the same command again.")


def write_rows(run: Run, shard: int, rows: list[Row]) -> None:
    """Write the rows of a shard to its file."""
    if len(rows) != run.rows(shard):
        raise DataError(f"shard {shard} has {len(rows)} rows where {run.rows(shard)} were expected.")
    import pyarrow

    text, real = pyarrow.string(), pyarrow.float64()
    kinds = {"score": real, "rotation_deg": real, "scale": real, "shear": real}
    kinds |= {"gated": pyarrow.bool_(), "views": pyarrow.int32()}
    records = [
        {**row.as_dict(), "model_fingerprint": run.model_fingerprint, "bundle_fingerprint": run.bundle_fingerprint}
        for row in rows
    ]
    schema = pyarrow.schema([(name, kinds.get(name, text)) for name in records[0]])
    with whole(run.path(shard)) as unfinished:
        parquet().write_table(
            pyarrow.Table.from_pylist(records, schema=schema), unfinished, compression="zstd", write_page_checksum=True
        )


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder, so that no second run writes to it; a run that is killed lets go by itself."""
    try:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
        held = FileLock(out / FOLDER / LOCK).acquire(timeout=0)
    except Timeout as error:
        raise OptionError(f"another run is writing to {out}. Wait for it, or name another folder.") from error
    except OSError as error:
        raise _unwritable(out, error) from error
    with held:
        for left in chain(out.glob(UNFINISHED), (out / FOLDER).glob(UNFINISHED)):
            left.unlink(missing_ok=True)  # of runs that were killed while they wrote
        yield
