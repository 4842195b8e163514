"""What a search costs is measured, beside the bare model and other budgets, and leaves the wrapper as it came."""

from __future__ import annotations

import pytest
import torch

import headtilt as ht
from headtilt.cost import tried
from headtilt.errors import OptionError, ShapeError
from headtilt.search.joint import Joint
from tests.toys import TinyNet, tiny_images

ROTATION = (ht.rotation(),)


def test_rows_are_the_bare_model_and_the_budgets_in_order_with_the_wrappers_own_marked():
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=6))
    told = robust.cost(tiny_images(8), budgets=[3, 12])
    assert [row.budget for row in told.rows] == [1, 3, 6, 12]
    assert [row.chosen for row in told.rows] == [False, False, True, False]
    assert [row.views_tilted for row in told.rows] == [1, 3, 6, 12] == [row.views_upright for row in told.rows]
    assert told.rows[0].agreement_upright == 100
    assert told.chosen is told.rows[2]
    assert (told.images, told.device) == (8, "cpu")
    assert all(row.milliseconds_upright > 0 and row.milliseconds_tilted > 0 for row in told.rows)
    assert "6*" in str(told)
    assert robust.plan.budget == 6


def test_agreement_is_with_the_upright_answer_and_a_seed_gives_the_same_tilts():
    images = tiny_images(12)
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=4), gate=None)
    first, again, other = (robust.cost(images, budgets=[], seed=seed).rows for seed in (0, 0, 1))
    assert [row.agreement_tilted for row in first] == [row.agreement_tilted for row in again]
    assert [row.agreement_tilted for row in first] != [row.agreement_tilted for row in other]
    kept = robust.but(gate=float("inf")).cost(images, budgets=[]).rows
    assert kept[1].agreement_tilted == kept[0].agreement_tilted == first[0].agreement_tilted


def test_a_fitted_search_with_proposals_is_measured_with_what_was_fitted():
    robust = ht.ITS(TinyNet(), **ht.fast()).fit(
        tiny_images(60), recipe=ht.HeadRecipe(hidden=8, looks=1, views=4, epochs=1), progress=False
    )
    told = robust.cost(tiny_images(6), budgets=[5])
    assert [row.budget for row in told.rows] == [1, 5, 20]
    assert all(row.views_tilted <= row.budget for row in told.rows)
    assert told.chosen.agreement_upright >= 80  # the gate of so few images keeps nearly all


@pytest.mark.parametrize(
    ("plan", "budgets"),
    [
        (Joint(ROTATION, budget=12), [4, 8, 12, 16, 24]),
        (Joint(ROTATION, budget=9, lattice=36), [4, 8, 12, 16, 24, 36]),
        (Joint(ROTATION, budget=24, rounds=1), []),
        (Joint((ht.quarter_turns(),), budget=4), [4]),  # there are no more poses
        (Joint((ht.quarter_turns(),), budget=9), []),
        (ht.Tree(ROTATION), []),
    ],
)
def test_budgets_that_are_tried_suit_the_search(plan, budgets):
    assert tried(plan, None) == budgets


def test_what_cannot_be_measured_is_refused():
    robust = ht.ITS(TinyNet(), search=ht.Tree(samples=5))
    with pytest.raises(OptionError, match="budgets are for a Joint search; this one is Tree"):
        robust.cost(tiny_images(4), budgets=[3])
    with pytest.raises(OptionError, match="number of images"):
        robust.cost(tiny_images(1))
    with pytest.raises(ShapeError, match="images"):
        robust.cost(torch.zeros(3, 4))
