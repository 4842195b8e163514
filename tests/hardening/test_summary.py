"""Tests run by another interpreter: what is said of them."""

from __future__ import annotations

import sys

from hardening.lowest import tests as run_tests


def test_the_last_line_says_how_many_passed_and_failures_are_named(tmp_path):
    file = tmp_path / "test_two.py"
    file.write_text("def test_a(): pass\ndef test_b(): assert False\n")
    told = run_tests(sys.executable, (str(file),))
    assert told["summary"].startswith("1 failed, 1 passed in ")
    assert [name.rpartition("::")[2] for name in told["failed"]] == ["test_b"]
    assert told["exit_code"] == 1


def test_an_interpreter_that_breaks_is_no_success(tmp_path):
    file = tmp_path / "test_broken.py"
    file.write_text("import os\nos._exit(7)\n")
    assert run_tests(sys.executable, (str(file),))["exit_code"] == 7
