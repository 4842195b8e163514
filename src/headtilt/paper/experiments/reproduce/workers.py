"""Units of work side by side, in processes that keep what they loaded from one unit to the next."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar, cast

import torch

from headtilt.errors import HeadtiltError, at_least
from headtilt.paper.experiments.report import to_json

Key = TypeVar("Key", bound=Hashable)
Job = Callable[[], Any]
FAREWELL = 5.0  # seconds that a process has to end when it is told to


class WorkerError(HeadtiltError):
    """A process that did a unit of work ended in the middle of it."""


class ElsewhereError(Exception):
    """Where in a worker an error came from: its text is the traceback there."""


class Workers:
    """Processes that do units of work; they start when they are first needed, and end with the block.

    Args:
        count: How many. Each uses its share of this process's threads.
    """

    def __init__(self, count: int) -> None:
        self.count = at_least("jobs", count, 1)
        self._hands: list[Hand] = []

    def __enter__(self) -> Workers:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, whatever they are doing."""
        for hand in self._hands:
            hand.process.terminate()  # all of them, before the first is waited for
        for hand in self._hands:
            hand.end()
        self._hands.clear()

    def answers(
        self,
        jobs: Mapping[Key, Job],
        near: Callable[[Key], Hashable],
        begin: Callable[[Key], bool],
    ) -> Iterator[tuple[Key, str | Exception]]:
        """Yield each job's key with what it returned, as JSON, or with the error it raised; in the order they end.

        All jobs go to every process at once, so that what they share, they share there as well. A job for which memory
        ran out is done again in the end, without others beside it.

        Args:
            jobs: What to do; picklable.
            near: Jobs that are near one another share what is slow to load; a process stays near where it is.
            begin: Asked right before a job is begun. Once it says no, those under way are the last.
        """
        jobs = dict(jobs)
        plan = Plan.of(jobs, near)
        hands = self._ready(min(self.count, len(jobs)), jobs)
        later: deque[Key] = deque()
        put_off: set[Key] = set()
        under_way: dict[Connection, tuple[Hand, Key]] = {}
        goes_on = True

        def give(hand: Hand, key: Key) -> bool:
            if not begin(key):
                return False
            hand.place = near(key)
            with suppress(OSError):  # one that has ended has nobody to hear it; `answer` will say so
                hand.pipe.send(key)
            under_way[hand.pipe] = (hand, key)
            return True

        try:
            while True:
                for hand in hands:
                    if goes_on and hand.pipe not in under_way and (key := plan.next(hand.place)) is not None:
                        goes_on = give(hand, key)
                if goes_on and later and hands and not under_way:
                    goes_on = give(hands[0], later.popleft())
                if not under_way:
                    return
                for pipe in wait(list(under_way)):
                    hand, key = under_way.pop(cast(Connection, pipe))
                    answer = hand.answer(key)
                    if isinstance(answer, WorkerError):
                        hands.remove(hand)
                        self._hands.remove(hand)
                    if isinstance(answer, torch.OutOfMemoryError) and key not in put_off:
                        put_off.add(key)
                        later.append(key)
                        continue
                    yield key, answer
        finally:
            for hand, _ in under_way.values():  # whoever asked has gone, and would take their answers for others
                hand.end()
                self._hands.remove(hand)

    def _ready(self, count: int, jobs: dict[Any, Job]) -> list[Hand]:
        """Return so many processes that know the jobs."""
        self._hands = [hand for hand in self._hands if hand.process.is_alive()]
        threads = max(torch.get_num_threads() // self.count, 1)
        while len(self._hands) < count:
            self._hands.append(Hand.hired(threads))
        for hand in self._hands[:count]:
            with suppress(OSError):
                hand.pipe.send(jobs)
            hand.place = None
        return self._hands[:count]


@dataclass
class Hand:
    """One process, seen from here.

    Attributes:
        process: Itself.
        pipe: To it, and back.
        place: Where it is: what its last job was near to.
    """

    process: BaseProcess
    pipe: Connection
    place: Hashable = None

    @staticmethod
    def hired(threads: int) -> Hand:
        """Return a new one; a process that was forked could not use the GPU, so that this one is spawned."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, threads), daemon=True)
        with deaf():
            process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return Hand(process, ours)

    def answer(self, key: Hashable) -> str | Exception:
        """Return what came back."""
        try:
            answer, where = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(FAREWELL)
            self.pipe.close()
            code = self.process.exitcode
            why = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return WorkerError(
                f"a worker ended in the middle of {words(key)} ({why}). "
                "If memory is short, give a smaller --jobs; the same command continues."
            )
        if isinstance(answer, Exception):
            answer.__cause__ = ElsewhereError(where)
        return cast("str | Exception", answer)

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.process.terminate()
        self.process.join(FAREWELL)
        self.process.kill()  # nothing happens to one that has ended
        self.pipe.close()


@dataclass
class Plan:
    """Which job comes next.

    Attributes:
        rows: Jobs that are near one another, by place.
        visits: How many processes have been sent to each place.
    """

    rows: dict[Hashable, deque[Any]]
    visits: dict[Hashable, int] = field(default_factory=dict)

    @staticmethod
    def of(jobs: dict[Key, Job], near: Callable[[Key], Hashable]) -> Plan:
        """Return the plan for these jobs, the last first: items list what is quick first, and tails should be short."""
        rows: dict[Hashable, deque[Any]] = {}
        for key in reversed(jobs):
            rows.setdefault(near(key), deque()).append(key)
        return Plan(rows)

    def next(self, place: Hashable) -> Any:
        """Return the next job for a process that is at a place, None where none is left.

        It goes on there in order. Where nothing is left, it takes the last job of the place with most left, which is
        far from what the process there will do next; a place where nobody has been, it starts from the front.
        """
        if place in self.rows:
            return self._take(place, first=True)
        if not self.rows:
            return None
        fresh = [at for at in self.rows if at not in self.visits]
        at = fresh[0] if fresh else max(self.rows, key=lambda at: len(self.rows[at]))
        self.visits[at] = self.visits.get(at, 0) + 1
        return self._take(at, first=bool(fresh))

    def _take(self, place: Hashable, *, first: bool) -> Any:
        row = self.rows[place]
        key = row.popleft() if first else row.pop()
        if not row:
            del self.rows[place]
        return key


@contextmanager
def deaf() -> Iterator[None]:
    """Put Ctrl-C off for a moment; a process that starts in it never hears one, not even while it imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Connection, threads: int) -> None:
    """Do jobs until the pipe ends: what comes is all jobs by key, or the key of the next one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    jobs: Mapping[Any, Job] = {}
    with suppress(EOFError, BrokenPipeError):
        while True:
            message = pipe.recv()
            if isinstance(message, dict):
                jobs = message
            else:
                answer = attempt(jobs[message])
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # others need what torch would keep for the next unit
                pipe.send(answer)


def attempt(job: Job) -> tuple[str | Exception, str]:
    """Return what a job returns, as JSON, or its error and where that came from; both can be sent."""
    try:
        return to_json(job()), ""
    except Exception as error:
        where = f"\n{traceback.format_exc()}"
        return sendable(error.with_traceback(None)), where  # the frames hold tensors


def sendable(error: Exception) -> Exception:
    """Return the error as it can be sent: itself, or one that says the same."""
    try:
        ForkingPickler.dumps(error)
        copy.copy(error)  # it is made anew from its arguments, as on arrival
    except Exception:
        kind = HeadtiltError if isinstance(error, HeadtiltError) else RuntimeError
        return kind(str(error) if kind is HeadtiltError else f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """Wait for the end of the parent, and end as well: a killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def words(key: Hashable) -> str:
    """Return a unit's key for readers."""
    return " · ".join(str(part) for part in (key if isinstance(key, tuple) else (key,)))


def ends(key: Hashable) -> Hashable:
    """Return the first and the last part of a key: the data set and the network, where it has both."""
    return (key[0], key[-1]) if isinstance(key, tuple) and key else None
