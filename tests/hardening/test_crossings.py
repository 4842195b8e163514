"""Where two features meet: every pair of settings on tiny networks; hardening/crossings.py says what must hold."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors", reason="the extra data is not installed")

from hardening import crossings
from headtilt.calibration.balance import InSingle
from headtilt.calibration.gate import Gate
from headtilt.model import state
from headtilt.model.predictor import Predictor

asked = Predictor.__call__
CASES = crossings.pairwise(crossings.FACTORS)


def test_every_pair_of_settings_is_in_some_case_and_there_are_far_fewer_than_combinations():
    for (one, first), (other, second) in combinations(crossings.FACTORS.items(), 2):
        for pair in product(first, second):
            assert any((case[one], case[other]) == pair for case in CASES), (one, other, pair)
    assert len(CASES) < len(list(product(*crossings.FACTORS.values()))) / 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("crossings")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[crossings.name(case) for case in CASES])
def test_a_case_answers_as_in_double_precision_leaves_all_as_it_was_and_survives_every_journey(number, folder):
    crossings.check(CASES[number], folder / f"{number:03d}")


def test_another_process_gives_the_same_answers_to_the_bit(folder):
    for number in (0, 1):
        crossings.check(CASES[number], folder / f"here-{number:03d}")
    assert crossings.in_another_process(folder) == []


def case(**settings) -> crossings.Case:
    return {**{name: values[0] for name, values in crossings.FACTORS.items()}, "batch": 7, **settings}


@pytest.mark.parametrize(
    ("settings", "owner", "attribute", "fault", "said"),
    [
        ({"precision": "bfloat16"}, InSingle, "_apply", nn.Module._apply, "less than single precision"),
        ({}, Gate, "set_extra_state", lambda self, state: None, "given the state"),
        ({"fitted": False}, state, "_restore", lambda module, kept: module.train(False), "as it came"),
        ({}, Predictor, "__call__", lambda self, images: asked(self, images.mul_(1.5)), "images were changed"),
    ],
    ids=["half precision", "lost state", "other modes", "other pixels"],
)
def test_faults_that_were_there_once_would_be_seen(settings, owner, attribute, fault, said, monkeypatch, tmp_path):
    chosen = case(**settings)
    crossings.wrapper(chosen, "double")  # prepared without the fault
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises(AssertionError, match=said):
        crossings.check(chosen, tmp_path)


def test_the_reference_itself_searches_in_double_precision():
    reference = crossings.wrapper(case(precision="half"), "double")
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.float64}
    assert reference.search(crossings.tilted_images(2).double()).bare.dtype == torch.float64
