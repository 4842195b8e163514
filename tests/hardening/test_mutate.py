"""Verdicts on mutants: only a test that fails, or a crash, has noticed one."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("resource", reason="processes are limited by their means on Unix alone")
from hardening.mutate import meaning


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (lambda: os._exit(0), "survived"),
        (lambda: os._exit(1), "killed"),
        (lambda: os._exit(2), "killed"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "killed"),
        (lambda: os.kill(os.getpid(), signal.SIGXCPU), "timeout"),
    ],
    ids=["passed", "failed", "not importable", "crashed", "hung"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_how_tests_end_tells_what_became_of_a_mutant(end, verdict):
    assert meaning(ended(end)) == verdict


@pytest.mark.parametrize("code", [3, 4, 5])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tests_that_were_not_found_are_no_verdict(code):
    with pytest.raises(SystemExit, match="says nothing of a mutant"):
        meaning(ended(lambda: os._exit(code)))


def ended(end) -> int:
    child = os.fork()
    if child == 0:
        end()
    return os.waitpid(child, 0)[1]
