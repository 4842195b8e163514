"""How far a long job is: one line on a terminal, and nothing at all where there is none."""

from __future__ import annotations

import io
import sys

import pytest

from headtilt import progress
from headtilt.progress import duration, on_terminal
from tests.toys import TinyNet, tiny_images

from .toys import joint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_nothing_to_write_to(capsys):
    assert on_terminal(io.StringIO()) is None
    assert on_terminal() is None  # which pytest has in place of stderr
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_one_line_with_share_time_and_stage_that_ends_with_the_job(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = Terminal()
    tell = on_terminal(stream)
    clock[0] = 10.0
    tell("looking", 25, 100)
    assert stream.getvalue() == f"\r{' 25 %  30 s left  looking':<70}"
    tell("looking", 26, 100)  # too soon
    assert stream.getvalue().count("\r") == 1
    clock[0] += 2 * progress.EVERY
    tell("looking", 50, 100)
    assert stream.getvalue().count("\r") == 2
    assert "\n" not in stream.getvalue()
    tell("fitted", 100, 100)  # however soon
    last = stream.getvalue().rpartition("\r")[2]
    assert last.startswith("100 %  0 s left  fitted")
    assert last.endswith("\n")


def test_nothing_done_and_nothing_to_do_are_no_division_by_zero(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(progress, "EVERY", 0.0)
    tell = on_terminal(stream)
    tell("looking", 0, 100)
    tell("looking", 0, 0)
    assert "  0 %" in stream.getvalue()


def test_a_fit_on_a_terminal_writes_its_line_to_stderr(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    joint(TinyNet(), budget=6).fit(tiny_images(20), method="bias", progress=True)
    assert stream.getvalue().rstrip().endswith("fitted")
    assert stream.getvalue().count("\n") == 1
    stream.seek(0), stream.truncate()
    joint(TinyNet(), budget=6).fit(tiny_images(20), method="bias", progress=False)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (45.4, "45 s"), (98.9, "99 s"), (720, "12 min"), (5900, "98 min"), (10_800, "3 h")],
)
def test_times_are_told_in_words(seconds, words):
    assert duration(seconds) == words
