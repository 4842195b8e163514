"""Files: others' are read only where they are plain and of a bounded size, our own are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headtilt.errors import DataError, MissingExtraError


def check_plain(path: Path, most: int) -> None:
    """Raise `DataError` unless a path leads to a regular file of at most so many bytes; a missing one passes."""
    try:
        found = os.stat(path)
    except OSError:
        return  # whoever opens it says what is wrong
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is no regular file. Replace it.")
    if found.st_size > most:
        raise DataError(f"{path} has {found.st_size:,} bytes, more than {most:,}.")


def read_plain(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most so many bytes."""
    check_plain(path, most)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path} has more than {most:,} bytes.")
    return content


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, read a piece at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a place beside a file to write to; what was written then takes the file's name, unless an error came."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Short, since the target's own name may be as long as names can be; and nobody takes it for an image.
    unfinished = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        with suppress(OSError):  # which would hide what went wrong before
            unfinished.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return where downloads and decoded sets are kept: HEADTILT_CACHE, or the platform's cache folder."""
    if named := os.environ.get("HEADTILT_CACHE"):
        return Path(named).expanduser()
    try:
        import platformdirs
    except ImportError as error:
        raise MissingExtraError("platformdirs", "data") from error
    return Path(platformdirs.user_cache_dir("headtilt"))
