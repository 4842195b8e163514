"""Orient, then classify: what the network that guesses poses learns from, and that it undoes tilts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.predictor import Predictor
from headtilt.paper import zoo
from headtilt.paper.baselines import orient
from headtilt.paper.baselines.orient import Orienter, fit_orienter
from headtilt.paper.data import load
from headtilt.paper.data.perturb import angles_left, draw, perturb_dataset, turn_dataset

torch.set_num_threads(1)
LEVELS = (ht.rotation(),)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return zoo.load("digits:0")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return load("digits", "fit", limit=300).floats()


@pytest.fixture(scope="module")
def oriented(net, images) -> Orienter:
    return fit_orienter(Predictor(net, features="auto"), images, LEVELS, examples=3000)


def test_turned_digits_are_turned_back_and_read(net, oriented):
    data = load("digits", "test", limit=150)
    test = perturb_dataset(data, draw("rotation", 150))
    labels, poses = oriented(test.images)
    bare = Predictor(net)(test.images).labels
    assert float((labels == test.labels).float().mean()) > float((bare == test.labels).float().mean()) + 0.3
    assert float(angles_left(poses.inverse(), test.transforms).median()) < 15


def test_upright_digits_stay_and_quarters_are_found(oriented):
    data = load("digits", "test", limit=100)
    upright, quarters = (turn_dataset(data, torch.full((100,), count)) for count in (0, 1))
    for test in (upright, quarters):
        labels, poses = oriented(test.images)
        assert float((labels == test.labels).float().mean()) > 0.85
        assert float(angles_left(poses.inverse(), test.transforms).median()) < 10


def test_the_same_seed_gives_the_same_network_and_the_global_stream_stays(net, images):
    state = torch.get_rng_state()
    first, again, other = (
        fit_orienter(Predictor(net), images[:40], LEVELS, examples=60, hidden=8, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(first.weights, again.weights, strict=True))
    assert not torch.equal(first.weights[0], other.weights[0])


def test_a_global_seed_does_not_reach_it(net, images):
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            found.append(fit_orienter(Predictor(net), images[:20], LEVELS, examples=30, hidden=8).weights[0])
    assert torch.equal(*found)


def test_a_black_box_is_read_by_its_logits(net, images):
    blind = fit_orienter(Predictor(lambda views: net(views)), images[:40], LEVELS, examples=60, hidden=8)
    assert blind.mean.shape == (9,)
    assert blind.poses.shape == (36, 3, 3)
    several = fit_orienter(Predictor(net), images[:40], (ht.rotation(), ht.scale()), examples=60, hidden=8)
    assert several.poses.shape == (72, 3, 3)


def test_a_third_is_tilted_a_third_upright_and_a_third_turned_by_quarters():
    tilts, quarters, exact = orient._draws(LEVELS, 6000, 28, True, 0)
    turned = quarters > 0
    slight = angles_left(tilts, torch.eye(3).expand(6000, 3, 3)) <= 3
    for share, wanted in ((turned, 1 / 3), (exact & ~turned, 1 / 6), (~exact & slight, 1 / 6 + 6 / 360 / 3)):
        assert float(share.float().mean()) == pytest.approx(wanted, abs=0.02)
    assert bool((exact | ~turned).all())
    assert quarters[turned].unique().tolist() == [1, 2, 3]


@pytest.mark.parametrize(("levels", "square"), [((ht.scale(),), True), (LEVELS, False)])
def test_nothing_is_turned_by_quarters_where_nothing_turns_that_far(levels, square):
    _, quarters, exact = orient._draws(levels, 600, 28, square, 0)
    assert not bool(quarters.any())
    assert float(exact.float().mean()) == pytest.approx(1 / 4, abs=0.06)


def test_photographs_are_seen_through_their_crop(images):
    seen = []

    def model(views):
        seen.append(tuple(views.shape[1:]))
        return views.mean((2, 3)) * torch.ones(3)

    fit_orienter(Predictor(model), images[:10, :, :, :24], LEVELS, crop=16, examples=20, hidden=4)
    assert set(seen) == {(1, 16, 16)}


def test_units_that_are_left_out_are_made_up_for():
    generator = torch.Generator().manual_seed(0)
    weights = (torch.ones(4000, 1), torch.zeros(4000), torch.ones(1, 4000) / 4000, torch.zeros(1))
    whole = orient._scores(weights, torch.ones(1, 1))
    assert_close(orient._scores(weights, torch.ones(1, 1), generator), whole, rtol=0.03, atol=0)
