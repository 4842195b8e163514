"""Balance and the linear map remove a planted bias, and never do worse than what they start from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headtilt.calibration.balance import Balance, fit_balance, fit_map
from headtilt.model.evidence import Evidence
from headtilt.search.run import as_it_came

from .toys import accuracy

PRIOR = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15])


def orbits(count: int = 2000, views: int = 12, bias: float = 7.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (n, V, Y) and true labels (n,): one canonical view says the class; class 0 is preferred in any view."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(PRIOR, count, replacement=True, generator=generator)
    logits = torch.randn(count, views, 5, generator=generator)
    canonical = torch.randint(views, (count,), generator=generator)
    logits[torch.arange(count), canonical, labels] += 8
    logits[..., 0] += bias
    return logits, labels


def upright_prior(labels: Tensor, classes: int) -> Tensor:
    """How often each class occurs; none is left out."""
    counts = torch.bincount(labels, minlength=classes).double() + 0.5
    return counts / counts.sum()


def won(scores: Tensor) -> Tensor:
    return scores.softmax(1).mean(0)


# --- balance ----------------------------------------------------------------------------------------------------------


def test_energy_fails_on_a_planted_class_bias_and_the_balance_recovers_it():
    logits, labels = orbits()
    best = logits.amax(1)
    assert accuracy(best, labels) < 0.4
    prior = torch.bincount(labels, minlength=5) / len(labels)
    balance = fit_balance(best, prior)
    calibrated = balance(Evidence(logits)).logits.amax(1)
    assert_close(won(calibrated), prior, rtol=0, atol=1e-3)
    assert accuracy(calibrated, labels) > 0.97
    others = balance.bias[1:]
    assert float(balance.bias[0] - others.mean()) == pytest.approx(-7, abs=0.5)
    assert float(others.max() - others.min()) < 0.5


def test_the_balance_holds_for_images_it_was_not_fitted_on():
    fit_logits, fit_labels = orbits(seed=1)
    logits, labels = orbits(seed=2)
    balance = fit_balance(fit_logits.logsumexp(1), upright_prior(fit_labels, 5))
    before, after = logits.logsumexp(1), balance(Evidence(logits)).logits.logsumexp(1)
    assert accuracy(before, labels) < 0.4
    assert accuracy(after, labels) > 0.95


def test_without_a_bias_the_balance_has_nothing_to_do():
    logits, labels = orbits(bias=0.0)
    prior = torch.bincount(labels, minlength=5) / len(labels)
    balance = fit_balance(logits.amax(1), prior)
    assert float(balance.bias.abs().max()) < 0.5
    assert accuracy(balance(Evidence(logits)).logits.amax(1), labels) >= accuracy(logits.amax(1), labels) - 0.005


@settings(max_examples=10)
@given(constant=st.floats(-100, 100))
def test_the_balance_does_not_see_a_constant_added_to_all_scores(constant):
    best = orbits(300)[0].amax(1).double()
    expected = fit_balance(best, PRIOR).bias
    assert_close(fit_balance(best + constant, PRIOR).bias, expected, rtol=0, atol=1e-6)


def test_the_bias_is_centred_and_follows_the_order_of_the_classes():
    best = orbits(500)[0].amax(1)
    order = torch.tensor([3, 0, 4, 1, 2])
    bias = fit_balance(best, PRIOR).bias
    assert float(bias.sum()) == pytest.approx(0, abs=1e-4)
    assert_close(fit_balance(best[:, order], PRIOR[order]).bias, bias[order], rtol=0, atol=1e-4)


def test_the_balance_is_where_its_objective_is_lowest():
    best = orbits(400)[0].amax(1).double()
    ridge = 0.1 / (len(best) * best.std(dim=0, correction=0).mean() ** 2)

    def objective(bias):
        return (best + bias).logsumexp(1).mean() - (PRIOR.double() * bias).sum() + ridge * bias.square().sum() / 2

    bias = fit_balance(best, PRIOR).bias
    lowest = objective(bias)
    for place in range(5):
        for step in (-0.02, 0.02):
            assert objective(bias + step * torch.eye(5).double()[place]) > lowest


def test_a_thousand_classes_and_a_hundred_images_stay_finite_small_and_do_no_harm():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1000, (100,), generator=generator)
    scores = torch.randn(100, 1000, generator=generator)
    scores[torch.arange(100), labels] += 6
    bias = fit_balance(scores, upright_prior(labels, 1000)).bias
    assert bool(bias.isfinite().all())
    assert float(bias.abs().max()) < float(scores.std()) * 2
    unseen_labels = torch.randint(1000, (500,), generator=generator)
    unseen = torch.randn(500, 1000, generator=generator)
    unseen[torch.arange(500), unseen_labels] += 6
    assert accuracy(unseen + bias, unseen_labels) >= accuracy(unseen, unseen_labels) - 0.03
    assert accuracy(unseen, unseen_labels) > 0.9


def test_classes_that_never_occur_get_no_wild_bias():
    best = orbits(200)[0].amax(1)
    best = torch.cat([best, torch.full((200, 3), -30.0) + torch.randn(200, 3)], dim=1)
    prior = upright_prior(torch.multinomial(PRIOR, 200, replacement=True), 8)
    assert float(fit_balance(best, prior).bias.abs().max()) < 40


def test_a_class_ruled_out_by_minus_infinity_stays_out_and_spoils_nothing():
    logits, labels = orbits(500)
    prior = upright_prior(labels, 5)
    plain = fit_balance(logits.amax(1), prior).bias
    out = torch.cat([logits, torch.full((500, 12, 1), -math.inf)], dim=2)
    balance = fit_balance(out.amax(1), torch.cat([prior * 0.999, torch.tensor([0.001])]))
    assert bool(balance.bias.isfinite().all())
    shift = balance.bias[:5] - plain
    assert float((shift - shift.mean()).abs().max()) < 0.1
    scores = balance(Evidence(out)).logits.amax(1)
    assert bool((scores.argmax(1) != 5).all())


def test_a_balance_adds_its_numbers_in_the_dtype_of_the_logits_and_uses_up_the_features():
    evidence = Evidence(torch.zeros(2, 3, 4, dtype=torch.float64), torch.ones(2, 3, 7))
    found = Balance(torch.tensor([1.0, 2.0, 3.0, 4.0]))(evidence)
    assert found.logits.dtype == torch.float64
    assert found.logits[1, 2].tolist() == [1, 2, 3, 4]
    assert found.features is None


# --- the linear map ---------------------------------------------------------------------------------------------------


def mixed_orbits(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Orbits of three classes in which class 0 shows up as 1 in most views: no bias per class can mend it."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    views = 0.5 * torch.randn(count, 6, 3, generator=generator)
    views[torch.arange(count), 0, labels] += 2.0
    confused = labels == 0
    views[confused, 1:, 1] += 3.0
    views[confused, 1:, 2] -= 3.0  # which is how one can tell
    return views, labels


def test_a_map_mends_what_one_number_per_class_cannot():
    views, labels = mixed_orbits(600)
    bias = fit_balance(views.logsumexp(1), upright_prior(labels, 3))
    mapped = fit_map(views, labels, bias)
    unseen, truth = mixed_orbits(600, seed=1)
    right = [
        float((balance(Evidence(unseen)).logits.logsumexp(1).argmax(1) == truth).double().mean())
        for balance in (bias, mapped)
    ]
    assert right[0] < 0.9 < 0.97 < right[1]


def test_a_map_of_too_few_images_per_class_is_the_balance_it_started_from():
    views, labels = mixed_orbits(59)
    balance = fit_balance(views.logsumexp(1), upright_prior(labels, 3))
    assert fit_map(views, labels, balance) is balance
    views, labels = mixed_orbits(60)
    assert fit_map(views, labels, balance).weight is not None


def test_a_map_takes_classes_ruled_out_by_minus_infinity_as_hopeless():
    mapped = Balance(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    scores = mapped(Evidence(torch.tensor([[1.0, -math.inf]]))).logits
    assert bool(scores.isfinite().all())
    assert scores.argmax(1).tolist() == [0]


# --- images as they came ----------------------------------------------------------------------------------------------


def test_calibrators_without_a_word_of_their_own_say_of_images_as_they_came_what_they_say_of_any_view():
    bare = Evidence(torch.tensor([[1.0, 2.0]]))
    assert as_it_came(None, bare) is bare
    assert as_it_came(Balance(torch.tensor([3.0, 0.0])), bare).logits.tolist() == [[4.0, 2.0]]
    assert as_it_came(lambda evidence: Evidence(-evidence.logits), bare).logits.tolist() == [[-1.0, -2.0]]
