"""The gate keeps the bare answer unless it is clearly beaten, and holds its promise without a label."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibrate import Balance
from headtilt.evidence import Evidence
from headtilt.gate import (
    CautiousGate,
    Detector,
    Gate,
    Promise,
    exit_for,
    fit_detector,
    fit_weights,
    margin_for,
    plain_weights,
    statistics,
    tail_for,
)

from .toys import found

# --- thresholds by hand -----------------------------------------------------------------------------------------------

AGAINST = torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0])
COST = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])  # in order of evidence: 0, 1, 0, 1, 0


@pytest.mark.parametrize(
    ("points", "switched"),
    [
        (0.0, {5.0}),
        (19.9, {5.0}),
        (20.0, {5.0, 4.0, 3.0}),
        (39.9, {5.0, 4.0, 3.0}),
        (40.0, {5.0, 4.0, 3.0, 2.0, 1.0}),
        (100.0, {5.0, 4.0, 3.0, 2.0, 1.0}),
    ],
)
def test_the_margin_spends_what_was_promised_and_no_more(points, switched):
    margin = margin_for(AGAINST, COST, points)
    assert {value for value in AGAINST.tolist() if value >= margin} == switched


def test_the_margin_is_just_above_the_first_image_that_would_cost_too_much():
    assert margin_for(AGAINST, COST, 0.0) == pytest.approx(4, abs=1e-4)
    assert margin_for(AGAINST, COST, 0.0) > 4
    assert margin_for(AGAINST, COST, 100.0) == -math.inf
    assert margin_for(AGAINST, torch.zeros(5), 0.0) == -math.inf


def test_what_switching_gains_may_be_spent_later_but_not_before():
    gain_first, gain_last = torch.tensor([-1.0, 1.0, 0.0]), torch.tensor([1.0, -1.0, 0.0])
    against = torch.tensor([3.0, 2.0, 1.0])
    assert margin_for(against, gain_first, 0.0) == -math.inf
    assert margin_for(against, gain_last, 0.0) > 3


def test_images_of_equal_evidence_are_switched_together_or_not_at_all():
    against, cost = torch.tensor([3.0, 3.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    margin = margin_for(against, cost, 0.0)
    assert not bool((against >= margin).any())


@pytest.mark.parametrize("size", [1.0, 40.0, 1e3, 1e5])
@pytest.mark.parametrize("sign", [1, -1])
def test_thresholds_exclude_the_image_they_were_set_for_at_any_size(size, sign):
    """In single precision 1e-6 above 40 is 40."""
    value = torch.tensor([sign * size])
    margin = margin_for(value, torch.ones(1), 0.0)
    assert bool((value < margin).all())
    assert bool((value * 1.0000005 < margin).all())
    assert not bool((value >= exit_for(value, torch.ones(1), 0.0)).any())


def test_the_tail_goes_on_exponentially_where_the_images_end():
    uniform = torch.arange(1, 2001, dtype=torch.float64) / 2001
    against = -(1 - uniform).log()  # exponential, of scale 1
    for share in (0.1, 0.01, 1e-3, 1e-5):
        assert tail_for(against, share) == pytest.approx(-math.log(share), rel=0.03)
    few = against[::50]
    assert tail_for(few, 1e-3) > float(few.max())
    assert tail_for(few, 0.2) == -math.inf
    assert tail_for(few, 0.0) == math.inf
    assert tail_for(torch.tensor([2.0]), 0.01) == 2.0


@pytest.mark.parametrize(
    ("points", "leaving"), [(0.0, {5.0}), (24.9, {5.0}), (25.0, {5.0, 4.0, 3.0}), (50.0, {5.0, 4.0, 3.0, 2.0})]
)
def test_the_exit_lets_images_go_as_long_as_the_promise_lasts(points, leaving):
    scores, harm = torch.tensor([3.0, 5.0, 2.0, 4.0]), torch.tensor([-1, 0, 1, 1])
    threshold = exit_for(scores, harm, points)
    assert {value for value in scores.tolist() if value >= threshold} == leaving


rows = st.integers(3, 40)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), count=rows, points=st.lists(st.floats(0, 100), min_size=2, max_size=5))
def test_a_larger_promise_never_raises_a_threshold(seed, count, points):
    generator = torch.Generator().manual_seed(seed)
    against = torch.randn(count, generator=generator)
    cost = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.5)
    margins = [margin_for(against, cost, value) for value in sorted(points)]
    exits = [exit_for(against, cost, value) for value in sorted(points)]
    assert margins == sorted(margins, reverse=True)
    assert exits == sorted(exits, reverse=True)
    for value, margin in zip(sorted(points), margins, strict=True):
        assert float(cost[against >= margin].sum()) <= value / 100 * count + 1e-5


@pytest.mark.parametrize("value", [-0.1, 100.1, math.nan, "1", None, True], ids=str)
def test_promises_that_mean_nothing_are_refused(value):
    with pytest.raises(ht.OptionError, match="upright must be points of accuracy between 0 and 100"):
        Promise(value)
    with pytest.raises(ht.OptionError, match="tilted must be points of accuracy between 0 and 100"):
        Promise(tilted=value)


def test_promises_may_be_numbers_of_numpy():
    assert Promise(np.float32(0.5), np.int64(1)) == Promise(0.5, 1)


# --- statistics and gates by hand -------------------------------------------------------------------------------------


def test_the_statistics_are_log_odds_against_the_bare_answer_and_its_doubt():
    bare = Evidence(torch.tensor([[3.0, 0.0, 0.0]]))
    marginal, near, root = torch.tensor([[1.0, 6.0, 0.0]]), torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[4.0, 0, 0]])
    doubt = math.log(1 + 2 * math.exp(-3))
    expected = torch.tensor([[5.0, 4.0, 2.0, doubt, 0.0, -3.0, -1.0]])
    assert_close(statistics(bare, root, found(marginal, near)), expected)

    class Trusting(Detector):
        def forward(self, root):
            return torch.full((len(root.logits),), 7.0)

    trusting = Trusting(torch.zeros(3), torch.ones(3))
    assert statistics(bare, root, found(marginal, near), trusting)[0, 4] == -7


def test_statistics_are_finite_where_the_model_rules_the_winner_out():
    bare = Evidence(torch.tensor([[3.0, -math.inf, 0.0]]))
    marginal, near = torch.tensor([[1.0, 6.0, 0.0]]), torch.tensor([[2.0, -math.inf, 0.0]])
    found_statistics = statistics(bare, bare.logits, found(marginal, near))
    assert bool(found_statistics.isfinite().all())
    assert float(found_statistics[0, 5]) < -900
    assert float(found_statistics[0, 6]) < -900


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": torch.ones(9)}, "weights must be"),
        ({"weights": torch.ones(1, 5)}, "weights must be"),
        ({"exit_at": "x"}, "exit_at must be a number or None; got 'x'"),
        ({"glance_at": [1]}, "glance_at must be a number or None"),
    ],
    ids=["nine", "matrix", "exit", "glance"],
)
def test_a_gate_of_nonsense_is_refused_when_it_is_made(options, said):
    with pytest.raises(ht.OptionError, match=said):
        Gate(1.0, **options)


def test_a_gate_with_the_five_weights_of_old_reads_the_first_five_statistics():
    bare = Evidence(torch.tensor([[3.0, 0.0, 0.0]]))
    seen = found(torch.tensor([[1.0, 6.0, 0.0]]), torch.tensor([[2.0, 1.0, 0.0]]))
    old = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    assert Gate(4.5, old).keeps(bare, bare.logits, seen).tolist() == [True]
    assert Gate(3.5, old).keeps(bare, bare.logits, seen).tolist() == [False]


def test_a_plain_gate_compares_log_odds_over_all_views_with_its_margin():
    bare = Evidence(torch.eye(3)[:2])
    marginal = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.5]])
    for margin, kept in ((0.5, [False, False]), (1.5, [False, True]), (2.5, [True, True])):
        assert Gate(margin).keeps(bare, bare.logits, found(marginal, marginal)).tolist() == kept
    assert not bool(Gate(1.0).leaves_early(bare).any())


@pytest.mark.parametrize("margin", [math.nan, "2", None, True], ids=str)
def test_margins_that_mean_nothing_are_refused(margin):
    with pytest.raises(ht.OptionError, match="margin must be a number of log-odds"):
        Gate(margin)


@pytest.mark.parametrize("gate", ["2", True, object()], ids=["word", "truth", "object"])
def test_gates_that_mean_nothing_are_refused_at_the_door(digits_net, gate):
    with pytest.raises(ht.OptionError, match=r"gate must be a number of log-odds, \"cautious\", a Gate or None; got"):
        ht.ITS(digits_net, gate=gate)


@pytest.mark.parametrize("calibrator", ["balance", 3.0], ids=str)
def test_calibrators_that_mean_nothing_are_refused_at_the_door(digits_net, calibrator):
    with pytest.raises(ht.OptionError, match=r"calibrator must be a callable, \"batch\" or None; got"):
        ht.ITS(digits_net, calibrator=calibrator)


def test_a_number_as_gate_is_a_plain_gate(digits_net, tilted):
    options = {"search": "joint", "budget": 24, "readout": "marginal"}
    free = ht.ITS(digits_net, gate=None, **options).search(tilted)
    with torch.no_grad():
        bare = digits_net(tilted)
    against = free.logits.amax(1) - free.logits.gather(1, bare.argmax(1, keepdim=True))[:, 0]
    for margin in (0.5, np.float32(2.0), 5):
        result = ht.ITS(digits_net, gate=margin, **options).search(tilted)
        assert torch.equal(result.gated, against < float(margin))
        assert 0 < int(result.gated.sum()) < 60
        assert torch.equal(result.labels, torch.where(result.gated, bare.argmax(1), free.labels))
    everything = ht.ITS(digits_net, gate=math.inf, **options).search(tilted)
    assert bool(everything.gated.all())


@pytest.mark.parametrize("before", [None, "cautious", 1.0])
def test_a_gate_set_afterwards_means_what_it_means_at_the_door(digits_net, tilted, before):
    robust = ht.ITS(digits_net, samples=9, gate=before)
    robust.gate = 2.0
    assert isinstance(robust.gate, Gate)
    assert torch.equal(robust(tilted[:8]), ht.ITS(digits_net, samples=9, gate=2.0)(tilted[:8]))
    robust.gate = "cautious"
    assert isinstance(robust.gate, CautiousGate)
    robust.gate = None
    assert not bool(robust.search(tilted[:8]).gated.any())
    with pytest.raises(ht.OptionError, match="gate must be a number of log-odds"):
        robust.gate = "strict"


def test_a_gate_and_a_calibrator_of_ones_own_may_take_the_place_of_modules(digits_net, tilted):
    class Open:
        def leaves_early(self, root):
            return torch.zeros_like(root.labels, dtype=torch.bool)

        def keeps(self, bare, root, found):
            return torch.zeros_like(bare.labels, dtype=torch.bool)

    robust = ht.ITS(digits_net, samples=9, calibrator=Balance(torch.zeros(9)))
    robust.gate, robust.calibrator = Open(), "batch"
    anew = ht.ITS(digits_net, samples=9, gate=Open(), calibrator="batch")
    assert torch.equal(robust(tilted[:8]), anew(tilted[:8]))
    assert robust.state_dict().keys() == anew.state_dict().keys()
    with pytest.raises(ht.OptionError, match="calibrator must be a callable"):
        robust.calibrator = "balance"


def test_gated_images_return_the_bare_logits_bit_for_bit_and_stay_where_they_are(digits_net, tilted):
    result = ht.ITS(digits_net, search="joint", budget=24, readout="marginal", gate=3.0).search(tilted)
    with torch.no_grad():
        bare = digits_net(tilted)
    kept = result.gated
    assert 0 < int(kept.sum()) < 60
    assert torch.equal(result.logits[kept], bare[kept])
    assert torch.equal(result.pose[kept], torch.eye(3).expand(int(kept.sum()), 3, 3))
    assert torch.equal(result.canonical()[kept].round(decimals=4), tilted[kept].round(decimals=4))
    assert not torch.equal(result.logits[~kept], bare[~kept])


# --- weights and detector ---------------------------------------------------------------------------------------------


def test_weights_find_the_statistic_that_tells():
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(400, generator=generator) < 0.5
    against = torch.randn(400, 7, generator=generator)
    against[:, 2] += 4 * right
    weights = fit_weights(against, right)
    assert float(weights.sum()) == pytest.approx(1)
    assert bool((weights >= 0).all())
    assert int(weights.argmax()) == 2
    assert float(weights[2]) > 0.6
    score = against @ weights
    assert float(score[right].mean() - score[~right].mean()) > 1


@pytest.mark.parametrize("right", [torch.ones(50), torch.zeros(50), torch.arange(10) % 2], ids=["all", "none", "few"])
def test_weights_are_plain_where_there_is_nothing_to_learn_from(right):
    assert torch.equal(fit_weights(torch.randn(len(right), 7), right.bool()), plain_weights())


def test_the_detector_learns_when_to_trust_and_follows_its_seed():
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(300, generator=generator) < 0.5
    features = torch.randn(300, 4, generator=generator)
    features[:, 1] += 3 * right
    root = Evidence(torch.randn(300, 3, generator=generator), features)
    state = torch.get_rng_state()
    detector = fit_detector(root, right, seed=3, steps=60)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(((detector(root) > 0) == right).float().mean()) > 0.9
    assert not detector.training
    again, other = (fit_detector(root, right, seed=seed, steps=60) for seed in (3, 4))
    assert torch.equal(again(root), detector(root))
    assert not torch.equal(other(root), detector(root))


def test_the_detector_reads_classes_ruled_out_and_double_precision():
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    logits[:, 1] = -math.inf
    detector = fit_detector(Evidence(logits, torch.randn(50, 2)), torch.arange(50) % 2 == 0, steps=3)
    assert bool(detector(Evidence(logits, torch.randn(50, 2))).isfinite().all())
