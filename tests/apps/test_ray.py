"""The batch run on a Ray cluster of two nodes, in a network namespace with the loopback alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headtilt.apps.batch.job import predict
from headtilt.apps.batch.plan import Job
from headtilt.apps.batch.ray_engine import Cluster, _plain
from headtilt.apps.loading import Wrapped
from headtilt.errors import DataError, ModelError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "two_nodes.py"


def isolation():
    spec = importlib.util.spec_from_file_location("two_nodes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks/ is not here")
def test_with_an_actor_and_then_a_node_killed_midway_the_rows_are_those_of_one_machine(
    digits_parquet, tmp_path, rows_in
):
    if not isolation().permitted():
        pytest.skip("this machine does not let us make a network namespace")
    words = [sys.executable, str(SCRIPT), str(digits_parquet), str(tmp_path / "ray"), "--kill", "actor", "node"]
    words += ["--shard-rows", "6", "--batch", "4", "--levels", "rotation,scale,shear"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert [(run["nodes"], run["nodes_left"], run["rows"], run["errors"]) for run in told] == [
        (2, 2, 121, 1),
        (2, 1, 121, 1),
    ]
    assert all(3 <= run["killed_after_shards"] < 21 for run in told)
    wrapped = Wrapped("zoo:digits", levels="rotation,scale,shear")
    local = Job(str(digits_parquet), tmp_path / "local", wrapped, batch=4, shard_rows=6)
    predict(local)
    expected = rows_in(local.out)
    for kill in ("actor", "node"):
        found = rows_in(tmp_path / "ray" / kill)
        assert [row["path"] for row in found] == [row["path"] for row in expected]
        assert [row["label"] for row in found] == [row["label"] for row in expected]
        assert [row["rotation_deg"] for row in found] == pytest.approx([row["rotation_deg"] for row in expected])
    # What one engine began the other goes on with.
    begun = replace(local, out=tmp_path / "ray" / "node")
    (begun.out / "part-00003.parquet").unlink()
    predict(begun)
    assert rows_in(begun.out)[18:24] == expected[18:24]


def test_nothing_missing_needs_no_cluster(digits_parquet, tmp_path, rows_in):
    job = Job(str(digits_parquet), tmp_path / "out", Wrapped("zoo:digits"), shard_rows=50)
    predict(job)
    told = []
    predict(job, Cluster("nowhere:1").compute, lambda *what: told.append(what))
    assert [what for what, _, _ in told] == ["listing the inputs"]


def test_what_a_shard_raised_comes_back_without_the_remote_traceback():
    remote = "ray::MapWorker … 40 lines\nheadtilt.errors.ModelError: the model returned nothing\n\nTo change retries, …"
    found = _plain(RuntimeError(remote))
    assert isinstance(found, ModelError)
    assert str(found) == "the model returned nothing"
    assert isinstance(_plain(RuntimeError("gone")), DataError)
