"""The orbit head learns a planted cue, and is never worse than what it starts from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibrate import Balance
from headtilt.evidence import Evidence
from headtilt.head import HeadRecipe, OrbitHead, fit_head

from .toys import accuracy

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
