"""Batch runs: one row for each input, shards whole or absent, and what was killed goes on where it stopped."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headtilt.apps.batch.inputs import Input, listed
from headtilt.apps.batch.job import decoding, predict
from headtilt.apps.batch.plan import FOLDER, Job, alone, whole
from headtilt.apps.loading import Wrapped, bundle_fingerprint, model_fingerprint
from headtilt.cli import app
from headtilt.errors import DataError, OptionError
from headtilt.its import ITS
from headtilt.presets import fast, levels_named
from headtilt.sources import Adapted
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
    assert rows[50]["error"] == "image is not an image, or has a format that Pillow does not know."
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
    (job.out / f".{8 * 'dead'}.tmp").write_bytes(b"half a file")
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
    other.save(tmp_path / "fitted", overwrite=True)
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
    assert [group.name for group in levels_named("rotation, scale,shear-x")] == ["rotation", "scale", "shear_x"]
    with pytest.raises(OptionError, match="levels must be some of rotation, scale"):
        levels_named("rotate")


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

    with (
        Decoders(1) as decoders,
        decoding(inputs(), load(MODEL), decoders, 4) as stream,
        pytest.raises(RuntimeError, match="the disk is gone"),
    ):
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


def test_the_command_says_how_many_rows_hold_errors_and_exits_as_classify_does(digits_parquet, tmp_path):
    words = ["predict", str(digits_parquet), "--model", MODEL, "--out", str(tmp_path / "o"), "--shard-rows", "50"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "121 rows in 3 files" in done.output
    assert "1 of them hold an error" in done.output
    assert json.loads((tmp_path / "o" / FOLDER / "manifest.json").read_text())["inputs"] == 121
    wrong = CliRunner().invoke(app, [*words, "--batch", "3"])
    assert wrong.exit_code == 2
    assert "batch was 64, is 3" in wrong.output
    assert "one of 'local', 'ray'" in CliRunner().invoke(app, [*words, "--engine", "spark"]).output


def test_a_folder_gives_rows_for_all_that_is_named_as_an_image_and_the_exit_code_tells_of_failures(tmp_path):
    from PIL import Image

    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a.gif", "b.png", "c.jfif", "d.jpe"):
        Image.new("L", (28, 28), 90).save(photos / name)
    (photos / "notes.txt").write_text("no image")
    words = ["predict", str(photos), "--model", MODEL]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    assert "4 rows in 1 files" in done.output
    (photos / "e.gif").write_bytes(b"GIF89a, but torn")
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "p")]).exit_code == 1
    for name in ("a.gif", "b.png", "c.jfif", "d.jpe"):
        (photos / name).unlink()
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "q")]).exit_code == 2


def test_a_folder_without_images_leaves_no_folder_for_rows(tmp_path):
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "empty"), "--model", MODEL, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert "nothing was found" in done.output
    assert not (tmp_path / "o").exists()


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
            print(len(list((folder / name).glob("part-*"))), flush=True)  # before a fork copies what waits
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


class Cursed(torch.nn.Module):
    """Dark and light; it says nothing of black images, and raises at white ones."""

    def forward(self, images):
        light = images.mean((1, 2, 3))
        if bool((light > 0.99).any()):
            raise RuntimeError("too bright")
        logits = torch.stack([0.5 - light, light - 0.5], 1)
        return torch.where(light[:, None] < 0.01, torch.nan, logits)


def greys(folder, *values):
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(exist_ok=True)
    for number, value in enumerate(values):
        image.new("RGB", (8, 8), (value,) * 3).save(folder / f"{number:03}.png")


CURSED = Adapted(Cursed(), ("dark", "light"), 8, 8, "border", "cursed")


def cursed_job(tmp_path, monkeypatch, **options):
    wrapped_model = ITS(CURSED.model, padding="border")
    monkeypatch.setattr(Wrapped, "load", lambda _: (wrapped_model, CURSED))
    return Job(str(tmp_path / "in"), tmp_path / "out", Wrapped("zoo:digits"), **options)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_an_image_at_which_the_model_fails_is_one_row_with_its_error(tmp_path, monkeypatch, rows_in, batch):
    greys(tmp_path / "in", 60, 0, 200, 255, 90)
    predict(cursed_job(tmp_path, monkeypatch, batch=batch, shard_rows=3))
    rows = rows_in(tmp_path / "out")
    assert [row["label"] for row in rows] == ["dark", None, "light", None, "dark"]
    assert [row["error"] is None for row in rows] == [True, False, True, False, True]
    assert "too bright" in rows[3]["error"]


def test_a_shard_of_nothing_but_such_images_is_rows_too(tmp_path, monkeypatch, rows_in):
    greys(tmp_path / "in", 0, 0)
    predict(cursed_job(tmp_path, monkeypatch))
    assert [row["error"] is None for row in rows_in(tmp_path / "out")] == [False, False]


def test_images_that_were_replaced_are_noticed_on_resume(job, tmp_path, pngs):
    (tmp_path / "in").mkdir()
    for number in (0, 1):
        (tmp_path / f"in/{number}.png").write_bytes(pngs[number])
    job = replace(job, source=str(tmp_path / "in"))
    predict(job)
    stamp = (tmp_path / "in/0.png").stat()
    (tmp_path / "in/0.png").write_bytes(pngs[2])
    os.utime(tmp_path / "in/0.png", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    with pytest.raises(OptionError, match="the files of the source changed"):
        predict(job)


def cut_short(out):
    path = out / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    return ["part-00001.parquet cannot be read"]


def emptied(out):
    (out / "part-00003.parquet").write_bytes(b"")
    return ["part-00003.parquet cannot be read"]


def swapped(out):
    first, second, aside = out / "part-00000.parquet", out / "part-00002.parquet", out / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return ["part-00000.parquet holds the rows of other inputs", "part-00002.parquet holds the rows of other inputs"]


def doubled(out):
    shutil.copy(out / "part-00000.parquet", out / "part-00001.parquet")
    return ["part-00001.parquet holds the rows of other inputs"]


def shorter(out):
    import pyarrow.parquet

    path = out / "part-00002.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 7), path)
    return ["part-00002.parquet has 7 rows, not 25"]


def flipped(out):
    path = out / "part-00000.parquet"
    content = bytearray(path.read_bytes())
    content[40] ^= 255
    path.write_bytes(content)
    return ["part-00000.parquet cannot be read"]


def cut_manifest(out):
    path = out / FOLDER / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    return [f"part-0000{shard}.parquet cannot be vouched for" for shard in range(5)]


def lost_inputs(out):
    (out / FOLDER / "inputs.parquet").write_bytes(b"PAR1")
    return []


@pytest.mark.parametrize(
    "damage",
    [cut_short, emptied, swapped, doubled, shorter, flipped, cut_manifest, lost_inputs],
    ids=lambda f: f.__name__,
)
def test_a_damaged_folder_is_told_by_name_and_computed_again(job, rows_in, damage):
    assert predict(job).mended == ()
    before = rows_in(job.out)
    expected = damage(job.out)
    run = predict(job)
    assert len(run.mended) == len(expected)
    assert all(said in sentence for said, sentence in zip(expected, run.mended, strict=True)), run.mended
    assert rows_in(job.out) == before
    assert predict(job).mended == ()


def test_a_part_that_is_none_of_the_run_is_refused(job):
    predict(job)
    shutil.copy(job.out / "part-00000.parquet", job.out / "part-00000-copy.parquet")
    with pytest.raises(OptionError, match=r"part-00000-copy\.parquet is none of them"):
        predict(job)


def test_a_member_of_a_tar_that_claims_more_than_there_is_is_one_row_with_its_error(job, tmp_path, pngs, rows_in):
    path = tmp_path / "claims.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content, claim in (("a.png", pngs[0], None), ("b.png", pngs[1], 2**50)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            if claim:
                place = archive.offset - 512 * (1 + -(-len(content) // 512))
                member.size = claim
                header = member.tobuf(tarfile.GNU_FORMAT)
    content = bytearray(path.read_bytes())
    content[place : place + 512] = header
    path.write_bytes(content)
    predict(replace(job, source=str(path)))
    rows = rows_in(job.out)
    assert [row["error"] is None for row in rows][:2] == [True, False]
    assert "claims 1,125,899,906,842,624 bytes" in rows[1]["error"]


def test_members_of_a_tar_with_names_and_sizes_that_nobody_means_are_rows_too(job, tmp_path, pngs, rows_in):
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("../../up.png", "not-\udcff-utf8.png", "less.png"):
            member = tarfile.TarInfo(name)
            member.size = len(pngs[0])
            archive.addfile(member, io.BytesIO(pngs[0]))
            place = archive.offset - 512 * (1 + -(-member.size // 512))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo("no-file.png")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    content = bytearray(path.read_bytes())
    member = tarfile.TarInfo("less.png")
    member.size = -512  # the next header is this one, for ever
    content[place : place + 512] = member.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(content)
    predict(replace(job, source=str(path)))
    rows = {row["path"].partition("#")[2]: row["error"] for row in rows_in(job.out)}
    assert "less.png claims -512 bytes" in rows.pop("")  # what comes behind it cannot be found
    assert rows == {"../../up.png": None, r"not-\udcff-utf8.png": None}


def test_rows_that_name_no_possible_file_have_their_error(job, tmp_path, rows_in):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"path": ["a\0b.png", "/dev/zero", "x" * 5000]}), tmp_path / "names.parquet")
    predict(replace(job, source=str(tmp_path / "names.parquet")))
    errors = [row["error"] for row in rows_in(job.out)]
    assert [error.rpartition(" ")[2] for error in errors] == ["exist.", "file.", "exist."]


def onnx_file(folder, bias, **options):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    folder.mkdir(exist_ok=True)
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(torch.full((192, 300), bias).numpy(), "w")
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["logits"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["B", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", kind, ["B", 300])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "net.onnx", **options)
    return folder / "net.onnx"


def test_networks_of_files_are_told_apart_by_all_their_files(tmp_path, monkeypatch):
    away = {"save_as_external_data": True, "location": "net.data", "size_threshold": 0}

    def told(folder, spec):
        monkeypatch.chdir(folder)
        return model_fingerprint(load(spec), spec)

    one, two = onnx_file(tmp_path / "a", 0.1).parent, onnx_file(tmp_path / "b", 0.2).parent
    for spec in ("onnx:net.onnx", "net.onnx"):
        assert told(one, spec) != told(two, spec)
    (one / "net.json").write_text('{"mean": [0, 0, 0], "std": [1, 1, 1]}')
    (two / "net.json").write_text('{"mean": [0, 0, 0], "std": [1, 1, 1]}')
    assert told(one, "onnx:net.onnx") != told(two, "onnx:net.onnx"), "also behind a normalisation"
    before = told(one, "onnx:net.onnx")
    (one / "net.json").write_text('{"mean": [0, 0, 0], "std": [1, 1, 1], "output": "probabilities"}')
    assert told(one, "onnx:net.onnx") != before
    outside = [onnx_file(tmp_path / name, bias, **away).parent for name, bias in (("c", 0.1), ("d", 0.2))]
    assert (outside[0] / "net.data").exists()
    assert (outside[0] / "net.onnx").read_bytes() == (outside[1] / "net.onnx").read_bytes()
    assert told(outside[0], "net.onnx") != told(outside[1], "net.onnx")
