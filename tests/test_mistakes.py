"""What people get wrong in their first hour: each mistake has a message that names the fix."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt.paper.data import load
from headtilt.sources import Adapted, health, zoo
from headtilt.sources.pretrained import from_pretrained, wrapped

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
NET = zoo.load("digits")
DIGITS = load("digits", "test").floats()[:8]
FIT = load("digits", "fit").floats()[:40]


def robust(**options):
    return ht.ITS(NET, **options)


def to_numpy(images):
    return NET(images).numpy()


# What is typed, and what the message must say: the mistake, and the fix.
REFUSED = {
    "bytes": (lambda: robust()((DIGITS * 255).byte()), "images.float() / 255"),
    "channels last": (lambda: robust()(torch.rand(2, 28, 28, 3)), r"images.permute(0, 3, 1, 2)"),
    "one image, channels last": (lambda: robust()(torch.rand(28, 28, 1)), "images.permute(2, 0, 1)[None]"),
    "one image": (lambda: robust()(DIGITS[0]), "Add a batch axis: images[None]"),
    "bytes to fit on": (lambda: robust().fit((FIT * 255).byte()), "For bytes use images.float() / 255"),
    "a PIL image": (lambda: robust()(Image.new("L", (28, 28))), "got Image. For files and PIL images use"),
    "a path": (lambda: robust()("cup.jpg"), "from_pretrained(…).read(image)"),
    "a pathlib path": (lambda: robust().search(Path("cup.jpg")), "from_pretrained(…).read(image)"),
    "a list": (lambda: robust()([DIGITS[0], DIGITS[1]]), "torch.stack(images)"),
    "an array": (lambda: robust()(DIGITS.numpy()), "torch.as_tensor(images)"),
    "a photograph for a bare digits model": (
        lambda: robust()(torch.rand(1, 3, 64, 64)),
        "Check that the images have the channels and the size that the model takes",
    ),
    "a model of numpy": (lambda: ht.ITS(to_numpy)(DIGITS), "Convert it inside the model: torch.as_tensor(logits)"),
    "levels by name": (lambda: robust(levels="rotation"), "Say [rotation()]"),
    "levels not called": (lambda: robust(levels=[ht.rotation]), "Call it: rotation()"),
    "one level": (lambda: robust(levels=ht.rotation()), "list of groups, for example [rotation(), scale(0.25)]"),
    "a preset that is not unpacked": (lambda: ht.ITS(NET, ht.accurate()), "Unpack a preset: ITS(model, **accurate())"),
    "level for levels": (lambda: robust(level=[ht.rotation()]), "Did you mean levels=?"),
    "an option of the search": (lambda: robust(samples=9), "It belongs to the search"),
    "a name for a model": (lambda: ht.ITS("resnet18"), "nn.Module or a callable"),
    "a class for a model": (lambda: ht.ITS(nn.Flatten), "not its class; got the class Flatten. Make one: Flatten(…)"),
    "a model of no kind": (lambda: from_pretrained("resnet18"), "torchvision:NAME"),
    "no such device": (
        lambda: from_pretrained("zoo:digits", device="gpu"),
        'Use device="cpu"',
    ),
    "a gate that is off": (lambda: robust(gate=False), "got False. For no gate use None"),
    "a negative promise": (
        lambda: robust().fit(FIT, promise=-1),
        "must be points between 0 and 100; got -1. For no gate use promise=None",
    ),
    "three fit images": (lambda: robust().fit(FIT[:3]), "at least 8, better some hundreds; got 3"),
    "a photograph for digits": (
        lambda: from_pretrained("zoo:digits")(torch.rand(1, 3, 224, 224)),
        "Let it prepare them: robust.read(image)",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused_with_its_fix(mistake):
    make, says = REFUSED[mistake]
    with pytest.raises(ht.HeadtiltError) as caught:
        make()
    assert says in str(caught.value)


def test_a_gpu_that_is_not_there_is_refused_by_name():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ht.OptionError, match=r"device must be auto, cpu, .*; got 'cuda':"):
        from_pretrained("zoo:digits", device="cuda")


WARNED = {
    "floats of 0 … 255": (lambda: robust()(DIGITS * 255), "Divide by 255"),
    "fitted on 0 … 255": (lambda: robust().fit(FIT * 255, method="balance"), "Divide by 255"),
    "normalised already": (lambda: robust()(DIGITS * 2 - 1), "put the normalisation into the model"),
    "labels": (lambda: robust().fit(FIT, torch.zeros(40), method="balance"), "fit needs no labels"),
    "a photograph for digits": (
        lambda: from_pretrained("zoo:digits").read(Image.new("RGB", (400, 300), "orange")),
        "Choose a model of photographs",
    ),
}


@pytest.mark.parametrize("mistake", WARNED)
def test_what_may_be_meant_is_warned_of_with_its_fix(mistake):
    make, says = WARNED[mistake]
    with pytest.warns(UserWarning, match=says):
        make()


def test_pixels_that_resampling_took_a_little_out_of_range_are_not_spoken_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        robust()(DIGITS * 1.2 - 0.1)
        from_pretrained("zoo:digits").read(Image.new("L", (400, 300), 128), Image.new("RGB", (30, 30), "orange"))


def test_a_bundle_of_another_model_is_refused_though_it_has_as_many_classes(tmp_path):
    fitted = from_pretrained("zoo:digits:0").fit(FIT, method="balance")
    fitted.save(tmp_path / "bundle")
    again = from_pretrained("zoo:digits:0", bundle=tmp_path / "bundle")
    assert torch.equal(again(DIGITS), fitted(DIGITS))
    with pytest.raises(ht.DataError, match="another model"):
        from_pretrained("zoo:digits:1", bundle=tmp_path / "bundle")


def test_a_bundle_knows_its_model_in_half_precision(tmp_path):
    fitted = from_pretrained("zoo:digits:0").fit(FIT, method="balance")
    fitted.save(tmp_path / "bundle")
    adapted = from_pretrained("zoo:digits:0").adapted
    half = Adapted(adapted.model.bfloat16(), None, 28, 28, "auto", "half", 1)
    assert wrapped(half, bundle=tmp_path / "bundle").names is None


def test_a_missing_normalisation_is_found_out_and_a_right_one_left_alone():
    from headtilt.model.predictor import Predictor

    right = health.health(Predictor(NET), load("digits", "test").floats()[:40])
    assert right.advice() == []
    assert right.agreement > 0.9

    class Surer(nn.Module):
        """Sure of what lies in −1 … 1, lost in what lies in 0 … 1."""

        def forward(self, images):
            corner = images[:, 0, :4, :4].mean((1, 2)) + 1  # 0 on a black corner, if it is normalised
            logits = NET(images * 0.5 + 0.5)
            return torch.where(corner[:, None] < 0.1, logits, logits * 0.05)

    found = health.health(Predictor(Surer()), load("digits", "test").floats()[:40])
    assert found.better is not None
    assert found.better[0] == "a mean and a deviation of 0.5"
    assert "normalisation seems to be missing" in found.advice()[0]


def test_a_model_that_brings_its_normalisation_is_not_told_that_it_is_missing():
    from headtilt.model.predictor import Predictor
    from headtilt.sources.preprocessing import Normalised

    class Unsure(nn.Module):
        """Surer the more contrast it is shown, as any network is that was not trained for long."""

        def forward(self, images):
            return images.std((1, 2, 3))[:, None] * torch.linspace(0, 20, 9)

    images = load("digits", "test").floats()[:40]
    told = [health.health(Predictor(model), images).better for model in (Unsure(), Normalised(Unsure(), [0.5], [0.5]))]
    assert told[0] is not None
    assert told[1] is None


def test_a_model_near_chance_that_says_one_thing_and_does_not_agree_with_itself_is_told_so():
    found = health.Health(40, agreement=0.2, confidence=0.002, chance=0.001, commonest=0.95)
    said = " ".join(found.advice())
    for part in ("near chance", "barely agrees with itself: 20 %", "95 % of these images the same answer"):
        assert part in said
    assert health.Health(40, 0.95, 0.7, 0.001, 0.1).advice() == []


def test_turning_a_gate_off_is_said_alike_in_python_and_on_the_command_line(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from headtilt.cli import app

    monkeypatch.chdir(tmp_path)
    Path("upright").mkdir()
    for number, pixels in enumerate(load("digits", "fit").images[:12, 0].numpy()):
        Image.fromarray(np.asarray(pixels)).save(f"upright/{number}.png")
    words = ["fit", "upright", "--model", "zoo:digits", "--method", "balance", "--out"]
    assert CliRunner().invoke(app, [*words, "b", "--no-gate"]).exit_code == 0
    assert ht.ITS.load("b", NET).gate is None
    refused = CliRunner().invoke(app, [*words, "c", "--promise", "-1"])
    assert refused.exit_code == 2
    assert robust().fit(FIT, method="balance", promise=None).gate is None
    assert math.isinf(robust().fit(FIT, method="balance", promise=0).gate.margin)
