"""Rules that look at the same views ask the network once, and answer as if each had asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headtilt.geometry.groups import rotation
from headtilt.model.predictor import Predictor
from headtilt.paper.experiments.methods import Setting, build
from headtilt.paper.experiments.recall import Memory, Recalling
from headtilt.paper.experiments.reproduce import table1
from headtilt.paper.experiments.reproduce.study import Study
from headtilt.presets import affine_levels

PAIRS = [("paper3", "paper3-confidence"), ("tree3-energy", "tree3-sum"), ("tree3-energy", "tree5-energy")]


@pytest.fixture
def setting(digits_net: nn.Module) -> Setting:
    return Setting(digits_net, tuple(affine_levels()), lambda: torch.empty(0), padding="zeros", mc_passes=3)


@pytest.fixture
def views(digits_net: nn.Module) -> Any:
    """How many views the network has seen."""
    seen = []
    hook = digits_net.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    yield lambda: sum(seen)
    hook.remove()


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_rule_that_remembers_answers_as_one_that_asks_and_asks_less(first, second, setting, digits, views):
    images = digits.floats(slice(6))
    plain = build(second, setting)(images)
    asked = views()
    shared = replace(setting, memory=Memory())
    build(first, shared)(images)
    before = views()
    again = build(second, shared)(images)
    assert torch.equal(again.labels, plain.labels)
    assert torch.equal(again.perturbation, plain.perturbation)
    assert views() - before < 0.6 * asked


def test_other_seeds_images_and_passes_are_other_questions(digits_net, digits):
    images, index = digits.floats(slice(4)), torch.arange(4)
    poses = rotation().matrix(torch.linspace(0, 1, 4))
    memory = Memory()

    def answer(seed: int, passes: int, pictures: torch.Tensor, **how: Any) -> torch.Tensor:
        predictor = Predictor(digits_net, mc_passes=passes, seed=seed)
        found = Recalling.of(predictor, memory).views(pictures, index, poses, **how).logits
        assert torch.equal(found, predictor.views(pictures, index, poses, **how).logits)
        return found

    first = answer(0, 4, images)
    assert torch.equal(answer(0, 4, images.clone()), first)
    others = [answer(1, 4, images), answer(0, 5, images), answer(0, 4, images.flip(0))]
    others.append(answer(0, 4, images, interpolation="bicubic"))
    assert not any(torch.equal(first, other) for other in others)
    everywhere = Recalling.of(Predictor(digits_net, mc_passes=4), memory)
    assert torch.equal(everywhere.all_views(images, poses).logits, everywhere.all_views(images, poses).logits)
    assert sum(len(known) for known in memory.answers.values()) == 6
    memory.forget()
    assert not memory.answers


def test_table1_forgets_what_a_network_said_when_it_is_anothers_turn():
    settings = table1.Settings(Study(datasets=("digits",)), table1.QUICK, "digits")
    first = settings.at(0).memory
    assert first is not None
    first.recall("asked", (), lambda: Predictor(settings.at(0).model)(torch.rand(1, 1, 28, 28)))
    assert settings.at(0).memory is first
    assert first.answers
    assert settings.at(1).memory is not first
    assert not first.answers
