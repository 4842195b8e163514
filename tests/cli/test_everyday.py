"""The everyday commands, run as a user runs them: answers, copies, pictures, bundles, exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import headtilt.apps.rows
from headtilt.apps.fitting import larger_square, verdict
from headtilt.apps.fitting import read as read_files
from headtilt.calibration.head import thorough
from headtilt.cli import app, everyday
from headtilt.cli.everyday import _print_verdict
from headtilt.sources import Adapted
from headtilt.sources.images import read, square_of

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
KEYS = ["path", "label", "score", "rotation_deg", "scale", "shear", "gated", "views", "error"]
COLOURS = ("--model", "python:colournet:make_model")
DIGITS = ("--model", "zoo:digits:0")


@pytest.fixture
def digits(tmp_path):
    """Return a folder of upright digits and one of the same ones lying on their side, as files."""
    pytest.importorskip("sklearn", reason="needs the extra headtilt[data]")
    from headtilt.paper.data import load

    for number, (pixels, label) in enumerate(zip(*_digits(load), strict=True)):
        picture = Image.fromarray((pixels * 255).byte().numpy())
        for folder, by in (("upright", None), ("lying", Image.Transpose.ROTATE_270)):
            (tmp_path / folder).mkdir(exist_ok=True)
            turned = picture if by is None else picture.transpose(by)
            turned.save(tmp_path / folder / f"{number:03d}_{label}.png")
    return tmp_path


def _digits(load):
    data = load("digits", "fit", limit=150)
    return data.floats()[:, 0], data.labels.tolist()


def test_classify_gives_one_object_per_image_with_the_promised_keys(call, photographs):
    result = call("classify", photographs, *COLOURS, "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [list(row) for row in rows] == [KEYS] * 12
    assert [row["label"] for row in rows] == ["blue"] * 4 + ["green"] * 4 + ["Red"] * 4
    assert all(row["error"] is None and row["views"] > 1 and 0 < row["score"] <= 1 for row in rows)
    assert result.stderr.splitlines() == ["classifying"]


def test_csv_holds_the_same_and_topk_more(call, photographs):
    plain = json.loads(call("classify", photographs / "red", *COLOURS, "--json").stdout)
    rows = list(csv.DictReader(io.StringIO(call("classify", photographs / "red", *COLOURS, "--csv").stdout)))
    assert list(rows[0]) == KEYS
    assert [row["label"] for row in rows] == [row["label"] for row in plain]
    assert float(rows[0]["score"]) == plain[0]["score"]
    more = list(
        csv.DictReader(io.StringIO(call("classify", photographs / "red", *COLOURS, "--csv", "--topk", "2").stdout))
    )
    assert list(more[0]) == [*KEYS, "label_2", "score_2"]
    top = json.loads(call("classify", photographs / "red", *COLOURS, "--json", "--topk", "9").stdout)[0]["top"]
    assert top[0]["label"] == "Red"
    assert sum(one["score"] for one in top) == pytest.approx(1)


def test_the_table_shows_label_score_tilt_and_views(call, photographs):
    result = call("classify", "images/red/0.png", *COLOURS, "--preset", "fast")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["image", "label", "score", "tilt", "views"]
    line = result.stdout.splitlines()[1].split()
    assert (line[0], line[1], line[-1]) == ("images/red/0.png", "Red", "20")


def broken_folder(folder):
    """Fill a folder with files of every kind of trouble and two good ones; return how many are images by name."""
    folder.mkdir()
    good = Image.new("RGB", (40, 30), (220, 40, 40))
    good.save(folder / "good.png")
    good.save(folder / "ein schönes Bild – 照片.jpg")
    good.save(folder / "really a png.jpg", "PNG")
    held = io.BytesIO()
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (64, 64, 3), dtype=np.uint8)).save(held, "JPEG")
    for number in range(9):
        (folder / f"empty {number}.jpg").touch()
        (folder / f"cut {number}.jpg").write_bytes(held.getvalue()[: 200 + 150 * number])
        (folder / f"letter {number}.png").write_text("Dear diary, " * number + "!")
    (folder / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\x86\xa0\0\1\x86\xa0\x08\2\0\0\0\xd1\x1c\x81\xa9"
    )
    (folder / "folder.jpg").mkdir()
    good.save(folder / "folder.jpg" / "inside.jpg")
    os.symlink(folder / "nowhere.jpg", folder / "dangling.jpg")
    (folder / "notes.txt").write_text("no image, and not named as one")
    return 3 + 27 + 1 + 1 + 1


def test_a_folder_of_broken_files_is_worked_through_to_its_end_with_a_report(call, photographs, tmp_path):
    count = broken_folder(tmp_path / "trouble")
    result = call("classify", "trouble", *COLOURS, "--json")
    assert result.exit_code == 1
    rows = {row["path"]: row for row in json.loads(result.stdout)}
    assert len(rows) == count
    fine = {path.removeprefix("trouble/") for path, row in rows.items() if row["error"] is None}
    assert fine == {"good.png", "ein schönes Bild – 照片.jpg", "really a png.jpg", "folder.jpg/inside.jpg"}
    assert all(rows[f"trouble/{name}"]["label"] == "Red" for name in fine)
    for name, said in {
        "empty 3.jpg": "is empty",
        "letter 2.png": "is not an image",
        "cut 5.jpg": "could not be decoded",
        "bomb.png": "bomb",
        "dangling.jpg": "does not exist",
    }.items():
        row = rows[f"trouble/{name}"]
        assert said in row["error"]
        assert name in row["error"]
        assert row["label"] is row["score"] is None
    assert f"{count - 4} of {count} files failed." in result.stderr
    assert "1 files were skipped, because their names are not those of images: 1 × .txt." in result.stderr


def test_a_file_name_that_is_no_text_can_be_printed(call, photographs, tmp_path):
    try:
        os.mkdir(b"odd")
        Image.new("RGB", (9, 9), (220, 0, 0)).save("odd/x.png")
        os.rename(b"odd/x.png", b"odd/\xff\xfe.png")
    except OSError:
        pytest.skip("this file system takes only names that are text")
    for words in ([], ["--csv"], ["--json"]):
        result = call("classify", "odd", *COLOURS, *words)
        assert result.exit_code == 0, result.output
        assert "Red" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["classify", "nofolder/", *COLOURS], None),
        (["classify", "empty", *COLOURS], "no images were found in empty. Image files end in .jpg"),
        (["classify", "images", "--model", "magic:x"], "model must be one of hf:NAME"),
        (["classify", "images", *COLOURS, "--csv", "--json"], "--csv and --json exclude each other"),
        (["classify", "images", *COLOURS, "--levels", "spin"], "levels must be some of rotation, scale"),
        (["classify", "images", *COLOURS, "--levels", ","], "levels must be some of rotation, scale"),
        (["classify", "images", *COLOURS, "--preset", "magic"], "preset must be one of fast, accurate"),
        (["classify", "images", *COLOURS, "--bundle", "b", "--levels", "scale"], "cannot be combined with --bundle"),
        (["classify", "images", *COLOURS, "--bundle", "b"], "b is no bundle"),
        (["explain", "images/red/0.png", *COLOURS, "--out", "x.gif"], "out must be one of '.png', '.svg'"),
        (["explain", "images/nosuch.png", *COLOURS], "does not exist"),
        (["canonicalise", "images", *COLOURS, "--out", "colournet.py"], "out must be a folder"),
        (["fit", "images", *COLOURS, "--out", "b", "--method", "magic"], "method must be one of 'head'"),
        (["fit", "images/red", *COLOURS, "--out", "b"], "at least 8 images"),
    ],
    ids=lambda value: " ".join(value[:2] + value[4:]) if isinstance(value, list) else "",
)
def test_an_error_is_one_line_on_stderr(call, photographs, tmp_path, words, said):
    (tmp_path / "empty").mkdir()
    result = call(*words)
    if said is None:  # a file that is not there is one that failed
        assert result.exit_code == 2, "the only one"
        assert "does not exist" in " ".join(result.stdout.split())
        return
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_leaves_the_answers_that_were_ready(call, photographs, monkeypatch):
    def interrupted(*args, **options):
        for number, answer in enumerate(real(*args, **options)):
            if number == 5:
                raise KeyboardInterrupt
            yield answer

    real = headtilt.apps.rows.answers
    monkeypatch.setattr(headtilt.apps.rows, "answers", interrupted)
    result = call("classify", photographs, *COLOURS, "--json")
    assert result.exit_code == 130
    assert [row["label"] for row in json.loads(result.stdout)] == ["blue"] * 4 + ["green"]


def test_fit_then_classify_reads_lying_digits_and_says_how_they_lie(call, digits):
    fitted = call(
        "fit", "upright", *DIGITS, "--levels", "rotation", "--out", "bundle", "--method", "balance", "--no-gate"
    )
    assert fitted.exit_code == 0, fitted.output
    assert "wrote bundle" in fitted.stdout
    again = call("fit", "upright", *DIGITS, "--out", "bundle", "--method", "balance")
    assert again.exit_code == 2
    assert "To replace it, add --force" in again.stderr
    other = ("classify", "lying", "--model", "zoo:digits:1", "--bundle", "bundle", "--json")
    refused = call(*other)
    assert refused.exit_code == 2
    assert "bundle was fitted for another model" in refused.stderr
    assert "--no-strict" in refused.stderr
    assert call(*other, "--no-strict").exit_code == 0
    right = {}
    for name, words in {"bare": ["--levels", "rotation"], "bundle": ["--bundle", "bundle"]}.items():
        rows = json.loads(call("classify", "lying", *DIGITS, *words, "--json").stdout)
        right[name] = sum(row["label"] == row["path"][-5] for row in rows)
    known = [row for row in rows if row["label"] == row["path"][-5]]
    assert right["bundle"] > 1.2 * right["bare"]
    assert right["bundle"] >= 110, "of 150"
    near = [abs(row["rotation_deg"] - 90) < 30 for row in known]
    assert sum(near) > 0.6 * len(near)
    report = json.loads(
        call(
            "evaluate",
            "digits",
            *DIGITS,
            "--perturb",
            "rotation",
            "--method",
            "vanilla",
            "--bundle",
            "bundle",
            "--limit",
            "80",
            "--json",
        ).stdout
    )
    assert list(report["methods"]) == ["vanilla", "bundle"]
    assert report["methods"]["bundle"]["accuracy"] > report["methods"]["vanilla"]["accuracy"] + 20
    alone = call("evaluate", "digits", *DIGITS, "--method", "bundle", "--limit", "8")
    assert alone.exit_code == 2
    assert "give its folder with --bundle" in alone.stderr


def test_fit_passes_over_broken_files_and_reads_photographs_larger_than_the_crop(
    call, photographs, tmp_path, monkeypatch
):
    (tmp_path / "images" / "red" / "broken.png").write_bytes(b"no image")
    seen = {}

    def fit(self, images, **options):
        seen.update(shape=tuple(images.shape), **options)
        return self

    monkeypatch.setattr(headtilt.its.ITS, "fit", fit)
    result = call(
        "fit",
        "images",
        "--model",
        "python:colournet:make_adapted",
        "--out",
        "b",
        "--thorough",
        "--hidden",
        "7",
        "--pose",
        "0.1",
        "--refine",
        "2",
    )
    assert result.exit_code == 0, result.output
    assert seen["shape"] == (12, 3, 29, 29), "20 · 10 / 7"
    assert seen["recipe"] == replace(thorough(), hidden=7, pose=0.1)
    assert (seen["crop"], seen["promise"]) == (20, 0.5)
    assert "broken.png is not an image" in " ".join(result.stderr.split())


def test_photographs_are_what_is_padded_by_reflection_or_large_and_in_colour():
    sides = {
        (padding, size, channels): larger_square(Adapted(None, None, size, size, padding, "net", channels)).size
        for padding, size, channels in [
            ("reflection", 32, 1),
            ("auto", 224, 3),
            ("auto", 224, 1),
            ("auto", 32, 3),
            ("zeros", 224, 3),
        ]
    }
    assert list(sides.values()) == [46, 320, 224, 32, 224]


def test_files_are_read_in_their_order_into_one_tensor_and_broken_ones_leave_no_gap(photographs):
    paths = sorted(photographs.rglob("*.png"))
    paths[3].write_bytes(b"no image")
    about = Adapted(None, None, 20, 24, "reflection", "net")
    told = []
    images, broken = read_files(paths, about, lambda *what: told.append(what))
    good = [path for path in paths if path != paths[3]]
    assert torch.equal(images, torch.stack([square_of(path, about) for path in good]))
    assert images.untyped_storage().nbytes() == 12 * 3 * 20 * 20 * 4, "the images, and none of them twice"
    assert len(broken) == 1
    assert told[-1] == ("reading images", 12, 12)


def test_fit_says_what_it_will_cost_before_it_starts_and_what_it_is_worth_at_its_end(call, digits, monkeypatch):
    stages = []
    real = headtilt.its.ITS.fit

    def fit(self, images, **options):
        stages.append(self.predictor.chunks.copy())
        return real(self, images, **options)

    monkeypatch.setattr(headtilt.its.ITS, "fit", fit)
    result = call("fit", "upright", *DIGITS, "--out", "b", "--preset", "fast", "--hidden", "16", "--looks", "1")
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()
    assert re.fullmatch(r"150 images, about [\d,]+ views, about \d+ (s|min) on this machine", said[0])
    report = json.loads(Path("b/headtilt.json").read_text(encoding="utf-8"))["report"]
    views = int(re.search(r"about ([\d,]+)", said[0])[1].replace(",", ""))
    assert views == pytest.approx(report["views"], rel=0.05)
    whole = " ".join(result.stdout.split())
    for name in ("tilted", "turned exactly"):
        found = report["verdict"][name]
        assert f"{found['bare']:.1f} % → {found['fitted']:.1f} % agree with the upright answer" in whole
        assert found["fitted"] > found["bare"]
    assert f"{report['verdict']['upright answers replaced']:.1f} % of answers replaced" in whole
    assert f"keeps {report['verdict']['tilted answers kept by the gate']:.0f} % of the bare answers" in whole
    assert f"padding: {report['padding']}" in whole
    assert said[-1] == "wrote b"
    assert result.stderr == "", "silent where nobody watches"
    assert stages == [{}], "the timing leaves no trace in what is fitted"


def test_a_fit_whose_gate_keeps_nearly_everything_says_what_to_do():
    shares = {"upright answers replaced": 0.0, "upright images turned": None, "tilted answers kept by the gate": 97.0}
    agreement = {"bare": 40.0, "fitted": 41.0, "images": 9}
    report = {"verdict": {"tilted": agreement, "turned exactly": {"bare": None, "fitted": None, "images": 0}, **shares}}
    assert verdict(report) == [
        ("tilted images", "40.0 % → 41.0 % agree with the upright answer"),
        ("upright images", "0.0 % of answers replaced"),
        ("the gate", "keeps 97 % of the bare answers to tilted images"),
    ]
    held = io.StringIO()
    _print_verdict(Console(file=held, width=200), report)
    assert "Fit on more images" in held.getvalue()
    assert verdict({}) == []


def test_a_fit_on_too_few_images_for_a_head_says_so_and_canonicalise_says_why_it_refuses(call, digits):
    for path in sorted(Path("upright").iterdir())[40:]:
        path.unlink()
    fitted = call("fit", "upright", *DIGITS, "--out", "b")
    assert fitted.exit_code == 0, fitted.output
    said = " ".join(fitted.stderr.split())
    assert "40 images are too few for a head, which needs 50: a balance was fitted" in said
    refused = call("canonicalise", "lying", *DIGITS, "--bundle", "b", "--out", "out")
    assert refused.exit_code == 2
    assert "this one holds a balance" in " ".join(refused.stderr.split())
    meant = call("fit", "upright", *DIGITS, "--out", "c", "--method", "balance")
    assert "too few" not in meant.output


def test_a_terminal_gets_one_bar_for_the_whole_fit(call, digits, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = call("fit", "upright", *DIGITS, "--out", "b", "--method", "balance", "--images", "30")
    assert result.exit_code == 0, result.output
    assert "ETA" in result.stderr


@pytest.mark.parametrize("stage", ["reading images", "looking at tilted images", "fitting the head", "fitted", "save"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_ctrl_c_leaves_no_half_written_bundle(call, digits, monkeypatch, stage, there):
    method = "head" if stage == "fitting the head" else "balance"
    words = ("fit", "upright", *DIGITS, "--out", "b", "--images", "60", "--method", method, "--force")
    if there:
        assert call(*words, "--method", "balance", "--no-gate").exit_code == 0
    before = contents("b")

    @contextmanager
    def impatient(**options):
        def tell(what, done, total):
            if what == stage:
                raise KeyboardInterrupt

        yield tell

    def torn(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(everyday, "progress", impatient)
    if stage == "save":
        monkeypatch.setattr(headtilt.io.bundle, "save_tensors", torn)
    result = call(*words)
    assert result.exit_code == 130, result.output
    assert contents("b") == before
    assert Path("b").exists() == there


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("**/*")}


@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize(
    "words", [[], ["--preset", "fast"], ["--levels", "rotation,scale"]], ids=["tree", "joint", "deep"]
)
def test_explain_writes_a_picture_and_says_the_answer(call, digits, kind, words):
    pytest.importorskip("matplotlib")
    result = call(
        "explain",
        sorted_first(),
        *DIGITS,
        "--out",
        f"a/x.{kind}",
        *words,
    )
    assert result.exit_code == 0, result.output
    assert "views" in result.stdout
    assert f"wrote a/x.{kind}" in result.stdout
    if kind == "png":
        assert min(read("a/x.png").shape[1:]) > 500
    else:
        assert "<svg" in Path("a/x.svg").read_text(encoding="utf-8")[:2000]


def sorted_first():
    return "lying/" + sorted(os.listdir("lying"))[0]


def test_commands_complete_and_help_shows_examples(call, monkeypatch):
    for name in ("classify", "explain", "canonicalise", "fit"):
        shown = call(name, "--help").stdout
        assert f"headtilt {name}" in shown
        assert "Examples" in shown
    from typer.testing import CliRunner

    words = {"_HEADTILT_COMPLETE": "complete_bash", "COMP_CWORD": "4"}
    for line, expected in {
        "headtilt classify x.jpg --model on": "onnx:",
        "headtilt classify x.jpg --model zoo:g": "zoo:gtsrb",
        "headtilt classify x.jpg --levels rotation,sc": "rotation,scale",
    }.items():
        done = CliRunner().invoke(app, prog_name="headtilt", env={**words, "COMP_WORDS": line})
        assert expected in done.stdout.split(), done.output


def test_a_black_box_with_nothing_but_logits_is_classified_fitted_and_explained(call, digits, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "boxed.py").write_text(
        "from headtilt.sources import zoo\n"
        "class Box:\n"
        "    input_size, channels = 28, 1\n"
        "    def __init__(self): self.net = zoo.load('digits:0')\n"
        "    def __call__(self, images): return self.net(images)\n"
    )
    box = ("--model", "python:boxed:Box")
    torch.manual_seed(0)
    assert call("fit", "upright", *box, "--out", "b", "--looks", "1", "--hidden", "16").exit_code == 0
    rows = json.loads(call("classify", "lying", *box, "--bundle", "b", "--json").stdout)
    assert all(row["error"] is None for row in rows)
    assert call("explain", sorted_first(), *box, "--bundle", "b", "--out", "x.png").exit_code == 0


def test_cells_of_a_table_are_no_formulas_and_names_steer_no_terminal(call, tmp_path, digits):
    names = ("=SUM(A1).png", "+1.png", "-1.png", "@x.png", "a\nb\x1b[2J.png", "plain.png")
    (tmp_path / "odd").mkdir()
    for name in names:
        (tmp_path / "odd" / name).write_bytes(b"no image")
    said = call("classify", *(f"odd/{name}" for name in names), *DIGITS, "--csv")
    assert "\x1b" not in said.stdout
    from headtilt.cli.everyday import _cell

    assert [_cell(name) for name in names] == [
        "'=SUM(A1).png",
        "'+1.png",
        "'-1.png",
        "'@x.png",
        "a\\nb\\x1b[2J.png",
        "plain.png",
    ]
    assert _cell(-1.5) == -1.5
