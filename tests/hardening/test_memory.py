"""Where memory runs out, the chunk shrinks and the answers stay; the long version is hardening/memory.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hardening import memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to know how much memory is taken")
def test_under_a_limit_on_memory_the_chunk_shrinks_and_labels_and_poses_stay(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.setattr(memory, "SPARE", (None, 130))
    found = memory.compare()
    assert found["same_answers"] == [True]
    assert found["chunk_shrank"] == [True]
    assert found["runs"][0]["chunk_in_the_end"] == memory.CHUNK
