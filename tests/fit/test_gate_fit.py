"""Gates set from held-out images keep their promise without a label, and let upright images go early."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt import data as ht_data
from headtilt import fit as fitting
from headtilt.data.perturb import draw, perturb_dataset
from headtilt.evidence import Evidence
from headtilt.gate import CautiousGate, Gate, Promise, tail_for
from headtilt.gate_fit import GateFitter
from headtilt.looks import Looks
from headtilt.predictor import Predictor
from headtilt.result import concatenate
from headtilt.search.joint import Joint, lattice

from .conftest import QUICK
from .toys import found

# --- fitted gates -----------------------------------------------------------------------------------------------------


PROMISES = (0.0, 20.0, 100.0)


@pytest.fixture(scope="module")
def margins(fitted, upright):
    """Wrappers with the same head and gates of different promises, strictest first."""
    made = []
    for promise in PROMISES:
        robust = copy.copy(fitted)
        robust._modules = dict(fitted._modules)
        made.append(robust.fit(upright, method="keep", promise=promise, early_exit=False))
    return made


def held_out(images):
    return fitting._halves(len(images), None, 0)[1]


def test_a_promise_of_nothing_keeps_every_bare_answer_on_the_held_out_images(margins, upright, digits_net):
    kept = upright[held_out(upright)]
    with torch.no_grad():
        bare = digits_net(kept).argmax(1)
    assert torch.equal(margins[0].search(kept).labels, bare)
    assert margins[0].report["gate"]["upright_answers_changed"] == 0


@pytest.mark.parametrize(("count", "copies", "over"), [(20, 1, 4), (20, 4, 4), (50, 1, 4), (200, 1, 16)])
def test_the_fewer_images_the_more_their_distribution_counts(count, copies, over):
    """Images that cost nothing would open the gate altogether; shifted copies of them are no more images."""
    against = torch.rand(count, generator=torch.Generator().manual_seed(0)).repeat(copies)
    fitter = GateFitter(None, None, None, Promise(1.0))  # type: ignore[arg-type]
    margin = fitter._margin(against, torch.zeros(len(against)), count)
    assert margin == tail_for(against, 0.005 * over) > 0
    assert fitter._margin(against, torch.zeros(len(against)), 2000) == -math.inf


def test_few_images_do_not_open_the_gate(digits_net):
    """A fifth of 100 images rarely shows a loss of a few points, and the network was trained on them."""
    few, test = ht_data.load("digits", "fit", limit=100).floats(), ht_data.load("digits", "test")
    robust = ht.ITS(digits_net, **ht.fast()).fit(few, method="balance", promise=None)
    images, labels = test.floats(), test.labels

    def accuracy():
        return 100 * float((robust(images).argmax(1) == labels).float().mean())

    with torch.no_grad():
        bare = 100 * float((digits_net(images).argmax(1) == labels).float().mean())
    assert accuracy() < bare - 8
    robust.fit(few, method="keep", promise=0.5)
    assert accuracy() > bare - 2
    assert math.isfinite(robust.gate.margin)


def test_a_larger_promise_keeps_fewer_answers(margins, upright, tilted):
    thresholds = [robust.gate.margin for robust in margins]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[-1] == -math.inf
    counts = [int(robust.search(tilted).gated.sum()) for robust in margins]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_the_expected_cost_of_a_promise_is_kept_on_the_held_out_images(margins, upright, digits_net):
    kept = upright[held_out(upright)]
    with torch.no_grad():
        own = digits_net(kept).softmax(1)
    for robust, points in zip(margins, PROMISES, strict=True):
        answers = robust.search(kept).labels
        cost = own.amax(1) - own.gather(1, answers[:, None])[:, 0]
        assert float(cost.sum()) <= max(points / 100 * (len(kept) + 1) - 1, 0) + 1e-4


def test_an_early_exit_costs_one_view_and_gives_the_bare_answer(fitted, upright, digits_net):
    robust = copy.copy(fitted)
    robust._modules = dict(fitted._modules)
    gate = fitted.gate
    with torch.no_grad():
        scores = gate.detector(fitted.predictor(upright[:60]))
    robust.gate = Gate(gate.margin, gate.weights, float(scores.median()), gate.detector)
    result = robust.search(upright[:60])
    early = scores >= scores.median()
    assert result.views.tolist() == torch.where(early, 1, 24).tolist()
    assert bool(result.gated[early].all())
    with torch.no_grad():
        assert torch.equal(result.logits[early], digits_net(upright[:60])[early])
    assert torch.equal(result.pose[early], torch.eye(3).expand(int(early.sum()), 3, 3))
    assert result.hypotheses.active[early].sum(1).unique().tolist() == [1]
    assert bool(result.trace[0].confidence[early].isnan().all())
    assert result.trace[0].labels[early].unique().tolist() == [-1]
    assert bool(result.trace[0].confidence[~early].isfinite().all())


def test_without_an_early_exit_every_image_is_searched(fitted, upright):
    robust = copy.copy(fitted)
    robust._modules = dict(fitted._modules)
    robust.fit(upright, method="keep", early_exit=False)
    assert robust.gate.exit_at is None
    assert robust.report["gate"]["exit_at"] is None
    assert robust.search(upright[:20]).views.tolist() == [24] * 20


def test_results_do_not_depend_on_how_a_batch_is_split_with_calibrator_and_gate(fitted, tilted, upright):
    images = torch.cat([tilted[:30], upright[:30]])
    whole = fitted.search(images)
    assert 0 < int(whole.gated.sum()) < 60
    for size in (1, 7, 30):
        parts = concatenate([fitted.search(part) for part in images.split(size)])
        assert torch.equal(parts.labels, whole.labels)
        assert torch.equal(parts.gated, whole.gated)
        assert torch.equal(parts.views, whole.views)
        assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert_close(parts.pose, whole.pose, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_change_no_answer_of_a_fitted_wrapper(fitted, tilted, training):
    """Head and detector have dropout layers of their own."""
    before = fitted.search(tilted)
    other = copy.deepcopy(fitted).train(training)
    state = torch.get_rng_state()
    after = other.search(tilted)
    assert torch.equal(torch.get_rng_state(), state)
    assert other.model.training is training
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.views, before.views)


def test_a_gate_can_be_fitted_for_the_bare_model(digits_net, upright):
    robust = ht.ITS(digits_net, search="joint", budget=12, readout="marginal").fit(upright, method="keep", promise=1.0)
    assert robust.calibrator is None
    assert robust.report["method"] == "keep"
    result = robust.search(upright[:40])
    with torch.no_grad():
        agree = result.labels == digits_net(upright[:40]).argmax(1)
    assert float(agree.float().mean()) >= 0.95


def test_the_report_says_what_was_fitted(fitted, upright):
    report = fitted.report
    assert (report["method"], report["images"], report["seed"]) == ("head", 200, 0)
    gate = report["gate"]
    assert gate["held_out"] == 40
    assert (gate["promise_upright"], gate["promise_tilted"]) == (2.0, 0.4)
    assert gate["margin"] == fitted.gate.margin
    assert gate["exit_at"] == fitted.gate.exit_at
    assert sum(gate["weights"]) == pytest.approx(1, abs=1e-5)
    early = fitted.gate.leaves_early(fitted.predictor(upright[held_out(upright)])).float().mean() * 100
    assert gate["upright_leave_early"] == pytest.approx(float(early), abs=1e-4)
    assert QUICK.rounds == 2


def test_the_cautious_gate_of_an_unfitted_wrapper_keeps_upright_digits_and_changes_tilted_ones(digits_net):
    data = ht_data.load("digits", "test", limit=200)
    levels = [ht.rotation()]
    tilts = draw("rotation", len(data), seed=1)
    upright, tilted = data.floats(), perturb_dataset(data, tilts).images
    with torch.no_grad():
        bare = [digits_net(images).argmax(1) for images in (upright, tilted)]
    robust, free = ht.ITS(digits_net, levels), ht.ITS(digits_net, levels, gate=None)
    right = [
        (100 * (labels == data.labels).double().mean()).item()
        for labels in (bare[0], robust.search(upright).labels, free.search(upright).labels)
    ]
    assert right[1] >= right[0] - 1  # the promise of the default
    assert right[2] < right[0] - 20  # which the search alone breaks
    assert int((robust.search(tilted).labels != bare[1]).sum()) > 0


def test_the_cautious_gate_minds_neither_scale_nor_shift_of_the_logits(digits_net, tilted):
    class Rescaled(torch.nn.Module):
        def forward(self, images):
            return digits_net(images) * 1.0 + 7.0

    plain = ht.ITS(digits_net, confidence="energy").search(tilted)
    shifted = ht.ITS(Rescaled(), confidence="energy").search(tilted)
    assert torch.equal(plain.gated, shifted.gated)
    assert 0 < int(plain.gated.sum()) < len(tilted)


def test_the_cautious_gate_weighs_the_lead_in_deviations_and_the_doubt():
    bare = Evidence(torch.tensor([[3.0, 0.0, 0.0]]).log_softmax(1))
    spread = bare.logits.std(1, correction=0)
    doubt = -bare.log_probs[0, 0]
    near = bare.logits.clone()
    for lead in (0.0, 2.0, 5.0, 9.0):
        marginal = torch.tensor([[0.0, float(bare.logits[0, 0]) + lead, 0.0]])
        score = lead / spread + 0.4 * doubt.log()
        kept = CautiousGate().keeps(bare, bare.logits, found(marginal, near))
        assert kept.tolist() == (score < 2.5).tolist()


# --- at a glance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [6, 7, 24, 54, 72, 216])
def test_a_glance_is_six_places_of_the_lattice_with_the_identity_in_their_middle(budget):
    plan = Joint((ht.rotation(), ht.scale(0.25)), budget=budget)
    points = lattice(plan.levels, budget)[plan.glances]
    assert len(set(plan.glances)) == 6
    assert_close(points[3], torch.zeros(2).double())
    turns = points[:, 0].sort().values
    gaps = torch.cat([turns.diff(), turns[:1] + 2 * math.pi - turns[-1:]])
    assert float(gaps.max()) < 2 * math.pi / 6 * 2  # no third of the turn is left out


def test_a_search_that_goes_on_from_a_glance_sees_every_view_once_and_finds_the_same(digits_net, tilted):
    plan, predictor = Joint((ht.rotation(),), budget=24, rounds=1, hypotheses=2), Predictor(digits_net)
    with torch.no_grad():
        root = predictor(tilted)
        asked = []

        def evaluate(index, poses):
            asked.append(len(poses))
            return predictor.views(tilted, index, poses)

        whole = plan.search(evaluate, root)
        at_once = sum(asked)
        asked.clear()
        seen = plan.glance(evaluate, root)
        assert sum(asked) == 5 * len(tilted)
        resumed = plan.search(evaluate, root, seen)
    assert sum(asked) == at_once
    assert_close(resumed.marginal, whole.marginal, atol=1e-4, rtol=1e-4)
    assert torch.equal(resumed.beam.labels, whole.beam.labels)
    assert torch.equal(resumed.views, whole.views)


def test_images_that_leave_at_a_glance_keep_the_bare_answer_after_six_views(digits_net, tilted):
    free = ht.ITS(digits_net, search="joint", budget=24, readout="marginal", gate=-math.inf)
    everything = free.search(tilted)
    with torch.no_grad():
        bare = digits_net(tilted)
    for glance_at, views in ((math.inf, 6), (-math.inf, 24)):
        gate = Gate(-math.inf, glance_at=glance_at)
        result = ht.ITS(digits_net, search="joint", budget=24, readout="marginal", gate=gate).search(tilted)
        assert result.views.tolist() == [views] * len(tilted)
        assert bool(result.gated.all()) == (views == 6)
        assert torch.equal(result.labels, (bare if views == 6 else everything.logits).argmax(1))
    some = Gate(-math.inf, glance_at=2.0)
    result = ht.ITS(digits_net, search="joint", budget=24, readout="marginal", gate=some).search(tilted)
    assert 0 < int(result.gated.sum()) < len(tilted)
    assert torch.equal(result.views, torch.where(result.gated, 6, 24))
    assert torch.equal(result.labels, torch.where(result.gated, bare.argmax(1), everything.labels))


def test_a_fitted_gate_lets_more_upright_digits_go_within_six_views_than_by_one_alone(digits_net):
    data = ht_data.load("digits", "fit", limit=400).floats()
    robust = ht.ITS(digits_net, **ht.fast([ht.rotation()])).fit(data, recipe=QUICK)
    assert robust.gate.glance_at is not None
    upright = ht_data.load("digits", "test", limit=200).floats()
    glancing = robust.search(upright).views
    robust.gate.glance_at = None
    single = robust.search(upright).views
    assert set(glancing.tolist()) <= {1, 6, 18}
    assert float(glancing.double().mean()) < float(single.double().mean())


def test_the_second_opinion_is_the_mean_prediction_over_four_small_shifts(digits_net, upright):
    looks = Looks(Predictor(digits_net), (ht.rotation(),))
    images = upright[:5]
    expected = torch.zeros(5, 9)
    for x, y in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
        pose = torch.eye(3)
        pose[0, 2], pose[1, 2] = x / 16, y / 16  # the side spans two units: 1/32 of it
        with torch.no_grad():
            expected += digits_net(ht.warp(images, pose.expand(5, 3, 3))).softmax(1) / 4
    torch.testing.assert_close(looks.second_opinion(images), expected)


def test_the_second_opinion_shifts_larger_images_by_as_much_of_what_the_model_sees(digits_net, upright):
    framed = torch.nn.functional.pad(upright[:5], (6, 6, 6, 6))
    alone, within = (
        Looks(Predictor(digits_net), (ht.rotation(),)),
        Looks(Predictor(digits_net), (ht.rotation(),), crop=28),
    )
    torch.testing.assert_close(within.second_opinion(framed), alone.second_opinion(upright[:5]), rtol=1e-3, atol=1e-4)
