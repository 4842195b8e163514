"""Calibrators remove a planted bias, learn a planted cue, and never do worse than what they start from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibrate import Balance, fit_balance, fit_map, upright_prior
from headtilt.distances import Neighbours, Prototypes, fit_neighbours, fit_prototypes
from headtilt.evidence import Evidence
from headtilt.head import HeadRecipe, OrbitHead, fit_head

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


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


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


def test_the_upright_prior_counts_and_leaves_no_class_out():
    prior = upright_prior(torch.tensor([0, 0, 2]), 4)
    assert_close(prior, torch.tensor([7.0, 5.0, 6.0, 5.0]).double() / 23)


def test_a_balance_adds_its_numbers_in_the_dtype_of_the_logits_and_uses_up_the_features():
    evidence = Evidence(torch.zeros(2, 3, 4, dtype=torch.float64), torch.ones(2, 3, 7))
    found = Balance(torch.tensor([1.0, 2.0, 3.0, 4.0]))(evidence)
    assert found.logits.dtype == torch.float64
    assert found.logits[1, 2].tolist() == [1, 2, 3, 4]
    assert found.features is None


# --- head -------------------------------------------------------------------------------------------------------------

RECIPE = HeadRecipe(rounds=6, steps=20, pool=400, hidden=16, batch=64, views=8)


class Cue:
    """Orbits in which the logits of every view are as sure as any other, and one feature says which to believe."""

    def __init__(self, count: int = 600, views: int = 8, classes: int = 4, features: bool = True) -> None:
        self.views, self.classes, self.features = views, classes, features
        self.labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(5))

    def __call__(self, index: Tensor, seed: int) -> tuple[Evidence, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(index), self.views)
        claimed = torch.randint(self.classes, shape, generator=generator)
        canonical = torch.zeros(shape, dtype=torch.bool)
        canonical[torch.arange(len(index)), torch.randint(self.views, (len(index),), generator=generator)] = True
        claimed = torch.where(canonical, self.labels[index][:, None], claimed)
        logits = 5.0 * torch.nn.functional.one_hot(claimed, self.classes)
        features = torch.randn(*shape, 6, generator=generator)
        features[..., 2] = canonical.float()
        return Evidence(logits, features if self.features else None), canonical.float()

    def fit(self, recipe: HeadRecipe = RECIPE, **options) -> OrbitHead:
        train, held_out = torch.arange(100, len(self.labels)), torch.arange(100)
        balance = Balance(torch.linspace(-0.1, 0.1, self.classes))
        return fit_head(self, self.labels, train, held_out, balance, recipe, **options)


@pytest.fixture(scope="module")
def cue_head() -> OrbitHead:
    return Cue().fit()


def test_the_head_learns_a_planted_pose_cue_from_features(cue_head):
    task, index = Cue(), torch.arange(600)
    seen, _ = task(index, seed=12345)
    assert accuracy(seen.logits.logsumexp(1), task.labels) < 0.6
    assert accuracy(cue_head(seen).logits.logsumexp(1), task.labels) > 0.97


def test_the_head_prefers_the_canonical_view(cue_head):
    task, index = Cue(), torch.arange(200)
    seen, _ = task(index, seed=999)
    best = cue_head(seen).logits.amax(-1).argmax(1)
    canonical = seen.features[..., 2].argmax(1)
    assert float((best == canonical).float().mean()) > 0.95


def test_the_head_cannot_find_the_cue_where_it_reads_logits_alone():
    task = Cue(features=False)
    head = task.fit()
    assert head.source == "logits"
    assert accuracy(head(task(torch.arange(600), 4)[0]).logits.logsumexp(1), task.labels) < 0.7


def test_the_head_starts_as_the_balance():
    task = Cue()
    head = task.fit(HeadRecipe(rounds=0, hidden=16))
    seen, _ = task(torch.arange(50), 3)
    balanced = Balance(torch.linspace(-0.1, 0.1, 4))(seen)
    assert torch.equal(head(seen).logits, balanced.logits)


def test_a_head_that_cannot_learn_is_the_balance_it_started_from():
    """Targets without any relation to the views: nothing improves on the held-out images, and nothing is kept."""
    task = Cue()
    noise = torch.randint(4, (600,), generator=torch.Generator().manual_seed(77))
    head = fit_head(
        lambda index, seed: (
            Evidence(torch.zeros(len(index), 8, 4), torch.ones(len(index), 8, 3)),
            torch.ones(len(index), 8),
        ),
        noise,
        torch.arange(100, 600),
        torch.arange(100),
        Balance(torch.zeros(4)),
        HeadRecipe(rounds=3, steps=4, hidden=8, learning_rate=0.5, patience=3),
    )
    scores = head(Evidence(torch.zeros(1, 8, 4), torch.ones(1, 8, 3))).logits
    assert float(scores.softmax(-1).amax()) < 0.5
    assert task.classes == 4


def test_the_same_seed_gives_the_same_head_whatever_the_global_stream_does(cue_head):
    state = torch.get_rng_state()
    torch.manual_seed(4321)
    again = Cue().fit()
    assert int(torch.initial_seed()) == 4321
    torch.set_rng_state(state)
    for name, value in cue_head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    other = Cue().fit(seed=1)
    assert not torch.equal(other.network[1].weight, cue_head.network[1].weight)


def test_the_head_leaves_the_global_random_stream_alone():
    state = torch.get_rng_state()
    Cue().fit(HeadRecipe(rounds=1, steps=2, hidden=8))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fitted_head_is_frozen_and_deterministic(cue_head):
    assert not cue_head.training
    assert not any(parameter.requires_grad for parameter in cue_head.parameters())
    seen, _ = Cue()(torch.arange(20), 1)
    assert torch.equal(cue_head(seen).logits, cue_head(seen).logits)


def test_with_many_classes_the_head_gives_one_number_per_view():
    task = Cue(count=600, classes=40)
    head = task.fit()
    assert head.network[-1].out_features == 1
    seen, _ = task(torch.arange(600), seed=12345)
    added = head(seen).logits - (seen.logits + head.bias) * head.log_scale.exp()
    assert_close(added, added[..., :1].expand_as(added), rtol=0, atol=1e-4)
    assert accuracy(head(seen).logits.logsumexp(1), task.labels) > accuracy(seen.logits.logsumexp(1), task.labels) + 0.3
    assert Cue().fit(HeadRecipe(rounds=0, hidden=16)).network[-1].out_features == 4


def test_progress_is_told_after_every_round_and_patience_ends_the_fit():
    told = []
    Cue().fit(HeadRecipe(rounds=3, steps=2, hidden=8), progress=lambda *args: told.append(args[:2]))
    assert told == [(1, 3), (2, 3), (3, 3)]
    told.clear()
    task = Cue()
    fit_head(
        lambda index, seed: task(index, 0) if len(index) == 100 else task(index.flip(0), seed),
        task.labels,
        torch.arange(100, 600),
        torch.arange(100),
        Balance(torch.zeros(4)),
        HeadRecipe(rounds=50, steps=8, hidden=16, patience=2, learning_rate=0.3),
        progress=lambda *args: told.append(args[:2]),
    )
    assert len(told) < 50


def test_a_head_on_features_refuses_evidence_without_them(cue_head):
    with pytest.raises(ht.OptionError, match="this head reads features, and the evidence has none"):
        cue_head(Evidence(torch.zeros(1, 4)))
    with pytest.raises(ht.OptionError, match="source='features' needs a model whose features can be read"):
        Cue(features=False).fit(HeadRecipe(source="features"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "pixels"}, "source must be one of 'auto', 'features', 'logits'; got 'pixels'"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1"),
        ({"rounds": -1}, "rounds must be a whole number of at least 0"),
        ({"pool": 0}, "pool must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps must be a whole number of at least 1"),
        ({"batch": None}, "batch must be a whole number of at least 1"),
        ({"views": 0}, "views must be a whole number of at least 1"),
        ({"patience": 0}, "patience must be a whole number of at least 1"),
        ({"learning_rate": 0}, "learning_rate must be a finite number above 0"),
    ],
    ids=str,
)
def test_recipes_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ht.OptionError, match=message):
        HeadRecipe(**options)


def test_a_head_survives_logits_of_minus_infinity():
    class RuledOut(Cue):
        def __call__(self, index, seed):
            seen, aim = super().__call__(index, seed)
            return Evidence(torch.cat([seen.logits, torch.full_like(seen.logits[..., :1], -math.inf)], dim=-1)), aim

    task = RuledOut()
    head = fit_head(
        task, task.labels, torch.arange(100, 600), torch.arange(100), Balance(torch.zeros(5)), HeadRecipe(rounds=1)
    )
    scores = head(task(torch.arange(20), 0)[0]).logits
    assert bool(scores.isfinite().all())
    assert float(scores[..., 4].max()) < -500 < float(scores[..., :4].min())
    assert accuracy(scores.logsumexp(1), task.labels[:20]) > 0.25


def test_a_head_on_double_precision_logits_is_trained_and_answers_in_double_precision():
    class Double(Cue):
        def __call__(self, index, seed):
            seen, aim = super().__call__(index, seed)
            return Evidence(seen.logits.double()), aim

    task = Double()
    head = task.fit(HeadRecipe(rounds=1, steps=2, hidden=8))
    assert head(task(torch.arange(5), 0)[0]).logits.dtype == torch.float64


# --- distance scores --------------------------------------------------------------------------------------------------


def clusters(count: int = 60, classes: int = 3) -> tuple[Evidence, Tensor]:
    """Features in a cluster per class, on both sides of zero; the last class never occurs."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes - 1, (count,), generator=generator)
    centres = torch.tensor([[4.0, -4.0, 0.0], [-4.0, 1.0, 4.0]])
    features = centres[labels] + 0.5 * torch.randn(count, 3, generator=generator)
    return Evidence(torch.zeros(count, classes), features), labels


@pytest.mark.parametrize("fit", [fit_prototypes, fit_neighbours])
def test_distance_scores_name_the_nearest_class_and_sink_far_from_all(fit):
    upright, labels = clusters()
    scores = fit(upright, labels)
    seen = scores(upright)
    assert seen.logits.shape == (60, 3)
    assert torch.equal(seen.labels, labels)
    between = scores(Evidence(torch.zeros(1, 3), torch.tensor([[0.0, -1.5, 2.0]])))
    assert float(between.logits.max()) < float(seen.logits.max(1).values.min())


@pytest.mark.parametrize("fit", [fit_prototypes, fit_neighbours])
def test_a_class_that_never_occurs_never_wins(fit):
    upright, labels = clusters()
    scores = fit(upright, labels)
    generator = torch.Generator().manual_seed(1)
    anywhere = Evidence(torch.zeros(500, 3), 10 * torch.randn(500, 3, generator=generator))
    assert bool((scores(anywhere).labels != 2).all())


def test_prototypes_are_class_means_and_scores_are_scaled_squared_distances():
    upright, labels = clusters()
    scores = fit_prototypes(upright, labels)
    means = torch.stack([upright.features[labels == label].mean(0) for label in (0, 1)])
    assert_close(scores.means[:2], means, rtol=0, atol=1e-5)
    within = (upright.features - means[labels]).square().sum(1).mean()
    expected = -(upright.features[:, None] - means).square().sum(-1) * 10 / within
    assert_close(scores(upright).logits[:, :2], expected, rtol=1e-3, atol=1e-3)


def test_neighbours_average_the_three_nearest_of_each_class():
    bank = torch.nn.functional.normalize(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    feature = torch.tensor([[[1.0, 2.0, -1.0, 0.5]]])
    found = Neighbours(bank, nearest=3, scale=10.0)(Evidence(torch.zeros(1, 1, 2), feature)).logits
    similarity = torch.nn.functional.normalize(feature, dim=-1)[0, 0] @ bank.flatten(0, 1).T
    expected = similarity.reshape(2, 5).sort(descending=True).values[:, :3].mean(1) * 10
    assert_close(found[0, 0], expected)


def test_a_bank_repeats_the_images_of_a_class_that_has_few():
    upright = Evidence(torch.zeros(3, 2), torch.eye(3))
    bank = fit_neighbours(upright, torch.tensor([0, 1, 1]), per_class=4).bank
    assert torch.equal(bank[0], torch.eye(3)[[0, 0, 0, 0]])
    assert torch.equal(bank[1], torch.eye(3)[[1, 2, 1, 2]])


@pytest.mark.parametrize("fit", [fit_prototypes, fit_neighbours])
def test_distance_scores_do_not_depend_on_how_many_views_come_at_once(fit):
    upright, labels = clusters()
    scores = fit(upright, labels)
    whole = scores(upright).logits
    one_by_one = torch.cat([scores(upright.at(slice(n, n + 1))).logits for n in range(60)])
    assert_close(one_by_one, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scores", [Prototypes(torch.zeros(2, 3), torch.tensor(1.0)), Neighbours(torch.zeros(2, 1, 3))], ids=["mean", "near"]
)
def test_distance_scores_without_features_say_what_to_do(scores):
    with pytest.raises(ht.OptionError, match="distance scores need features"):
        scores(Evidence(torch.zeros(1, 2)))


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


@pytest.mark.parametrize(("draws", "looks"), [(None, 6), (2, 2), (1, 1)])
def test_tilts_are_drawn_anew_each_round_or_come_again(draws, looks):
    views, labels = mixed_orbits(120)
    seen = []

    def sample(index, seed):
        seen.append(seed)
        return Evidence(views[index]), torch.ones(len(index), 6)

    recipe = HeadRecipe(source="logits", hidden=8, rounds=6, steps=2, draws=draws, patience=9)
    everything = torch.arange(120)
    fit_head(sample, labels, everything[:100], everything[100:], Balance(torch.zeros(3)), recipe)
    assert len(seen) == 1 + looks  # one of them for the held-out images


def test_a_pose_weight_finds_the_right_view_more_often():
    """Every view claims the right label, so that the labels alone say nothing of the pose."""

    class Told(Cue):
        def __call__(self, index, seed):
            seen, aim = super().__call__(index, seed)
            labels = self.labels[index][:, None].expand_as(aim)
            return Evidence(5.0 * torch.nn.functional.one_hot(labels, self.classes), seen.features), aim

    task = Told()
    seen, aim = task(torch.arange(100), 5)
    found = []
    for pose in (0.0, 1.0):
        head = task.fit(HeadRecipe(rounds=4, steps=32, hidden=16, pose=pose))
        found.append(float((head(seen).logits.logsumexp(2).argmax(1) == aim.argmax(1)).double().mean()))
    assert found[0] < 0.5 < 0.95 < found[1]


@pytest.mark.parametrize("pose", [-0.1, math.nan, math.inf, "much"], ids=str)
def test_pose_weights_that_mean_nothing_are_refused(pose):
    with pytest.raises(ht.OptionError, match="pose must be a weight of at least 0"):
        HeadRecipe(pose=pose)
