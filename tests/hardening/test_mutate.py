"""Verdicts on mutants: only a test that fails, or a crash, has noticed one."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("resource", reason="processes are limited by their means on Unix alone")
from hardening.mutate import FILES, TESTS, judges, meaning, noticed, quickest, sampled
from hardening.record import ROOT


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


def test_all_that_is_mutated_and_all_that_judges_it_is_there():
    assert [name for name in FILES if not (ROOT / "src/headtilt" / name).is_file()] == []
    assert [name for name in TESTS if not (ROOT / name).exists()] == []


def test_a_file_that_changes_leaves_the_sample_of_the_others_as_it_was():
    mutants = {"a.py": [f"a{number}" for number in range(60)], "b.py": [f"b{number}" for number in range(40)]}
    before = sampled(mutants, 10, seed=0)
    after = sampled({**mutants, "a.py": [f"c{number}" for number in range(60)]}, 10, seed=0)
    assert [name for name in before if name[0] == "b"] == [name for name in after if name[0] == "b"]
    assert [len([name for name in before if name[0] == file]) for file in "ab"] == [6, 4]


def test_what_was_noticed_stands_for_files_that_did_not_change():
    found = {
        "headtilt.search.joint.x_look__mutmut_7": "killed",
        "headtilt.search.joint.x_look__mutmut_8": "survived",
        "headtilt.result.x_concatenate__mutmut_1": "killed",
    }
    assert noticed(found, {"search/joint.py"}) == {"headtilt.search.joint.x_look__mutmut_7": "killed"}


def test_the_quickest_tests_judge_file_by_file_as_long_as_there_is_time():
    lasted = {"a::slow": 9.0, "a::quick": 0.1, "b::two": 0.3, "b::one": 0.2, "a::three": 0.5}
    assert quickest(lasted, 2.0) == ["b::one", "b::two", "a::quick", "a::three"]
    assert quickest(lasted, 0.05) == ["a::quick"]


def test_the_tests_of_its_own_file_judge_a_mutant_although_others_are_quicker():
    own, others = "tests/calibration/test_gate.py::test_a", {f"tests/its/test_its.py::{n}": 1.0 for n in range(15)}
    name = "headtilt.calibration.gate.x\u01c1Gate\u01c1keeps__mutmut_7"
    assert judges(name, {own: 9.0, **others}) == [*others, own]
    assert judges(name, {own: 9.0}) == [own]
