"""The command that asks how images arrive: text, JSON, a picture, and an exit code for pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headtilt.apps.playground.methods import PACKAGED
from headtilt.paper.data import load as load_data

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
MODEL = ("--model", "zoo:digits:0", "--bundle", PACKAGED)


def write(folder: str, turn: Image.Transpose | None = None, count: int = 30) -> None:
    Path(folder).mkdir()
    for number, pixels in enumerate(load_data("digits", "test").images[:count, 0].numpy()):
        picture = Image.fromarray(pixels)
        (picture if turn is None else picture.transpose(turn)).save(f"{folder}/{number}.png")


def test_a_test_set_that_a_pipeline_transposed_is_found_out(call):
    write("in", Image.Transpose.TRANSPOSE)
    Path("in/broken.png").write_bytes(b"no image")
    result = call("audit", "in", *MODEL, "--picture", "audit.png", "--strict")
    assert result.exit_code == 3
    assert "Images arrive transposed." in result.stdout
    assert "swap rows and columns" in result.stdout
    assert "is not an image" in result.stderr
    assert Path("audit.png").read_bytes().startswith(b"\x89PNG")


def test_an_upright_source_passes_and_json_says_all(call):
    write("in")
    result = call("audit", "in", *MODEL, "--json", "--strict", "--images", "20", "--any-angle")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["verdict"], found["mirrored"], found["images"]) == ("upright", "no", 20)
    assert found["turned"] == {"share": 0, "low": 0, "high": pytest.approx(0.1, abs=0.1)}
    assert sum(found["angles"]) == 20


def test_without_images_or_with_another_kind_of_picture_the_command_says_what_is_wrong(call):
    Path("empty").mkdir()
    assert "no images were found" in call("audit", "empty", *MODEL).stderr
    assert "must be one of '.png', '.svg'" in call("audit", "empty", *MODEL, "--picture", "a.gif").stderr
