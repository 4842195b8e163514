"""SI-Score's manner of composing images, and the items that need photographs, with cut-outs made up here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from headtilt.errors import DataError
from headtilt.paper.data.siscore import LABELS
from headtilt.paper.experiments import reproduce as items
from headtilt.paper.experiments.reproduce.compose import ANGLES, PLACEMENTS, Placement, compose, paste, turns
from headtilt.paper.experiments.reproduce.photographs import undone
from headtilt.paper.experiments.reproduce.study import Study, reproduce

COLOURS = {"lemon": (255, 255, 0), "strawberry": (255, 0, 0)}
MODEL = """
import torch
from torch import nn

class Colours(nn.Module):
    input_size = 24

    def forward(self, images):
        # How much of the view is red without green, and with it; a background has neither.
        red, green, blue = images.unbind(1)
        logits = torch.zeros(len(images), 1000)
        logits[:, 949] = 40 * ((red - green) * (1 - blue)).clamp_min(0).mean((1, 2))
        logits[:, 951] = 40 * (torch.minimum(red, green) - blue).clamp_min(0).mean((1, 2))
        logits[:, 21] = 1.0
        return logits

def make():
    return Colours()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, colour in COLOURS.items():
        front = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
        ImageDraw.Draw(front).rectangle((5, 10, 34, 29), fill=(*colour, 255))
        path = tmp_path / "si-score-mini" / "foregrounds" / f"{name}1.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        front.save(path)
    backgrounds = tmp_path / "si-score-mini" / "backgrounds"
    backgrounds.mkdir()
    Image.new("RGB", (60, 40), (90, 90, 90)).save(backgrounds / "grey.jpg")
    (tmp_path / "colour_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_object_covers_its_share_of_the_image_in_the_middle():
    front = Image.new("RGBA", (40, 20), (255, 0, 0, 255))
    image = paste(front, Image.new("RGB", (50, 50)), Placement(area=0.25), 40)
    assert image.shape == (3, 40, 40)
    red = image[0] > 127
    assert float(red.float().mean()) == pytest.approx(0.25, abs=0.02)
    rows, columns = red.nonzero().float().mean(0).tolist()
    assert (rows, columns) == pytest.approx((19.5, 19.5), abs=0.6)
    assert int(red.any(0).sum()) == pytest.approx(2 * int(red.any(1).sum()), abs=2)


def test_a_positive_angle_turns_the_object_clockwise_and_a_centre_moves_it():
    front = Image.new("RGBA", (30, 10), (255, 0, 0, 255))
    ImageDraw.Draw(front).rectangle((20, 0, 29, 9), fill=(0, 255, 0, 255))  # green at the right end
    back = Image.new("RGB", (50, 50))
    turned = paste(front, back, Placement(degrees=90), 40)
    green = (turned[1] > 127).nonzero().float().mean(0)
    red = (turned[0] > 127).nonzero().float().mean(0)
    assert green[0] > red[0] + 4  # what was at the right is now at the bottom
    moved = paste(front, back, Placement(centre=(0.25, 0.75)), 40)
    rows, columns = (moved.amax(0) > 127).nonzero().float().mean(0).tolist()
    assert columns < 14
    assert rows > 26


def test_every_variant_changes_one_factor_alone():
    plain = Placement()
    assert len(ANGLES) == 18
    assert ANGLES[-1] == 341
    for variant, fields in {"rotation": "degrees", "area": "area", "location": "centre"}.items():
        for placement in PLACEMENTS[variant]:
            others = {"degrees", "area", "centre"} - {fields}
            assert all(getattr(placement, name) == getattr(plain, name) for name in others)


def test_composed_images_carry_imagenet_labels_and_the_limit_chooses_by_seed(folder):
    whole = compose("rotation", folders=[folder], size=24)
    assert len(whole) == 2 * 1 * 18
    assert len(whole.classes) == 1000
    assert set(whole.labels.tolist()) == {LABELS["lemon"], LABELS["strawberry"]}
    some = compose("rotation", folders=[folder], size=24, limit=5)
    assert len(some) == 5
    assert not torch.equal(some.images, compose("rotation", folders=[folder], size=24, limit=5, seed=1).images)
    (folder / "si-score-mini" / "foregrounds" / "lemon1.png").rename(
        folder / "si-score-mini" / "foregrounds" / "unknown1.png"
    )
    with pytest.raises(DataError, match="named after no class"):
        compose("area", folders=[folder])


def run_siscore(folder: Path, **sizes: object) -> dict:
    sizes = {"images": 6, "samples": 5, "hypotheses": 5, "turned": 4, **sizes}
    study = Study(folder, True, folders=[folder], model="python:colour_model:make", sizes=sizes)
    reproduce(items.item("siscore"), study)
    return json.loads((folder / "siscore.json").read_text(encoding="utf-8"))


def test_siscore_measures_the_bare_model_the_searches_and_the_ceilings_on_every_variant(folder):
    report = run_siscore(folder)
    found = report["results"]["python:colour_model:make"]
    assert set(found) == {"rotation", "area", "location"}
    assert "imagenet-mini" in report["left_out"]["imagenet"]
    for entry in found.values():
        assert entry["source"] == "composed from si-score-mini"
        assert entry["images"] == 6
    rows = found["rotation"]["rows"]
    assert {"bare", "bare, zoom 1.5", "rotation, zoom 1", "rotation by energy, zoom 1.5", "oracle, zoom 1.5"} < set(
        rows
    )
    assert {"scale then rotation", "joint", "upright composite", "ITS, zeros"} < set(rows)
    assert all(row["acc1"] == 100 for row in rows.values())  # colours do not turn
    assert rows["ITS, zeros"]["acc5"] >= rows["ITS, zeros"]["acc1"]
    assert 0 <= rows["ITS, zeros"]["acc5_hypotheses"] <= 100
    judged = report["verdict"]["python:colour_model:make"]["rotation"]
    assert judged["gain_of_best_unfitted"] == 0
    assert not judged["search_helps"]
    assert set(judged["ceilings"]) == {"oracle", "oracle, zoom 1.5", "upright composite"}
    assert report["paper"]["location"]["ViT-B/16 + ITS"] == [29.7, 45.0, 43.6]
    assert (folder / "siscore.png").stat().st_size > 5000


def test_siscore_runs_the_same_on_the_published_layout(folder):
    for name, colour in COLOURS.items():
        place = folder / "rotation" / name / "1.jpg"
        place.parent.mkdir(parents=True)
        Image.new("RGB", (50, 40), colour).save(place)
    report = run_siscore(folder, turned=0)
    found = report["results"]["python:colour_model:make"]["rotation"]
    assert (found["source"], found["images"]) == ("SI-Score", 2)
    assert found["rows"]["rotation, zoom 1.5"]["acc1"] == 100
    assert not {"oracle", "upright composite"} & set(found["rows"])
    assert "no oracle" in report["left_out"]["rotation: oracle"]


def test_the_turn_of_composed_images_can_be_left_out_and_is_known(folder):
    turned, upright = (compose("rotation", folders=[folder], size=24, limit=8, upright=flag) for flag in (False, True))
    degrees = turns("rotation", folders=[folder], limit=8)
    assert torch.equal(turned.labels, upright.labels)
    assert set(degrees.tolist()) <= {float(angle) for angle in ANGLES}
    back = undone(turned.floats(), degrees, "reflection")
    apart, before = (float((images - upright.floats()).abs().mean()) for images in (back, turned.floats()))
    assert apart < before / 2


def test_examples_walk_over_photographs_where_there_are_some(folder):
    sizes = {"candidates": 20, "photographs": 3, "surface": 9, "samples": 5, "passes": 2}
    study = Study(folder, True, folders=[folder], datasets=("digits",), model="python:colour_model:make", sizes=sizes)
    paths = reproduce(items.item("examples"), study)
    names = {path.name for path in paths}
    assert names >= {"examples.png", "examples-algorithm.png", "examples-cutout.png", "examples-focus.png"}
    report = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
    assert next(row["level"] for row in report["results"]["cutout"]["rows"]) == "rotation"
    assert next(row["level"] for row in report["results"]["focus"]["rows"]) == "translate_x"
    assert report["left_out"] == {}
