"""Fitting needs upright images and nothing else: it gives all or nothing, and the classifier stays as it is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from core.toys import TinyNet, fingerprint, tiny_images
from headtilt import blocks, gate_fit
from headtilt import fit as fitting
from headtilt.calibrate import Balance, upright_prior
from headtilt.data import load
from headtilt.data.perturb import draw, perturb_dataset
from headtilt.distances import Neighbours, Prototypes
from headtilt.fit import Fitter
from headtilt.gate import Promise
from headtilt.groups import decompose
from headtilt.head import HeadRecipe, OrbitHead
from headtilt.looks import centre_crop
from headtilt.predictor import Predictor
from headtilt.search.joint import Joint, lattice

from .conftest import QUICK
from .toys import bias_of, joint

METHODS = {"head": OrbitHead, "balance": Balance, "prototypes": Prototypes, "neighbours": Neighbours}


# --- the classifier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", [*METHODS, "keep"])
def test_fitting_never_changes_the_classifier(digits_net, upright, method, training):
    net = copy.deepcopy(digits_net).train(training)
    before = fingerprint(net)
    robust = joint(net, budget=6).fit(upright[:110], method=method, recipe=QUICK, views=6)
    robust.search(upright[:3])
    assert fingerprint(net) == before


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_its_calibrator_and_runs(digits_net, upright, method):
    robust = joint(digits_net).fit(upright, method=method, recipe=QUICK, promise=None)
    assert isinstance(robust.calibrator, METHODS[method])
    assert robust.report == {"method": method, "images": 200, "seed": 0}
    assert robust.gate is None
    result = robust.search(upright[:20])
    assert result.logits.shape == (20, 9)
    assert result.views.tolist() == [24] * 20
    assert not bool(result.gated.any())


@pytest.mark.parametrize("options", [{}, {"search": "tree", "samples": 7}, {"search": "anneal", "budget": 9}], ids=str)
def test_every_search_can_be_fitted_and_gated(digits_net, upright, options):
    robust = joint(digits_net, **options).fit(upright[:60], promise=1.0)
    assert robust.report["method"] == "balance"
    assert robust.search(upright[:10]).logits.shape == (10, 9)


def test_double_precision_models_can_be_fitted():
    robust = joint(TinyNet().double(), budget=6)
    for features in ("auto", None):
        robust.features = features
        result = robust.fit(tiny_images(120), recipe=QUICK, views=6).search(tiny_images(5))
        assert robust.report["method"] == "head"
        assert result.logits.dtype == torch.float64


def test_a_fit_inside_inference_mode_is_the_same_fit():
    outside = joint(TinyNet(), budget=6).fit(tiny_images(120), recipe=QUICK, views=6)
    robust = joint(TinyNet(), budget=6)
    with torch.inference_mode():
        robust.fit(tiny_images(120), recipe=QUICK, views=6)
        result = robust.search(tiny_images(5))
    assert torch.equal(result.logits, outside.search(tiny_images(5)).logits)
    assert robust.report == outside.report


def test_a_class_that_the_model_rules_out_spoils_no_fit(digits_net, upright):
    class RuledOut(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = digits_net

        def forward(self, views):
            return self.net(views).index_fill(1, torch.tensor([4]), -math.inf)

    for features in ("auto", None):
        robust = joint(RuledOut(), features=features, budget=9).fit(upright[:120], recipe=QUICK, promise=1.0, views=9)
        result = robust.search(upright[:40])
        assert not bool(result.logits.isnan().any())
        assert bool((result.labels != 4).all())


# --- seeds and order --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_fit_and_leaves_the_global_stream_alone(digits_net, upright):
    state = torch.get_rng_state()
    options = {"budget": 9}, {"recipe": QUICK, "views": 9}
    first = joint(digits_net, **options[0]).fit(upright[:110], seed=5, **options[1])
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    second, other = (joint(digits_net, **options[0]).fit(upright[:110], seed=seed, **options[1]) for seed in (5, 6))
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    assert first.report == second.report
    assert first.report != other.report
    assert not torch.equal(first.calibrator.bias, other.calibrator.bias)


def test_images_sorted_by_class_give_about_the_same_balance_as_shuffled_ones(digits_net, monkeypatch):
    """The first thousand images used to be taken in order: from a sorted set, those of the first classes."""
    data = load("digits", "fit", limit=400)
    images, order = data.floats(), data.labels.argsort()
    monkeypatch.setattr(fitting, "BALANCE_IMAGES", 160)
    shuffled, sorted_by_class = bias_of(digits_net, images), bias_of(digits_net, images[order])
    noise = float((bias_of(digits_net, images, seed=1) - shuffled).abs().max())
    assert float((sorted_by_class - shuffled).abs().max()) < max(3 * noise, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_halves", lambda count, others, seed: (torch.arange(80, count), torch.arange(80)))
        wrong = bias_of(digits_net, images[order])
    assert float((wrong - shuffled).abs().max()) > 2 * float((sorted_by_class - shuffled).abs().max())


@pytest.mark.parametrize("readout", ["marginal", "incumbent"])
def test_classes_win_over_the_orbits_that_were_fitted_as_often_as_they_occur(digits_net, upright, readout):
    fitter = Fitter(Predictor(digits_net), Joint((ht.rotation(),)), method="balance", readout=readout, promise=None)
    with torch.no_grad():
        balance = fitter.fit(upright).calibrator
        train, _ = fitting._halves(200, None, 0)
        orbits = balance(fitter._looks().orbits(upright, train, 0)[0]).logits
        prior = upright_prior(digits_net(upright).argmax(1), 9)
    scores = orbits.amax(1) if readout == "incumbent" else orbits.logsumexp(1)
    assert_close(scores.softmax(1).mean(0).double(), prior, rtol=0, atol=0.01)


def test_orbits_are_views_of_tilted_images_and_follow_their_seed(digits_net, upright):
    fitter = Fitter(Predictor(digits_net), Joint((ht.rotation(), ht.scale())), views=10)
    index = torch.tensor([3, 1, 4])
    with torch.no_grad():
        first, same, other = (fitter._looks().orbits(upright, index, seed)[0].logits for seed in (1, 1, 2))
    assert first.shape == (3, 10, 9)
    assert torch.equal(first, same)
    assert float((first - other).abs().max()) > 0.1


def test_an_image_belongs_to_the_views_that_undo_its_tilt(digits_net, upright):
    fitter = Fitter(Predictor(digits_net), Joint((ht.rotation(),)), views=24)
    index = torch.arange(20)
    with torch.no_grad():
        _, aim = fitter._looks().orbits(upright, index, 3)
    shift = torch.rand(1, generator=torch.Generator().manual_seed(3))
    angles = lattice((ht.rotation(),), 24, shift)[:, 0]
    tilts = decompose(fitter._looks().tilts(20, hash((3, 0)))).rotation
    left = torch.rad2deg(angles[None] + tilts[:, None])
    left = (left + 180) % 360 - 180
    assert_close(aim.sum(1), torch.ones(20))
    assert torch.equal(aim.argmax(1), left.abs().argmin(1))
    assert bool((aim[left.abs() > 60] < 1e-3).all())


def test_held_out_images_are_a_fifth_and_never_fitted_on():
    for count, expected in ((8, 2), (100, 20), (20_000, 2000)):
        train, held_out = fitting._halves(count, None, 3)
        assert len(held_out) == expected
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(count))


def test_images_held_out_by_the_user_follow_the_others_and_are_two_thousand_at_most():
    train, held_out = fitting._halves(50, 9000, 3)
    assert sorted(train.tolist()) == list(range(50))
    assert len(held_out.unique()) == 2000
    assert int(held_out.min()) >= 50
    assert int(held_out.max()) < 9050


def test_a_gate_is_set_by_the_images_that_the_user_holds_out(digits_net, upright):
    """On its training images a classifier is surer than it will be: other images make a better promise."""
    robust = joint(digits_net, budget=9).fit(
        upright[:120], held_out=upright[120:], method="balance", promise=0.0, views=9
    )
    assert robust.report["gate"]["held_out"] == 80
    with torch.no_grad():
        assert torch.equal(robust.search(upright[120:]).labels, digits_net(upright[120:]).argmax(1))
    without = joint(digits_net, budget=9).fit(upright[:120], method="balance", promise=0.0, views=9)
    assert without.report["gate"]["held_out"] == 24


@pytest.mark.parametrize("method", ["neighbours", "prototypes"])
def test_distance_scores_are_not_fitted_on_the_images_that_the_gate_is_set_by(digits_net, upright, method, monkeypatch):
    """An image that lies in the bank is its own nearest neighbour: no gate set by it could be trusted."""
    seen = []
    name = f"fit_{method}"
    inner = getattr(fitting, name)
    monkeypatch.setattr(fitting, name, lambda upright, labels: seen.append(upright.features) or inner(upright, labels))
    robust = joint(digits_net).fit(upright, method=method)
    _, held_out = fitting._halves(200, None, 0)
    hidden = robust.predictor(upright[held_out]).features
    assert seen[0].shape == (160, hidden.shape[1])
    assert float(torch.cdist(hidden, seen[0]).min()) > 1e-3


# --- heads ------------------------------------------------------------------------------------------------------------


def test_with_too_few_images_a_head_is_a_balance(digits_net, upright):
    few = joint(digits_net).fit(upright[:99], recipe=QUICK, promise=None, views=12)
    assert isinstance(few.calibrator, Balance)
    assert few.report["method"] == "balance"
    enough = joint(digits_net).fit(upright[:100], recipe=QUICK, promise=None)
    assert isinstance(enough.calibrator, OrbitHead)
    assert_close(few.calibrator.bias, bias_of(digits_net, upright[:99]))


def test_a_head_reads_features_where_it_may_and_logits_where_not(digits_net, upright):
    options = {"recipe": HeadRecipe(rounds=1, steps=2, hidden=8), "promise": None, "views": 4}
    with_features = joint(digits_net).fit(upright, **options)
    assert with_features.calibrator.source == "features"
    assert with_features.predictor.features == ("hidden.0", "classifier")
    assert len(with_features.calibrator.mean) == 144 + 32
    without = joint(digits_net, features=None).fit(upright, **options)
    assert without.calibrator.source == "logits"
    assert without.predictor.features is None
    assert joint(digits_net).fit(upright, method="balance", promise=None).predictor.features is None
    named = joint(digits_net, features="classifier").fit(upright, **options)
    assert len(named.calibrator.mean) == 32


def test_a_second_fit_replaces_the_first(digits_net, upright, tilted):
    upright, options = upright[:110], {"method": "balance", "promise": 1.0, "views": 9}
    once = joint(digits_net).fit(upright, **options)
    twice = joint(digits_net).fit(upright, recipe=QUICK, promise=None, views=9).fit(upright, **options)
    assert torch.equal(twice.search(tilted).logits, once.search(tilted).logits)
    assert twice.report == once.report


def test_fitting_turns_a_search_that_harms_into_one_that_helps(digits_net, upright):
    data = load("digits", "test", limit=80)
    test = perturb_dataset(data, draw("rotation", 80, seed=3))

    @torch.no_grad()
    def accuracy(model):
        return float((model(test.images).argmax(1) == test.labels).float().mean())

    recipe = HeadRecipe(rounds=3, steps=32, hidden=64)
    found = {
        method: accuracy(joint(digits_net).fit(upright, method=method, recipe=recipe, promise=None, views=16))
        for method in ("balance", "head")
    }
    assert found["balance"] > max(accuracy(digits_net), accuracy(joint(digits_net))) + 0.05
    assert found["head"] >= found["balance"]
    assert found["head"] > 0.85


def test_progress_names_the_stage(digits_net, upright):
    told = []
    joint(digits_net).fit(upright, recipe=QUICK, views=4, progress=lambda *args: told.append(args))
    assert [args for args in told if args[0] == "head"] == [("head", 1, 2), ("head", 2, 2)]
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["upright", "balance", "head", "gate"]
    assert all(0 <= done <= total for _, done, total in told)


# --- photographs ------------------------------------------------------------------------------------------------------


def test_the_centre_is_cut_out():
    image = torch.arange(30.0).reshape(1, 1, 5, 6)
    assert centre_crop(image, 3)[0, 0].tolist() == [[7, 8, 9], [13, 14, 15], [19, 20, 21]]
    assert centre_crop(image, None) is image
    with pytest.raises(ht.OptionError, match="crop must fit into the images; got 6 for 5×6"):
        centre_crop(image, 6)


def test_with_a_crop_the_model_sees_squares_without_corners(digits_net, upright):
    """Fit images larger than the model's square are tilted first and cropped then: no padding comes into view."""
    large = nn.functional.pad(upright, (8, 8, 8, 8), value=1.0)
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = digits_net

        def forward(self, views):
            seen.append(views)
            return self.net(views)

    # Padding with −1 marks every pixel from outside.
    robust = joint(Watching(), padding=-1.0)
    fitter = Fitter(robust.predictor, robust.plan, padding=-1.0, crop=28)
    with torch.no_grad():
        robust.predictor(fitter._looks().tilted(large, torch.arange(200), 0))
    assert seen[-1].shape[-2:] == (28, 28)
    assert float(seen[-1].min()) >= -1e-5
    robust.fit(large, method="balance", crop=28)
    assert {views.shape[-1] for views in seen} == {28}


# --- memory and batches -----------------------------------------------------------------------------------------------


def test_features_count_towards_the_memory_of_a_block(digits_net, upright, monkeypatch):
    """Nine logits beside 176 features: blocks by the logits alone would take twenty times what they should."""
    robust = joint(digits_net).fit(upright, recipe=QUICK, promise=None, views=4)
    whole = list(robust._blocks(upright[:20]))
    assert len(whole) == 1
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 24 * (9 + 176) * 5})
    parts = list(robust._blocks(upright[:20]))
    assert [len(part) for part in parts] == [5] * 4
    assert_close(torch.cat([part.logits for part in parts]), whole[0].logits, rtol=1e-4, atol=1e-4)


def test_a_batch_balances_itself_by_images_from_its_whole_length(monkeypatch):
    """The first thousand used to be taken: from a sorted batch, those of the first classes."""
    images, seen = tiny_images(2)[:1].repeat(45, 1, 1, 1), []
    images[:, 0, 0, 0] = torch.arange(45)
    robust = joint(TinyNet(), calibrator="batch", budget=6)
    inner = robust.predictor.all_views
    monkeypatch.setattr(
        robust.predictor, "all_views", lambda images, *rest, **more: seen.append(images) or inner(images, *rest, **more)
    )
    monkeypatch.setattr(blocks, "BATCH_BALANCE", 12)
    robust(images)
    assert seen[0][:, 0, 0, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44]
    robust(images[:5])
    assert seen[2][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_batch_balance_makes_all_classes_win_equally_often(digits_net, tilted):
    robust = joint(digits_net, calibrator="batch")
    searcher = blocks.Searcher(robust.predictor, robust.plan, "batch", None, "marginal", "zeros", "bilinear")
    with torch.no_grad():
        balance = searcher.batch_balance(tilted)
    scores = joint(digits_net, calibrator=balance)(tilted)
    assert_close(scores.softmax(1).mean(0), torch.full((9,), 1 / 9), rtol=0, atol=0.02)


def test_part_of_a_promise_is_left_for_images_that_are_harder(digits_net, upright, monkeypatch):
    spent, inner = [], gate_fit.margin_for
    monkeypatch.setattr(
        gate_fit, "margin_for", lambda against, cost, points: spent.append(points) or inner(against, cost, points)
    )
    joint(digits_net).fit(upright, method="balance", promise=2.0)
    assert spent == [pytest.approx(1.0)]


def test_promises_may_be_given_in_full(digits_net, upright):
    robust = joint(digits_net).fit(upright, method="balance", promise=Promise(1.0, tilted=3.0))
    assert robust.report["gate"]["promise_tilted"] == 3.0
    assert joint(digits_net).fit(upright, method="balance", promise=1).report["gate"]["promise_upright"] == 1.0
