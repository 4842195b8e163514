"""Batch runs: one row for each input, shards whole or absent, and what was killed goes on where it stopped."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headtilt.apps.batch.inputs import Input, listed
from headtilt.apps.batch.job import decoding, predict
from headtilt.apps.batch.plan import FOLDER, Job, alone, whole
from headtilt.apps.loading import Wrapped, bundle_fingerprint, model_fingerprint, parse_levels
from headtilt.cli import app
from headtilt.errors import DataError, OptionError
from headtilt.its import ITS
from headtilt.presets import fast
from headtilt.sources.decoders import Decoders
from headtilt.sources.images import square_of
from headtilt.sources.registry import load

pytest.importorskip("pyarrow")
MODEL = "zoo:digits"
COLUMNS = ["path", "label", "score", "rotation_deg", "scale", "shear", "gated", "views", "error"]
COLUMNS += ["model_fingerprint", "bundle_fingerprint"]


@pytest.fixture
def job(digits_parquet, tmp_path):
    return Job(str(digits_parquet), tmp_path / "out", Wrapped(MODEL), batch=16, shard_rows=25)


def test_every_input_is_one_row_and_a_broken_one_holds_its_error(job, rows_in, pngs):
    run = predict(job)
    rows = rows_in(job.out)
    assert list(rows[0]) == COLUMNS
    assert [row["path"] for row in rows] == [f"{job.source}#{number}" for number in range(121)]
    assert [number for number, row in enumerate(rows) if row["error"]] == [50]
    assert rows[50]["label"] is None
    assert rows[50]["error"] == "image is no image, or of a kind that Pillow does not know, whatever it is named."
    assert {row["views"] for row in rows} == {None, 17}
    assert {row["model_fingerprint"] for row in rows} == {model_fingerprint(load(MODEL), MODEL)}
    assert (run.count, run.shards, run.errors()) == (121, 5, 1)
    assert sorted(path.name for path in job.out.glob("*.parquet")) == [
        f"part-0000{shard}.parquet" for shard in range(5)
    ]


def test_rows_say_what_the_search_says(job, rows_in, pngs):
    predict(job)
    robust, adapted = job.wrapped.load()
    image = square_of(pngs[7], adapted)
    alone_found = robust.search(image[None])
    row = rows_in(job.out)[7]
    assert row["label"] == str(int(alone_found.labels[0]))
    assert row["score"] == pytest.approx(float(alone_found.probabilities[0].max()), abs=1e-5)


def test_what_is_there_is_not_computed_again(job, rows_in):
    predict(job)
    before = rows_in(job.out)
    stamps = {path.name: path.stat().st_mtime_ns for path in job.out.glob("*.parquet")}
    (job.out / "part-00002.parquet").unlink()
    (job.out / ".part-00002.parquet.dead.tmp").write_bytes(b"half a file")
    predict(job)
    assert rows_in(job.out) == before
    after = {path.name: path.stat().st_mtime_ns for path in job.out.glob("*.parquet")}
    assert [name for name in stamps if stamps[name] != after[name]] == ["part-00002.parquet"]
    assert not list(job.out.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 8}, "batch was 16, is 8"),
        ({"shard_rows": 20}, "shard_rows was 25, is 20"),
        ({"wrapped": Wrapped(MODEL, levels="rotation,scale")}, "levels was 'rotation', is 'rotation,scale'"),
        ({"wrapped": Wrapped("zoo:digits:1")}, "model was 'zoo:digits', is 'zoo:digits:1'"),
    ],
)
def test_other_arguments_into_a_used_folder_are_refused(job, change, said):
    predict(job)
    with pytest.raises(OptionError, match=said):
        predict(replace(job, **change))


def test_a_source_that_changed_is_refused(job, tmp_path, pngs):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(pngs[0])
    job = replace(job, source=str(tmp_path / "in"))
    predict(job)
    (tmp_path / "in/b.png").write_bytes(pngs[1])
    with pytest.raises(OptionError, match="the number of inputs was 1, is 2; the files of the source changed"):
        predict(job)


def test_the_device_and_the_decoders_may_change(job, rows_in):
    predict(job)
    before = rows_in(job.out)
    predict(replace(job, decoders=1))
    assert rows_in(job.out) == before


def test_a_second_run_into_a_folder_in_use_is_refused(job):
    with alone(job.out), pytest.raises(OptionError, match="another run is writing"):
        predict(job)


def test_a_folder_with_other_parts_is_refused(job):
    job.out.mkdir()
    (job.out / "part-00000.parquet").write_bytes(b"of somebody else")
    with pytest.raises(OptionError, match="a folder of its own"):
        predict(job)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    def torn() -> None:
        with whole(tmp_path / "x") as unfinished:
            unfinished.write_text("half")
            raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        torn()
    assert list(tmp_path.iterdir()) == []
    with whole(tmp_path / "x") as unfinished:
        unfinished.write_text("all")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_text() == "all"


def test_a_bundle_is_used_and_its_fingerprint_stands_in_every_row(job, rows_in, tmp_path):
    adapted = load(MODEL)
    images = torch.stack([image for _, image in _prepared(job, adapted)][:40])
    robust = ITS(adapted.model, **fast()).fit(images, method="balance", promise=None)
    robust.save(tmp_path / "fitted")
    job = replace(job, wrapped=Wrapped(MODEL, str(tmp_path / "fitted")))
    predict(job)
    rows = [row for row in rows_in(job.out) if not row["error"]]
    assert {row["bundle_fingerprint"] for row in rows} == {bundle_fingerprint(str(tmp_path / "fitted"))}
    assert {row["views"] for row in rows} != {17}
    other = ITS(adapted.model, **fast()).fit(images, method="balance", promise=None, seed=1)
    other.save(tmp_path / "fitted")
    with pytest.raises(OptionError, match="bundle_fingerprint was"):
        predict(job)


def _prepared(job, adapted):
    with Decoders(1) as decoders, decoding(listed(job.source)[:45], adapted, decoders, 8) as stream:
        return list(stream)


def test_weights_tell_models_apart():
    first, second = (model_fingerprint(load(f"zoo:digits:{seed}"), "zoo:digits") for seed in (0, 1))
    assert first != second
    assert first == model_fingerprint(load("zoo:digits:0"), "zoo:digits")
    with pytest.raises(DataError, match="is no bundle"):
        bundle_fingerprint("/nowhere")


def test_levels_are_named():
    assert [group.name for group in parse_levels("rotation, scale,shear")] == ["rotation", "scale", "shear_x"]
    with pytest.raises(OptionError, match="levels must be some of rotation, scale"):
        parse_levels("rotate")


class Counted(Decoders):
    """Decoders that count what they are asked."""

    asked = 0

    def submit(self, source, square):
        self.asked += 1
        return super().submit(source, square)


def test_decoding_stops_when_the_search_does(job):
    with Counted(1) as decoders, decoding(listed(job.source), load(MODEL), decoders, 4) as stream:
        next(stream)
    assert decoders.asked < 20


def test_an_error_of_the_reader_reaches_the_search(job):
    def inputs():
        yield listed(job.source)[0]
        raise RuntimeError("the disk is gone")

    with Decoders(1) as decoders, decoding(inputs(), load(MODEL), decoders, 4) as stream, pytest.raises(RuntimeError, match="the disk is gone"):
        list(stream)


def test_an_image_as_thin_as_a_hair_does_not_fill_memory():
    buffer = io.BytesIO()
    pytest.importorskip("PIL.Image").new("L", (90_000, 1)).save(buffer, "PNG")
    square = square_of(buffer.getvalue(), replace(load(MODEL), resize=256))
    assert square.shape == (1, 28, 28)


def test_a_model_that_raises_ends_the_run_and_leaves_no_thread(job, monkeypatch):
    monkeypatch.setattr(ITS, "search", lambda *_: (_ for _ in ()).throw(DataError("the model is ill")))
    with pytest.raises(DataError, match="the model is ill"):
        predict(job)
    assert not list(job.out.glob("part-*"))


def test_the_command_says_how_many_rows_hold_errors_and_exits_well(digits_parquet, tmp_path):
    words = ["predict", str(digits_parquet), "--model", MODEL, "--out", str(tmp_path / "o"), "--shard-rows", "50"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "121 rows in 3 files" in done.output
    assert "1 of them hold an error" in done.output
    assert json.loads((tmp_path / "o" / FOLDER / "manifest.json").read_text())["inputs"] == 121
    wrong = CliRunner().invoke(app, [*words, "--batch", "3"])
    assert wrong.exit_code == 2
    assert "batch was 64, is 3" in wrong.output
    assert "one of 'local', 'ray'" in CliRunner().invoke(app, [*words, "--engine", "spark"]).output


KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from headtilt.apps.batch.job import predict
    from headtilt.apps.batch.plan import Job
    from headtilt.apps.loading import Wrapped

    torch.set_num_threads(1)
    source, folder = sys.argv[1], Path(sys.argv[2])

    def job(name):
        return Job(source, folder / name, Wrapped("zoo:digits", levels="rotation,scale,shear"), batch=8, shard_rows=8)

    def run(name):
        child = os.fork()
        if child == 0:
            predict(job(name))
            os._exit(0)
        return child

    start = time.monotonic()
    os.waitpid(run("undisturbed"), 0)
    whole, draw = time.monotonic() - start, random.Random(int(sys.argv[3]))
    kills, name = 0, "killed-0"
    while kills < 4:  # that met a living process; one that was done before does not count
        there = len(list((folder / name).glob("part-*")))
        child, longest = run(name), time.monotonic() + 4 * whole
        while kills % 2 and len(list((folder / name).glob("part-*"))) == there and time.monotonic() < longest:
            time.sleep(0.01)  # every other one is met while it writes
        time.sleep(draw.uniform(0, 0.3 if kills % 2 else 0.5 * whole))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
            print(len(list((folder / name).glob("part-*"))))
        else:
            name = f"killed-{kills}"
    os.waitpid(run(name), 0)
"""


def test_killed_and_resumed_the_rows_are_those_of_an_undisturbed_run(digits_parquet, tmp_path, rows_in):
    program = textwrap.dedent(KILLED)
    words = [sys.executable, "-c", program, str(digits_parquet), str(tmp_path), "5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    parts = [int(line) for line in done.stdout.splitlines()]
    assert len(parts) == 4
    assert any(0 < part < 16 for part in parts), parts
    expected = rows_in(tmp_path / "undisturbed")
    assert len(expected) == 121
    assert all(rows_in(folder) == expected for folder in tmp_path.glob("killed-*"))


def test_inputs_of_a_shard_are_read_back_as_they_were_listed(job):
    run = predict(job)
    assert [item for shard in range(run.shards) for item in run.inputs(shard)] == listed(job.source)
    assert all(isinstance(item, Input) for item in run.inputs(4))
    assert Path(run.path(3)).name == "part-00003.parquet"
