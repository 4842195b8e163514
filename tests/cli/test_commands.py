"""What all commands have in common, and `headtilt train` and `headtilt doctor`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headtilt
from headtilt.io.weights import load_tensors
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.paper.train import RECIPES, Recipe, accuracy


def test_help_names_the_commands_and_shows_examples(call):
    result = call("--help")
    assert result.exit_code == 0
    for word in ("demo", "evaluate", "train", "doctor", "$ headtilt demo"):
        assert word in result.stdout


def test_the_help_of_evaluate_says_how_to_bring_a_model(call):
    said = " ".join(call("evaluate", "--help").stdout.split())
    assert "python:mymodule:make_model calls make_model() of mymodule.py" in said
    assert "input_size" in said


def test_version(call):
    assert call("--version").stdout.strip() == headtilt.__version__


def test_debug_shows_the_traceback(call, monkeypatch):
    assert isinstance(call("--debug", "evaluate", "nosuch").exception, headtilt.OptionError)
    assert isinstance(call("evaluate", "nosuch").exception, SystemExit)
    monkeypatch.setenv("HEADTILT_DEBUG", "1")
    assert isinstance(call("evaluate", "nosuch").exception, headtilt.OptionError)


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(call, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "taken").write_text("")
    result = call("evaluate", "digits", "--networks", "1", "--limit", "5", "--method", "vanilla", "--out", "taken")
    assert result.exit_code == 2
    assert re.search(r"error: .*taken", result.stderr.splitlines()[-1])


def test_ctrl_c_ends_with_130(call, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("headtilt.paper.experiments.report.devices", interrupted)
    assert call("doctor").exit_code == 130


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


BLOCK = """
import sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
sys.argv = ["headtilt", *{words!r}]
from headtilt.__main__ import main
main()
"""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    done = run(BLOCK.format(names=[missing], words=["demo"]))
    assert done.returncode == 2
    assert done.stderr == "headtilt's command line needs typer and rich: pip install 'headtilt[cli]'\n"
    assert done.stdout == ""


def test_the_demo_says_at_once_that_matplotlib_is_missing(tmp_path):
    done = run(BLOCK.format(names=["matplotlib"], words=["demo", "--out", str(tmp_path / "out")]))
    assert done.returncode == 2
    assert done.stderr.startswith("error: matplotlib is needed here")
    assert "pip install 'headtilt[plot]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_entry_point_runs_the_same_commands():
    done = run("import sys; sys.argv = ['headtilt', 'evaluate', 'nosuch']; from headtilt.__main__ import main; main()")
    assert done.returncode == 2
    assert done.stderr.startswith("error: DATASET must be one of")
    assert len(done.stderr.splitlines()) == 1


def test_train_writes_weights_that_are_as_good_as_it_says(call, tmp_path):
    result = call("train", "digits", "--seed", "7", "--epochs", "2", "--out", "mine.safetensors", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "weights: mine.safetensors" in result.stdout
    said = float(re.search(r"digits:7 +([\d.]+) % of 110 validation images right", result.stdout)[1])
    network = zoo.empty("digits")
    network.load_state_dict(load_tensors(tmp_path / "mine.safetensors")[0])
    held_out = load("digits", "validation")
    assert said == pytest.approx(accuracy(network.eval(), held_out.images, held_out.labels), abs=0.006)
    assert said > 30, "far above chance after two epochs"
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "what is half done is cleared away"


def test_train_does_not_overwrite_a_file_unless_told_to(call, tmp_path):
    (tmp_path / "mine.safetensors").write_text("precious")
    refused = call("train", "digits", "--epochs", "1", "--out", "mine.safetensors")
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert (tmp_path / "mine.safetensors").read_text() == "precious"
    assert call("train", "digits", "--epochs", "1", "--out", "mine.safetensors", "--force").exit_code == 0
    assert len(load_tensors(tmp_path / "mine.safetensors")[0]) == 10


def test_train_keeps_other_recipes_out_of_the_zoo(call):
    refused = call("train", "digits", "--epochs", "1")
    assert refused.exit_code == 2
    assert "--out" in refused.stderr


def test_train_says_where_weights_are_that_it_need_not_train(call):
    result = call("train", "digits", "--device", "cpu")
    said = " ".join(result.stdout.split())
    assert re.search(r"digits:0 (9\d\.\d\d|100\.00) %", said)
    assert "digits-0.safetensors (already there)" in said


def test_train_says_that_packaged_weights_come_first(call, monkeypatch, tmp_path):
    monkeypatch.setitem(RECIPES, "digits", Recipe(1))
    result = call("train", "digits", "--force", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "still uses the packaged weights" in result.stdout
    assert (tmp_path / "cache" / "zoo" / "digits-0.safetensors").exists()
    fresh = call("train", "digits", "--seed", "99", "--device", "cpu")
    assert "note:" not in fresh.stdout
    assert "already there" in call("train", "digits", "--seed", "99", "--device", "cpu").stdout


def test_doctor_says_what_is_there_and_what_is_not(call, tmp_path, monkeypatch):
    (tmp_path / "data" / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz").touch()
    (tmp_path / "cache" / "zoo").mkdir(parents=True)
    (tmp_path / "cache" / "zoo" / "gtsrb-4.safetensors").touch()
    (tmp_path / "cache" / "zoo" / ".gtsrb-plain-3.partial.safetensors").touch()
    monkeypatch.setenv("COLUMNS", "300")
    result = call("doctor", "--data", "data")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "data mnist: data/MNIST/raw" in lines
    assert "fashion-mnist: not found" in lines
    assert "imagenet-mini: not found" in lines
    assert "digits: comes with scikit-learn" in lines
    assert "cached networks gtsrb-4" in lines
    assert any(line.startswith("packaged networks") and "digits-0" in line for line in lines)
    assert any(line.startswith("versions") and f"headtilt {headtilt.__version__}" in line for line in lines)
    assert any(line.startswith("[cli]") and "typer" in line for line in lines)
    assert any(line.startswith("devices cpu:") for line in lines)


def test_doctor_says_how_to_install_what_is_missing(call, monkeypatch):
    monkeypatch.setattr(
        "headtilt.paper.experiments.report.version", lambda package: None if package == "pooch" else "9.9"
    )
    monkeypatch.setenv("COLUMNS", "300")
    assert "pooch missing" in (said := call("doctor").stdout)
    assert "pip install 'headtilt[data]'" in said
    assert "pip install 'headtilt[cli]'" not in said


def test_the_names_of_levels_are_those_of_the_presets():
    from headtilt import presets
    from headtilt.cli import options

    assert tuple(presets.LEVELS) == options.LEVELS


COMMANDS = [
    "audit",
    "canonicalise",
    "classify",
    "cost",
    "doctor",
    "evaluate",
    "explain",
    "fit",
    "playground",
    "predict",
    "serve",
]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_flags_take_no_value_and_show_none(name, call):
    shown = call(*([name] if name else []), "--help").stdout
    assert "bool" not in shown
    assert "--help" in shown


def test_help_lists_what_a_newcomer_needs_first(call):
    said = call("--help").stdout
    places = [said.index(f"{name} ") for name in ("demo", "classify", "fit", "predict", "evaluate")]
    assert places == sorted(places)


def test_paragraphs_of_help_are_not_broken_where_the_source_is(call):
    said = call("fit", "--help").stdout
    assert "measured on images that were held out. The model itself" in " ".join(said.split())
    assert "that were held\n" not in said.replace(" \n", "\n")


def test_make_help_lists_every_goal_that_says_what_it_does():
    root = Path(__file__).parents[2]
    if not (root / "Makefile").exists() or shutil.which("make") is None:
        pytest.skip("no Makefile here, or no make")
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    goals = [line.split()[1] for line in shown.splitlines()]
    assert {"demo", "docs", "help", "lint", "release", "test", "types", "unit"} <= set(goals)
