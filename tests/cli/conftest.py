"""A way to call the command line, and a folder of coloured photographs with a network that reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headtilt.cli import app

torch.set_num_threads(1)
Call = Callable[..., Any]

# Its outputs are red, green, blue; the sorted folders are blue, green, red.
OWN = '''
import torch
from torch import nn

from headtilt.sources import Adapted


class Colours(nn.Module):
    """Logits are how red, green and blue an image is; it sees squares of one size and nothing else."""

    labels = ("Red", "green", "blue")
    input_size = 24

    def __init__(self, size=24):
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.full((1,), 9.0))

    def forward(self, images):
        assert images.shape[1:] == (3, self.size, self.size), images.shape
        return images.mean((2, 3)) * self.weight


def make_model():
    return Colours()


def make_small():
    return Colours(16)


def make_unnamed():
    model = Colours()
    model.labels = None
    return model


def make_adapted():
    return Adapted(Colours(20), ("red", "green", "blue"), 20, 24, "reflection", "colours")


def make_two():
    return nn.Sequential(Colours(), nn.Linear(3, 2))


def make_nothing():
    return 3


def make_trouble():
    raise RuntimeError("the weights are elsewhere")
'''


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Return what runs the command line, 80 columns wide, in an empty folder with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADTILT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("HEADTILT_DATA", "HEADTILT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words, **options: CliRunner().invoke(app, [str(word) for word in words], **options)


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with photographs of one main colour each, none of them square; colournet.py lies beside it."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "colournet.py").write_text(OWN, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "colournet", raising=False)
    for place, name in enumerate(("red", "green", "blue")):
        for number in range(4):
            colour = [40 + 10 * number] * 3
            colour[place] = 220
            path = tmp_path / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.new("RGB", (60 + number, 50), tuple(colour)).save(path)
    return tmp_path / "images"
