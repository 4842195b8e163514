"""Image files decoded in processes of their own, each with a deadline and a limit on memory: what overruns is killed.

The one door through which commands, batch runs, the service and the playground read files of others. The processes come
from pebble's pool, which ends and replaces a worker whose time is up. They are no sandbox: they bound what a file may
cost, not what a hole in a decoder might let it do.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as Late  # another class than the built-in one before Python 3.11
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from headtilt.errors import DataError, MissingExtraError, at_least, positive
from headtilt.sources import Adapted, Square
from headtilt.sources.decode import TooLargeError
from headtilt.sources.images import MOST_PIXELS, as_seen, cut, name_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pebble import ProcessPool
    from typing_extensions import Self

BESIDE_PIXELS = 256_000_000  # bytes that a process may take beside those of the pixels
BYTES_PER_PIXEL = 16  # transparent colours are held four times over while they are laid over black
Outcome = Literal["done", "refused", "timed_out", "killed"]


class OverdueError(DataError):
    """An image took longer to decode than it may."""


class KilledError(DataError):
    """The process that decoded an image ended; most often it was out of memory."""


class NoDecoderError(DataError):
    """There is no process that could decode an image."""


@dataclass(frozen=True)
class Refusal:
    """Why there is no image, as it comes back from another process."""

    large: bool
    said: str


class Decoders:
    """Processes that turn image files into the squares that a model sees; started when the first file comes.

    Args:
        workers: Processes; None takes one for each core, eight at most.
        seconds: Most that an image may take.
        most_pixels: Larger images are refused before they are decoded; memory is bounded in proportion.
        formats: Names of Pillow's formats that are read; None reads all of them.

    Attributes:
        outcomes: How many images were "done", "refused", "timed_out" and "killed".
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        seconds: float = 30.0,
        most_pixels: int = MOST_PIXELS,
        formats: tuple[str, ...] | None = None,
    ) -> None:
        self.workers = min(8, os.cpu_count() or 1) if workers is None else at_least("workers", workers, 1)
        positive("seconds", seconds)
        self.seconds, self.most_pixels, self.formats = seconds, at_least("most_pixels", most_pixels, 1), formats
        self.outcomes: Counter[Outcome] = Counter()
        self.waiting: dict[Future[Tensor], float] = {}  # since when
        self._lock, self._closed = Lock(), False
        self._pool: ProcessPool | None = None
        self._starting: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start the processes while something else is done: the first one imports what all of them need."""
        self._starting = Thread(target=self._start, name="decoders", daemon=True)
        self._starting.start()
        return self

    def submit(self, source: Any, square: Square) -> Future[Tensor]:
        """Return a promise of the square (C, size, size), or of a `DataError`; cancelled, its process is killed.

        Args:
            source: A path or the bytes of a file. All else that `images.upright` takes is no foreign file, and is
                read at once.
            square: What to cut.
        """
        future: Future[Tensor] = Future()
        if not isinstance(source, (str, Path, bytes)):
            _fulfil(future, lambda: as_seen(cut(source, square, most_pixels=self.most_pixels), square))
            return future
        # Processes do not follow when this one changes its folder.
        there = source if isinstance(source, bytes) else os.path.abspath(source)
        held = [there]
        words = (held, square, self.most_pixels, self.formats, name_of(source), self.seconds)
        self.waiting[future] = time.monotonic()
        future.add_done_callback(lambda done: self.waiting.pop(done, None))
        # The two promises know each other: without this, the file would stay until garbage is collected.
        future.add_done_callback(lambda _: held.clear())
        self._schedule(future, words, square, again=True)
        return future

    def square_of(self, source: Any, adapted: Adapted) -> Tensor:
        """Return what the model sees (C, size, size) of a source; see `submit`."""
        return self.submit(source, adapted.square).result()

    def overdue(self) -> bool:
        """Return whether an image has waited for more than twice what any may take: there are too many, or bad ones."""
        since = min(list(self.waiting.values()), default=None)
        return since is not None and time.monotonic() - since > 2 * self.seconds

    def close(self) -> None:
        """End all processes, whatever they are doing; whoever still waits is told so."""
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if self._starting is not None:
            self._starting.join()
        if pool is not None:
            _end(pool)
            pool.join()
        for future in list(self.waiting):
            _fulfil(future, lambda: _raise(NoDecoderError("the processes that decode images were ended.")))

    def _schedule(self, future: Future[Tensor], words: tuple[Any, ...], square: Square, *, again: bool) -> None:
        try:
            there = self._started().schedule(_work, words, timeout=self.seconds)
        except RuntimeError as error:  # the pool broke or was closed meanwhile
            self._failed(future, words, square, error, again)
            return
        future.add_done_callback(lambda mine: there.cancel() if mine.cancelled() else None)

        def done(there: Any) -> None:
            error = CancelledError() if there.cancelled() else there.exception()
            if error is not None:
                self._failed(future, words, square, error, again)
                return
            found: NDArray[np.uint8] | Refusal = there.result()
            self.outcomes["refused" if isinstance(found, Refusal) else "done"] += 1
            _fulfil(future, lambda: as_seen(_checked(found), square))

        there.add_done_callback(done)

    def _failed(
        self, future: Future[Tensor], words: tuple[Any, ...], square: Square, error: BaseException, again: bool
    ) -> None:
        """Tell why there is no image; where the whole pool broke down, try once more in another."""
        if future.cancelled():
            return
        name = words[4]
        broken = isinstance(error, RuntimeError) or self._closed  # BrokenProcessPool is such a one
        if broken and again and not self._closed:
            self._forget()
            self._schedule(future, words, square, again=False)
            return
        if broken:
            said = "Where this is a script of your own, put what it does below: if __name__ == '__main__'."
            failure: DataError = NoDecoderError(f"{name}: no process that decodes images stays alive. {said}")
        elif isinstance(error, Late):
            failure = OverdueError(f"{name} took more than {self.seconds:g} s to decode.")
            self.outcomes["timed_out"] += 1
        else:
            failure = KilledError(f"{name} took too much memory to decode, or broke its decoder.")
            self.outcomes["killed"] += 1
        _fulfil(future, lambda: _raise(failure))

    def _started(self) -> ProcessPool:
        try:
            from pebble import ProcessPool
        except ImportError as error:
            raise MissingExtraError("pebble", "data") from error
        with self._lock:
            if self._closed:
                raise RuntimeError("the decoders are closed")
            if self._pool is None:
                memory = BESIDE_PIXELS + BYTES_PER_PIXEL * self.most_pixels
                self._pool = ProcessPool(self.workers, initializer=_bounded, initargs=[memory], context=_context())
            return self._pool

    def _start(self) -> None:
        with suppress(RuntimeError):  # closed meanwhile
            self._started().schedule(_stay_alive)

    def _forget(self) -> None:
        """Drop a pool that broke, so that the next image gets another."""
        with self._lock:
            pool = self._pool
            if pool is None or pool.active:
                return
            self._pool = None
        _end(pool)


def _context() -> Any:
    """Return how processes start: forked from a clean one that has imported what they need, where there are such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "PIL.Image"])
    return context


def _bounded(memory: int) -> None:
    """Limit the memory of this process, beyond what it has already, and let it be killed wherever it is."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of Python's would wait for the decoder to return
    gc.freeze()  # collecting what was there before the fork would write to its pages, and so copy them: 40 MB each
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _work(
    held: list[str | bytes],
    square: Square,
    most_pixels: int,
    formats: tuple[str, ...] | None,
    name: str,
    seconds: float,
) -> NDArray[np.uint8] | Refusal:
    """Return the square of a file, or why there is none: what a worker does, which keeps nothing of a file."""
    _bound_time(seconds)
    source = held.pop()  # the pool holds on to what it was given until the next file comes
    try:
        return cut(source, square, most_pixels=most_pixels, formats=formats, name=name)
    except DataError as error:
        if isinstance(error.__cause__, MemoryError):
            os._exit(1)  # little may be left to tell it with
        return Refusal(isinstance(error, TooLargeError), str(error))
    except MemoryError:
        os._exit(1)
    finally:
        del source
        trim_memory()


def trim_memory() -> None:
    """Give memory that is free back to the system, where the C library can: glibc keeps it in shreds otherwise."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _bound_time(seconds: float) -> None:
    """Let the system end this process should it still compute when nobody is left who would."""
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, hard))


def _end(pool: ProcessPool) -> None:
    """Tell a pool to end, and kill its processes; a thread of the pool itself may do so."""
    pool.stop()
    # Killed first: one that is only just starting would look for locks that are gone, and tell it on stderr.
    for worker in list(pool._pool_manager.worker_manager.workers.values()):
        worker.kill()


def _stay_alive() -> None:
    """Do what a worker does that is only to be there."""


def _checked(found: NDArray[np.uint8] | Refusal) -> NDArray[np.uint8]:
    if isinstance(found, Refusal):
        raise (TooLargeError if found.large else DataError)(found.said)
    return found


def _raise(error: BaseException) -> Tensor:
    raise error


def _fulfil(future: Future[Tensor], act: Any) -> None:
    """Give a promise what an action returns or raises, unless nobody waits for it any more."""
    with suppress(InvalidStateError):
        try:
            future.set_result(act())
        except InvalidStateError:
            raise
        except BaseException as error:
            future.set_exception(error)
