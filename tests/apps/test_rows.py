"""Rows for image files, whatever kind of labels a model gives."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import headtilt as ht
from headtilt.apps.rows import rows_of
from headtilt.cli import app
from tests.toys import tiny_images

# Says which of three corners are bright: any number of them may be.
CORNERS = """
import torch
from headtilt.sources import Adapted


class Corners(torch.nn.Module):
    def forward(self, images):
        corners = [images[:, :, :8, :8], images[:, :, :8, -8:], images[:, :, -8:, :8]]
        return torch.stack([20 * (part.mean((1, 2, 3)) - 0.5) for part in corners], 1)


def make():
    return Adapted(Corners(), ("left", "right", "low"), 32, 32, "zeros", "corners", 1)
"""


class Planted(torch.nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, images):
        return self.logits.expand(len(images), -1)


@pytest.mark.parametrize(
    ("logits", "label", "first"),
    [
        ([-1.0, 2.0, 3.0], "c; b", 3.0),
        ([0.5, -2.0, -3.0], "a", 0.5),
        ([-2.0, -0.5, -1.0], "", -0.5),
    ],
)
def test_a_row_of_several_labels_names_all_that_are_there_the_most_probable_first(logits, label, first):
    robust = ht.ITS(Planted(logits), search=ht.Tree(confidence="multilabel", samples=3))
    row = rows_of(robust.search(tiny_images(1)), ["one"], "abc", topk=2)[0]
    assert row.label == label
    assert row.score == pytest.approx(float(torch.tensor(first).sigmoid()))
    ranked = sorted(zip(logits, "abc", strict=True), reverse=True)
    assert [name for name, _ in row.top] == [name for _, name in ranked[:2]]


def test_classify_answers_for_models_of_several_labels(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
    (tmp_path / "corners.py").write_text(CORNERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    picture = image.new("L", (32, 32), 0)
    picture.paste(255, (0, 0, 32, 8))
    picture.save("top.png")
    from corners import make

    plan = ht.Tree([ht.rotation(0.1)], confidence="multilabel", samples=3)
    ht.ITS(make().model, search=plan).save("bundle")
    words = ["classify", "top.png", "--model", "python:corners:make", "--bundle", "bundle"]
    for extra in ([], ["--csv"], ["--topk", "2"]):
        done = CliRunner().invoke(app, [*words, *extra])
        assert done.exit_code == 0, done.output
        assert "left" in done.stdout
    row = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)[0]
    assert sorted(row["label"].split("; ")) == ["left", "right"]
    assert row["score"] > 0.9
