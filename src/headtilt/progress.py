"""How far a long job is: one line on a terminal, and nothing at all where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""``(stage, done, total)``: called as a job goes on."""

EVERY = 0.2  # seconds between two writings of the line
TRAINING_SHARE = 10  # a tenth of a fit's progress is for the head itself


def on_terminal(stream: TextIO | None = None) -> Progress | None:
    """Return what writes progress and the time that is left over one line of a terminal; None where there is none.

    Args:
        stream: Where to write; stderr by default.
    """
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        return None
    began = time.monotonic()
    last = 0.0

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < EVERY:
            return
        last = now
        left = (now - began) * (total - done) / max(done, 1)
        line = f"{100 * done / max(total, 1):3.0f} %  {duration(left)} left  {stage}"
        out.write(f"\r{line:<70}" + ("\n" if done >= total else ""))
        out.flush()

    return tell


def duration(seconds: float) -> str:
    """Return a time in words: 45 s, 12 min, 3 h."""
    if seconds < 99:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5940 else f"{seconds / 3600:.0f} h"


class Ticker:
    """Views done so far, told to whoever listens: one count for the whole fit.

    Args:
        progress: Called with (stage, done, total); None tells nobody.
        views: Views in all.
    """

    def __init__(self, progress: Progress | None, views: int) -> None:
        self.progress, self.done, self.trained = progress, 0, 0
        self.training = max(views // TRAINING_SHARE, 1)
        self.total = views + self.training

    def __call__(self, stage: str, views: int) -> None:
        """Count more views."""
        self.done += views
        self._tell(stage)

    def at(self, stage: str, trained: int) -> None:
        """Say how far the training is, of `training` in all."""
        self.trained = max(self.trained, min(trained, self.training))
        self._tell(stage)

    def end(self) -> None:
        """Say that all is done."""
        self.done, self.trained = self.total, 0
        self._tell("fitted")

    def _tell(self, stage: str) -> None:
        if self.progress is not None:
            self.progress(stage, min(self.done + self.trained, self.total), self.total)
