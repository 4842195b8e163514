"""Rows for any number of images, on this machine: decoding runs ahead of the search, shard after shard is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread

import torch
from torch import Tensor

from headtilt.apps.batch.inputs import Input, listed, payloads
from headtilt.apps.batch.plan import Job, Run, alone, plan, write_rows
from headtilt.apps.loading import model_fingerprint
from headtilt.apps.rows import Row, rows_of
from headtilt.errors import DataError
from headtilt.its import ITS
from headtilt.sources import Adapted
from headtilt.sources.images import square_of

AHEAD = 4  # batches that are decoded while one is searched
Tell = Callable[[str, int, int], None]


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

    def write(self, shards: list[int], done: Callable[[int], None] | None = None) -> None:
        """Write the shards, decoding ahead of the search across their borders."""
        inputs = chain.from_iterable(map(self.run.inputs, shards))
        with decoding(inputs, self.adapted, self.run.job.threads, AHEAD * self.run.job.batch) as stream:
            for shard in shards:
                rows = list(self._rows(islice(stream, self.run.rows(shard))))
                write_rows(self.run, shard, rows)
                if done is not None:
                    done(shard)

    def _rows(self, stream: Iterator[tuple[str, Tensor | DataError]]) -> Iterator[Row]:
        while batch := list(islice(stream, self.run.job.batch)):
            yield from answers(self.robust, self.adapted, batch)


def answers(robust: ITS, adapted: Adapted, batch: list[tuple[str, Tensor | DataError]]) -> Iterator[Row]:
    """Yield a row for each prepared image or error of a batch, in order."""
    good = [(path, image) for path, image in batch if isinstance(image, Tensor)]
    found: Iterator[Row] = iter(())
    if good:
        result = robust.search(torch.stack([image for _, image in good]))
        found = iter(rows_of(result, [path for path, _ in good], adapted.labels))
    for path, image in batch:
        yield next(found) if isinstance(image, Tensor) else Row(path, error=str(image))


@contextmanager
def decoding(
    inputs: Iterable[Input], adapted: Adapted, threads: int | None, ahead: int
) -> Iterator[Iterator[tuple[str, Tensor | DataError]]]:
    """Yield prepared images (or why there is none) in order, while threads read and decode those that come next.

    Args:
        inputs: What to read.
        adapted: For whom to prepare it.
        threads: That decode; None takes one for each core, eight at most.
        ahead: Images that may wait, decoded, for the search: bounds memory.
    """
    threads = threads or min(8, os.cpu_count() or 1)
    waiting: Queue[Future[tuple[str, Tensor | DataError]] | None] = Queue(maxsize=ahead)
    stop = Event()

    def put(value: Future[tuple[str, Tensor | DataError]] | None) -> None:
        while not stop.is_set():
            with suppress(Full):
                waiting.put(value, timeout=0.1)
                return

    def feed() -> None:
        try:
            for item, payload in payloads(inputs):
                if stop.is_set():
                    return
                put(pool.submit(ready, item.path, payload, adapted))
        except BaseException as error:
            failed: Future[tuple[str, Tensor | DataError]] = Future()
            failed.set_exception(error)
            put(failed)
        put(None)

    def take() -> Iterator[tuple[str, Tensor | DataError]]:
        while (future := waiting.get()) is not None:
            yield future.result()

    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        feeder = Thread(target=feed, name="read", daemon=True)
        feeder.start()
        try:
            yield take()
        finally:
            stop.set()
            feeder.join()
            pool.shutdown(cancel_futures=True)


def ready(path: str, payload: bytes | Path | DataError, adapted: Adapted) -> tuple[str, Tensor | DataError]:
    """Return the name of an input with the image as the model sees it, or with why there is none."""
    if isinstance(payload, DataError):
        return path, payload
    try:
        return path, square_of(payload, adapted)
    except DataError as error:
        return path, error


def predict(job: Job, engine: Callable[[Run, ITS, Adapted, Tell], None] | None = None, tell: Tell | None = None) -> Run:
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
        (engine or here)(run, robust, adapted, tell)
        left = run.missing()
    if left:
        raise DataError(
            f"{len(left)} of {run.shards} files are still missing in {job.out}. Start the same command again."
        )
    return run


def here(run: Run, robust: ITS, adapted: Adapted, tell: Tell) -> None:
    """Compute what is missing on this machine."""
    missing = run.missing()
    finished = run.count - sum(map(run.rows, missing))
    tell("searching", finished, run.count)

    def done(shard: int) -> None:
        nonlocal finished
        finished += run.rows(shard)
        tell("searching", finished, run.count)

    Worker(run, robust, adapted).write(missing, done)
