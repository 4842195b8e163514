"""Errors and interrupts at every call of every stage leave nothing behind; the long version is hardening/faults.py."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("PIL", reason="the extra data is not installed")
pytest.importorskip("safetensors", reason="the extra data is not installed")

from hardening import faults

torch.set_num_threads(1)
SEARCHES = ("search, tree", "search, joint", "search, anneal", "fit")
WRITERS = ("save, new", "save, old", "canonicalise", "train", "reproduce")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_is_disturbed_anywhere_leaves_model_and_random_streams_as_they_were(name):
    stage = next(stage for stage in faults.searching() if stage.name == name)
    places = 3 if name == "fit" else 7  # fitting takes its time
    assert faults.attack(stage, most=places)["disturbances"] == 4 * places


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_disturbed_while_it_writes_leaves_whole_files_only(name, tmp_path):
    stage = next(stage for stage in faults.writing(tmp_path) if stage.name == name)
    assert faults.attack(stage, most=8)["disturbances"] == 32


def test_a_batch_run_that_is_disturbed_leaves_whole_files_and_goes_on(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra batch is not installed")
    (stage,) = faults.batches(tmp_path)
    assert faults.attack(stage, most=6)["disturbances"] == 24


def test_a_stage_that_leaves_a_trace_would_be_seen(tmp_path):
    def careless():
        (tmp_path / "half").write_text("half")
        os.replace(tmp_path / "half", tmp_path / "whole")
        return "done"

    def empty():
        for path in tmp_path.iterdir():
            path.unlink()

    stage = faults.Stage("careless", ((os, "replace"),), careless, lambda: faults.files(tmp_path), empty)
    with pytest.raises(AssertionError, match="RuntimeError before call 1 of 1 left a trace"):
        faults.attack(stage)


def test_a_stage_that_makes_no_call_is_no_test(tmp_path):
    with pytest.raises(AssertionError, match="no call to disturb"):
        faults.attack(faults.Stage("idle", ((os, "replace"),), lambda: 1, lambda: 1))
