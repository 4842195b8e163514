"""What all items share: what a study is given, a store to go on from after an interruption, the files it leaves."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import headtilt
from headtilt import plot
from headtilt.errors import DataError, HeadtiltError, OptionError
from headtilt.paper.data import load as load_data
from headtilt.paper.experiments.report import commit, metadata, to_json, write_json
from headtilt.paper.experiments.reproduce.workers import Key, Workers, ends, words
from headtilt.plot.style import need_matplotlib
from headtilt.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class UnfinishedError(HeadtiltError):
    """The time for a part is over; what is done is kept, and the same command goes on from there."""


Report = dict[str, Any]
Jobs = Mapping[Key, Callable[[], Any]]


@dataclass(frozen=True)
class Study:
    """What to do, and where.

    Attributes:
        out: Folder for the numbers and the figures.
        quick: Whether small sizes will do.
        device: Where to run.
        folders: Where to look for data.
        datasets: In place of the item's own.
        model: Spec of the photograph classifier, for the items that have one; None takes MobileNetV2 from the data.
        sizes: Sizes of the item to change, by name; "share.images" is one of another's.
        progress: Called with (what is being done, done, of how many).
        command: What was typed.
        until: When to stop before the next unit of work, by `time.monotonic`; None never does.
        workers: Processes that do units of work side by side; None does them here, one after the other.
    """

    out: Path = Path("results")
    quick: bool = False
    device: str = "cpu"
    folders: list[Path] | None = None
    datasets: tuple[str, ...] | None = None
    model: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None
    command: str = ""
    until: float | None = None
    workers: Workers | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker gets: nobody listens there, and it has no workers of its own."""
        return {**self.__dict__, "progress": None, "workers": None}

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell whoever listens how far it is."""
        if self.progress is not None:
            self.progress(what, done, total)

    def available(self, datasets: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
        """Return which of the data sets can be read, and of the others why not; an error where none can."""
        wanted = {name: self._missing(name) for name in self.datasets or datasets}
        there = [name for name, reason in wanted.items() if reason is None]
        reasons = {name: reason for name, reason in wanted.items() if reason is not None}
        if not there:
            raise DataError(next(iter(reasons.values())))
        return there, reasons

    def _missing(self, dataset: str) -> str | None:
        try:
            load_data(dataset, "test", folders=self.folders, limit=1)
        except DataError as error:
            return str(error)
        return None


class Item(Protocol):
    """One table or figure of the paper: a module with these names."""

    NAME: str
    TITLE: str
    FULL: Any
    QUICK: Any
    PAPER: dict[str, Any]

    @staticmethod
    def measure(study: Study, size: Any, store: Store) -> Report:
        """Return what was measured, `verdict` included."""

    @staticmethod
    def draw(report: Report) -> dict[str, Figure]:
        """Return the figures by file name, drawn from the report alone."""


class Store:
    """Units of work that are done, each in a file of its own, so that a run goes on where it stopped.

    Args:
        folder: For the files; another for other settings.
        tell: Told about progress.
        until: See `Study`.
        workers: See `Study`.
    """

    def __init__(
        self,
        folder: Path,
        tell: Progress | None = None,
        until: float | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.folder, self._tell, self._until, self._workers = folder, tell, until, workers

    def gather(self, jobs: Jobs[Key], near: Callable[[Key], Hashable] = ends, *, timed: bool = False) -> dict[Key, Any]:
        """Return the result of each job as it reads back from JSON; those found in the folder are not done again.

        Raises `UnfinishedError` where there is a job to do and the time is over.

        Args:
            jobs: By key; with workers they have to be picklable.
            near: Where workers do them, jobs that share what is slow to load; by default those whose keys begin and end
                alike.
            timed: Whether they measure time, so that nothing may run beside them.
        """
        found, _ = self._gathered(jobs, near, (), timed)
        return found

    def attempt(
        self, jobs: Jobs[Key], near: Callable[[Key], Hashable] = ends
    ) -> tuple[dict[Key, Any], dict[Key, DataError]]:
        """Return what `gather` does, and the errors of those jobs whose data are missing."""
        return self._gathered(jobs, near, (DataError,), False)

    def _gathered(
        self, jobs: Jobs[Key], near: Callable[[Key], Hashable], kept: tuple[type[Any], ...], timed: bool
    ) -> tuple[dict[Key, Any], dict[Key, Any]]:
        """Return results and those errors that are of the kinds to be kept; others are raised."""
        found: dict[Key, Any] = {}
        errors: dict[Key, Any] = {}
        beside = self._workers is not None and not timed
        if beside:
            left = {key: job for key, job in jobs.items() if not self._path(key).exists()}
            errors = self._side_by_side(left, near, kept, len(jobs)) if left else {}
            jobs = {key: job for key, job in jobs.items() if key not in errors}
        for number, (key, job) in enumerate(jobs.items()):
            if not beside:
                self._say(key, number, len(jobs))
            path = self._path(key)
            if not path.exists() and self._over():
                raise _unfinished(key, number, len(jobs))
            try:
                found[key] = read_json(path) if path.exists() else self._do(path, job)
            except kept as error:
                errors[key] = error
        return found, errors

    def _side_by_side(
        self, jobs: Jobs[Key], near: Callable[[Key], Hashable], kept: tuple[type[Any], ...], total: int
    ) -> dict[Key, Any]:
        """Store what workers find, and return the errors to be kept; another one ends it, once all is stored."""
        assert self._workers is not None
        errors: dict[Key, Any] = {}
        fatal: dict[Key, Exception] = {}
        done = total - len(jobs)
        if self._over():
            raise _unfinished(next(iter(jobs)), done, total)  # before a process is started

        def begin(key: Key) -> bool:
            if fatal or self._over():
                return False
            self._say(key, done, total)
            return True

        for key, answer in self._workers.answers(jobs, near, begin):
            done += 1
            if isinstance(answer, Exception):
                (errors if isinstance(answer, kept) else fatal)[key] = answer
            else:
                write_json(self._path(key), json.loads(answer))
        for key in jobs:
            if key in fatal:
                raise fatal[key]
        left = [key for key in jobs if key not in errors and not self._path(key).exists()]
        if left:
            raise _unfinished(left[0], total - len(left), total)
        return errors

    def _say(self, key: Hashable, done: int, total: int) -> None:
        if self._tell is not None:
            self._tell(words(key), done, total)

    def _over(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until

    def _path(self, key: Hashable) -> Path:
        parts = key if isinstance(key, tuple) else (key,)
        return self.folder / (re.sub(r"[^\w.+-]+", "_", "-".join(str(part) for part in parts)) + ".json")

    def within(self, *names: str) -> Store:
        """Return the store of a part of the work, such as that on one data set."""
        return Store(self.folder / "+".join(names), self._tell, self._until, self._workers)

    def clear(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.is_dir() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    @staticmethod
    def _do(path: Path, job: Callable[[], Any]) -> Any:
        # Through JSON at once, so that a run in one go and one in two give the same numbers.
        value = json.loads(to_json(job()))
        write_json(path, value)
        return value


def _unfinished(key: Hashable, done: int, total: int) -> UnfinishedError:
    return UnfinishedError(f"stopped before {words(key)}; {done} of {total} units are done.")


def reproduce(item: Item, study: Study) -> list[Path]:
    """Return the files written: NAME.json and the figures drawn from it."""
    need_matplotlib()
    size = sized(item, study)
    settings = settings_of(item, study)
    folder = study.out / ".partial" / f"{item.NAME}-{digest(settings)}"
    store = Store(folder, study.progress, study.until, study.workers)
    report = {
        "name": item.NAME,
        "title": item.TITLE,
        **settings,
        "datasets": study.datasets,
        **item.measure(study, size, store),
        "paper": item.PAPER,
        **metadata(study.command),
    }
    path = write_json(study.out / f"{item.NAME}.json", report)
    figures = redraw(item, study.out)
    if study.datasets is None:  # parts of a whole are kept for it
        store.clear()
    return [path, *figures]


def settings_of(item: Item, study: Study) -> dict[str, Any]:
    """Return what decides the numbers of an item, beside the code."""
    return {
        "quick": study.quick,
        "device": study.device.partition(":")[0],
        "model": study.model,
        "sizes": asdict(sized(item, study)),
    }


def done(item: Item, study: Study) -> bool:
    """Return whether NAME.json is there, by these settings and this commit."""
    path = study.out / f"{item.NAME}.json"
    if not path.exists():
        return False
    report = read_json(path)
    settings = json.loads(to_json({**settings_of(item, study), "datasets": study.datasets}))
    return report.get("commit") == commit() and all(report.get(key) == value for key, value in settings.items())


def redraw(item: Item, out: Path) -> list[Path]:
    """Return the figures, drawn again from NAME.json alone."""
    path = out / f"{item.NAME}.json"
    if not path.exists():
        raise OptionError(f"{path} is not there to draw from. Run headtilt reproduce {item.NAME} first.")
    return [plot.save(figure, out / f"{name}.png") for name, figure in item.draw(read_json(path)).items()]


def sized(item: Item, study: Study) -> Any:
    """Return the item's sizes, with the study's changes."""
    size = item.QUICK if study.quick else item.FULL
    for name, value in study.sizes.items():
        size = resized(size, name.split("."), value)
    return size


def resized(size: Any, path: Sequence[str], value: Any) -> Any:
    """Return sizes with one of them changed.

    Args:
        size: A frozen value, a part of one, or a mapping of such.
        path: The name of the size; in parts, where it is one of another's: `("share", "images")`.
        value: What it shall be.
    """
    name, *rest = path
    known = (
        list(size) if isinstance(size, Mapping) else [part.name for part in fields(size)] if is_dataclass(size) else []
    )
    if name not in known:
        raise OptionError(
            f"the size to set must be one of {', '.join(known) or 'none: this is a number'}; got {name!r}."
        )
    new = resized(size[name] if isinstance(size, Mapping) else getattr(size, name), rest, value) if rest else value
    return {**size, name: new} if isinstance(size, Mapping) else replace(size, **{name: new})


def digest(settings: Any) -> str:
    """Return a short name of settings and version: units measured under others are not mixed with these."""
    text = to_json({"version": headtilt.__version__, "settings": settings})
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_json(path: Path) -> Any:
    """Return what a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}). Delete it and run again.") from error
