"""Every baseline by its name: trains, answers, and is the same for the same seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headtilt.errors import OptionError
from headtilt.geometry.warp import warp
from headtilt.paper.baselines import NAMES, Canonicaliser, make
from headtilt.sources.zoo.cnn import LargeCNN, SmallCNN

CANONICALISERS = ("stn", "icstn", "dtn", "etn", "etn-cut", "etn-official")
CASES = [(name, 9, 1, 28) for name in NAMES] + [(name, 43, 3, 32) for name in CANONICALISERS]


def batch(classes: int, channels: int, size: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, channels, size, size, generator=generator)
    return images, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize(("name", "classes", "channels", "size"), CASES)
def test_one_step_of_training_lowers_the_loss(name: str, classes: int, channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = make(name, classes=classes, channels=channels, size=size).eval()  # no dropout: the same loss is compared
    images, labels = batch(classes, channels, size)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    before = F.cross_entropy(model(images), labels)
    before.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    optimiser.step()
    assert F.cross_entropy(model(images), labels) < before - 1e-4


@pytest.mark.parametrize(("name", "classes", "channels", "size"), CASES)
def test_logits_have_one_number_per_class(name: str, classes: int, channels: int, size: int) -> None:
    model = make(name, classes=classes, channels=channels, size=size)
    logits = model(batch(classes, channels, size, 3)[0])
    assert logits.shape == (3, classes)
    assert logits.isfinite().all()


@pytest.mark.parametrize(("name", "classes", "channels", "size"), [case for case in CASES if case[0] in CANONICALISERS])
def test_canonicalisers_have_finite_affine_poses(name: str, classes: int, channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = make(name, classes=classes, channels=channels, size=size).eval()
    assert isinstance(model.backbone, SmallCNN if channels == 1 else LargeCNN)
    images, labels = batch(classes, channels, size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimiser.step()
    pose = model.pose(images)
    assert pose.shape == (8, 3, 3)
    assert pose.isfinite().all()
    assert (pose - torch.eye(3)).abs().max() > 1e-4
    assert pose[:, 2].tolist() == [[0.0, 0.0, 1.0]] * 8
    assert model.canonical(images).shape == images.shape
    torch.testing.assert_close(model(images), model.backbone(model.canonical(images)))
    if name != "dtn":  # whose flow is not affine
        torch.testing.assert_close(model.canonical(images), warp(images, pose))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_makes_the_same_network(name: str) -> None:
    images = batch(9, 1, 28, 2)[0]
    answers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        answers.append(make(name, classes=9, channels=1, size=28).eval()(images))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_carry_all_that_the_answer_depends_on(name: str) -> None:
    images = batch(9, 1, 28, 2)[0]
    first, second = (make(name, classes=9, channels=1, size=28).eval() for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(images), second(images))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_inside_stays_behind_on_the_cpu(name: str) -> None:
    model = make(name, classes=9, channels=1, size=28).to("meta")
    images = torch.empty(2, 1, 28, 28, device="meta")
    assert model(images).device.type == "meta"
    if name in CANONICALISERS:
        assert model.pose(images).device.type == "meta"


@pytest.mark.parametrize("name", NAMES)
def test_transformers_are_canonicalisers_and_equivariant_networks_are_not(name: str) -> None:
    assert isinstance(make(name, classes=9, channels=1, size=28), Canonicaliser) == (name in CANONICALISERS)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"name must be one of 'stn'.*got 'vit'"):
        make("vit", classes=9, channels=1, size=28)
