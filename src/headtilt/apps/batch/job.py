"""Rows for any number of images, on this machine: decoding runs ahead of the search, shard after shard is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread

from torch import Tensor

from headtilt.apps.batch.inputs import Input, listed, payloads
from headtilt.apps.batch.plan import Job, Run, alone, plan, write_rows
from headtilt.apps.loading import bundle_fingerprint, model_fingerprint
from headtilt.apps.rows import Row, answered
from headtilt.errors import DataError
from headtilt.its import ITS
from headtilt.progress import Progress
from headtilt.sources import Adapted
from headtilt.sources.decoders import Decoders

log = logging.getLogger("headtilt.batch")
AHEAD = 4  # batches that are decoded while one is searched


class Worker:
    """Holds the model and turns inputs into rows: the one piece of code that all engines run.

    Args:
        run: What to do.
        robust: The search.
        adapted: The classifier inside it.
    """

    def __init__(self, run: Run, robust: ITS, adapted: Adapted) -> None:
        self.run, self.robust, self.adapted = run, robust, adapted
        found = model_fingerprint(adapted, run.job.wrapped.model)
        if found != run.model_fingerprint:
            raise DataError(
                f"the model here has the fingerprint {found[:12]}…, not the run's {run.model_fingerprint[:12]}…."
            )
        if bundle_fingerprint(run.job.wrapped.bundle) != run.bundle_fingerprint:
            raise DataError(f"the bundle {run.job.wrapped.bundle} here is not the one that the run began with.")
        self.decoders = Decoders(run.job.decoders)  # end with the process where nobody closes them

    def write(self, shards: list[int], done: Callable[[int], None] | None = None) -> None:
        """Write the shards, decoding ahead of the search across their borders."""
        inputs = chain.from_iterable(map(self.run.inputs, shards))
        ahead = AHEAD * self.run.job.batch
        with decoding(inputs, self.adapted, self.decoders, ahead) as stream:
            for shard in shards:
                rows = list(self._rows(islice(stream, self.run.rows(shard))))
                write_rows(self.run, shard, rows)
                if done is not None:
                    done(shard)

    def _rows(self, stream: Iterator[tuple[str, Tensor | str]]) -> Iterator[Row]:
        while batch := list(islice(stream, self.run.job.batch)):
            yield from (answer.row for answer in answered(self.robust, self.adapted, batch))


@contextmanager
def decoding(
    inputs: Iterable[Input], adapted: Adapted, decoders: Decoders, ahead: int
) -> Iterator[Iterator[tuple[str, Tensor | str]]]:
    """Yield prepared images (or why there is none) in order, while a thread reads those that come next.

    Args:
        inputs: What to read.
        adapted: For whom to prepare it.
        decoders: Who decodes it.
        ahead: Images that may wait, decoded, for the search: bounds memory.
    """
    waiting: Queue[tuple[str, Future[Tensor]] | BaseException | None] = Queue(maxsize=ahead)
    stop = Event()

    def put(value: tuple[str, Future[Tensor]] | BaseException | None) -> None:
        while not stop.is_set():
            with suppress(Full):
                waiting.put(value, timeout=0.1)
                return

    def feed() -> None:
        try:
            for item, payload in payloads(inputs):
                if stop.is_set():
                    return
                put((item.path, _future_image(payload, adapted, decoders)))
        except BaseException as error:
            put(error)
        put(None)

    def take() -> Iterator[tuple[str, Tensor | str]]:
        while (found := waiting.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            path, promise = found
            try:
                yield path, promise.result()
            except DataError as error:
                yield path, str(error)

    feeder = Thread(target=feed, name="read", daemon=True)
    feeder.start()
    try:
        yield take()
    finally:
        stop.set()
        feeder.join()


def _future_image(payload: bytes | Path | DataError, adapted: Adapted, decoders: Decoders) -> Future[Tensor]:
    if not isinstance(payload, DataError):
        return decoders.submit(payload, adapted.square)
    failed: Future[Tensor] = Future()
    failed.set_exception(payload)
    return failed


def predict(
    job: Job, engine: Callable[[Run, ITS, Adapted, Progress], None] | None = None, tell: Progress | None = None
) -> Run:
    """Return the run of a job after all of its rows are on disk; only what was missing is computed.

    Args:
        job: What to do.
        engine: Computes the shards that are missing; None computes them here.
        tell: Called with (what, done, total) rows.
    """
    tell = tell or (lambda *_: None)
    tell("listing the inputs", 0, 1)
    inputs = listed(job.source, column=job.column, leave_out=job.out)  # before there is a folder for its rows
    robust, adapted = job.wrapped.load()
    with alone(job.out):
        run = plan(job, adapted, inputs)
        for sentence in run.mended:
            log.warning("%s", sentence)
        (engine or compute_here)(run, robust, adapted, tell)
        left = run.missing()
    if left:
        raise DataError(
            f"{len(left)} of {run.shards} files are still missing in {job.out}. Start the same command again."
        )
    return run


def compute_here(run: Run, robust: ITS, adapted: Adapted, tell: Progress) -> None:
    """Compute what is missing on this machine."""
    missing = run.missing()
    finished = run.count - sum(map(run.rows, missing))
    tell("searching", finished, run.count)

    def done(shard: int) -> None:
        nonlocal finished
        finished += run.rows(shard)
        tell("searching", finished, run.count)

    worker = Worker(run, robust, adapted)
    with worker.decoders:
        worker.write(missing, done)
