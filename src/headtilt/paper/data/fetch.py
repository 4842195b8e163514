"""Where data sets lie on this machine, and how they get there."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headtilt.errors import DataError, MissingExtraError
from headtilt.io.files import cache_folder
from headtilt.paper.data.transfer import Downloader

Folders = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded.

    Attributes:
        urls: Where it lies, tried in order.
        known_hash: Checksum of what is kept, as ``algorithm:hex``.
        target: Where it is kept inside the cache folder.
        packed: Whether it travels gzipped and is kept unpacked.
    """

    urls: tuple[str, ...]
    known_hash: str
    target: str
    packed: bool = False


MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    "gtsrb": ("https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/",),
}
# The archives' published checksums are MD5; what each leaves behind in the cache folder follows.
GTSRB_ARCHIVES = {
    "train": (("GTSRB_Final_Training_Images.zip", "f33fd80ac59bff73c82d25ab499e03a3", "GTSRB/Final_Training"),),
    "test": (
        ("GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5", "GT-final_test.csv"),
        ("GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185", "GTSRB/Final_Test"),
    ),
}


def data_folders(folders: Folders = None) -> tuple[Path, ...]:
    """Return the folders data is looked for in: those given, or those of HEADTILT_DATA; then the cache folder."""
    if folders is None:
        named = [name for name in os.environ.get("HEADTILT_DATA", "").split(os.pathsep) if name]
        return (*(Path(name).expanduser() for name in named), cache_folder())
    given = [folders] if isinstance(folders, (str, Path)) else folders
    paths = tuple(Path(folder).expanduser() for folder in given)
    for path in paths:
        if not path.is_dir():
            raise DataError(f"folders must name folders that exist; got {str(path)!r}.")
    return (*paths, cache_folder())


def find(relative_candidates: Iterable[str], folders: Iterable[Path]) -> Path | None:
    """Return the first candidate that exists, by folder and then by candidate; None where there is none."""
    candidates = list(relative_candidates)
    return next((path for folder in folders for name in candidates if (path := folder / name).exists()), None)


def missing(name: str, what: str, folders: Iterable[Path], why: str = "") -> DataError:
    """Return the error for a data set that is not there: what to put where, and where it was looked for."""
    looked = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in folders)
    return DataError(
        f"{name} was not found. Put {what} into a data folder, and name that folder in the environment variable "
        f"HEADTILT_DATA or with folders=. Looked in: {looked}.{f' {why}' if why else ''}"
    )


def download_idx(name: str, kept_in: str, sha256: dict[str, str], files: Iterable[str]) -> None:
    """Fetch idx files, unpacked and checked, into the folder `kept_in` of the cache folder."""
    for file in files:
        urls = tuple(f"{mirror}{file}.gz" for mirror in MIRRORS[name])
        retrieve(Remote(urls, f"sha256:{sha256[file]}", f"{kept_in}/{file}", packed=True), cache_folder())


def download_gtsrb(split: str) -> None:
    """Fetch the official archives of a split and unpack them in the cache folder."""
    cache = cache_folder()
    for name, md5, leaves in GTSRB_ARCHIVES[split]:
        if not (cache / leaves).exists():
            urls = tuple(f"{mirror}{name}" for mirror in MIRRORS["gtsrb"])
            archive = retrieve(Remote(urls, f"md5:{md5}", f"downloads/{name}"), cache)
            unzip(archive, leaves, cache)
            archive.unlink()


def retrieve(remote: Remote, cache: Path) -> Path:
    """Return where the file lies after its checksum was found right, fetching it if need be."""
    try:
        import pooch
    except ImportError as error:
        raise MissingExtraError("pooch", "data") from error
    target = cache / remote.target
    failures = []
    for url in remote.urls:
        # A part for each mirror: bytes of two differently packed files must not be joined.
        part = target.with_name(f"{target.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
        downloader = Downloader(part, unpack=remote.packed, progress=_progress(target.name))
        try:
            return Path(pooch.retrieve(url, remote.known_hash, target.name, target.parent, downloader=downloader))
        except DataError as error:
            failures.append(str(error))
        except ValueError:
            failures.append(f"{url} sent something else than the file it should: its checksum is wrong.")
        except OSError as error:
            failures.append(f"{target} could not be written ({error}).")
    raise DataError(f"{target.name} could not be downloaded. {' '.join(failures)}")


def unzip(archive: Path, wanted: str, folder: Path) -> None:
    """Unpack a file or folder of the archive into `folder`, whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="unpacking-") as temporary:
            with zipfile.ZipFile(archive) as file:
                file.extractall(temporary)
            target = folder / wanted
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(Path(temporary, wanted), target)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{wanted} could not be unpacked from {archive} ({error}). Remove it and try again.") from error


def _progress(name: str) -> Callable[[int, int | None], None] | None:
    """Return what writes one line that renews itself, or None where nobody would see it."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int | None) -> None:
        whole = "" if total is None else f" of {total / 1e6:.1f}"
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{name}: {done / 1e6:.1f}{whole} MB{end}")
        sys.stderr.flush()

    return show
