"""The orbit head learns a planted cue, tells the pose, and starts as the balance that it was given."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration import head as heads
from headtilt.calibration.balance import FEWEST_PER_CLASS, Balance
from headtilt.calibration.fit_images import Seeds
from headtilt.calibration.head import HeadRecipe, OrbitHead, fit_head, label_loss, moments, pose_loss, thorough
from headtilt.calibration.sampler import Orbits, Sampler
from headtilt.errors import OptionError
from headtilt.geometry.groups import rotation
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor
from headtilt.search.seen import log_weights
from tests.toys import TEMPLATES, TemplateMatcher, render

from .toys import accuracy

RECIPE = HeadRecipe(looks=1, views=8, epochs=20, hidden=16)


class Cue:
    """Orbits in which the logits of every view are as sure as any other, and one feature says which to believe."""

    def __init__(self, count: int = 500, views: int = 8, classes: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = classes
        self.labels = torch.randint(classes, (count,), generator=generator)
        self.right = torch.randint(views, (count,), generator=generator)
        claimed = torch.randint(classes, (count, views), generator=generator)
        canonical = F.one_hot(self.right, views).bool()
        claimed = torch.where(canonical, self.labels[:, None], claimed)
        features = torch.randn(count, views, 6, generator=generator)
        features[..., 2] = canonical.float()
        poses = rotation().matrix(torch.arange(views) * (2 * math.pi / views)).expand(count, -1, -1, -1)
        self.orbits = Orbits(
            Evidence(5.0 * F.one_hot(claimed, classes), features),
            torch.zeros(count, views, 1),
            poses,
            canonical.float(),
            self.right == 0,
            torch.ones(count, dtype=torch.bool),
            torch.eye(3).expand(count, 3, 3),
        )

    @property
    def targets(self):
        return F.one_hot(self.labels, self.classes).float()

    def fit(self, recipe: HeadRecipe = RECIPE, seed: int = 0, **options) -> OrbitHead:
        bias = torch.linspace(-0.1, 0.1, self.classes)
        sequence = np.random.SeedSequence(seed)
        return fit_head(self.orbits, options.pop("targets", self.targets), bias, recipe, sequence, **options)

    def without_features(self) -> Cue:
        other = Cue.__new__(Cue)
        other.__dict__ = {
            **self.__dict__,
            "orbits": replace(self.orbits, evidence=Evidence(self.orbits.evidence.logits)),
        }
        return other


@pytest.fixture(scope="module")
def cue_head() -> OrbitHead:
    return Cue().fit()


def pooled(head, orbits):
    said = head(orbits.evidence)
    return (said.logits + log_weights(orbits.poses)[..., None]).logsumexp(1)


# --- what it learns ---------------------------------------------------------------------------------------------------


def test_the_head_learns_a_planted_cue_from_features_and_uses_it_on_other_images(cue_head):
    task = Cue(seed=1)
    assert accuracy(task.orbits.evidence.logits.logsumexp(1), task.labels) < 0.6
    assert accuracy(pooled(cue_head, task.orbits), task.labels) > 0.95


def test_the_head_says_which_view_is_upright(cue_head):
    task = Cue(seed=1)
    upright = cue_head(task.orbits.evidence).upright
    assert upright.shape == (500, 8, 1)
    assert float((upright[..., 0].argmax(1) == task.right).float().mean()) > 0.95


def test_the_head_cannot_find_the_cue_where_it_reads_logits_alone():
    task = Cue().without_features()
    head = task.fit()
    assert head.source == "logits"
    assert accuracy(pooled(head, task.orbits), task.labels) < 0.7


def test_a_head_of_a_template_network_finds_the_view_that_undoes_the_tilt():
    """Dots drawn under a formula, a network that knows them upright alone, and tilts that the fit makes itself."""
    matcher = TemplateMatcher(TEMPLATES, 32, 32, sharpness=6.0)
    images = torch.stack([render(TEMPLATES[number % 3], torch.eye(3)) for number in range(150)])[:, None]
    images = images + 0.05 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    how = Sampler(Predictor(matcher), (rotation(),), "zeros", views=12)
    draws = Seeds(0).numbers("tilts")

    def seen():
        return how.orbits(images, how.draw(150, 0.4, 32, draws), how.coordinates(draws), lambda done: None)

    with torch.no_grad():
        orbits, others = seen(), seen()
        targets = matcher(images).softmax(1)
    head = fit_head(orbits, targets, torch.zeros(3), RECIPE, np.random.SeedSequence(0))
    assert head.source == "logits"
    best = head(others.evidence).upright[..., 0].argmax(1)
    reached = others.aim.gather(1, best[:, None])[:, 0] / others.aim.amax(1)
    assert float((reached > 0.5).float().mean()) > 0.85
    assert accuracy(pooled(head, others), torch.arange(150) % 3) > 0.95


def test_soft_targets_teach_as_much_doubt_as_they_hold():
    task = Cue()
    doubtful = 0.6 * task.targets + 0.1
    sure, unsure = task.fit(), task.fit(targets=doubtful)
    other = Cue(seed=1)
    said = [pooled(head, other.orbits).softmax(1).amax(1).mean() for head in (sure, unsure)]
    assert float(said[1]) < float(said[0]) - 0.1
    assert float(said[1]) == pytest.approx(0.7, abs=0.12)
    assert accuracy(pooled(unsure, other.orbits), other.labels) > 0.9


def test_without_a_weight_for_the_pose_labels_alone_are_learnt():
    """Every view claims the right label, so that labels say nothing of the pose."""
    task = Cue()
    logits = (5.0 * task.targets)[:, None].expand(-1, 8, -1)
    task.orbits = replace(task.orbits, evidence=Evidence(logits, task.orbits.evidence.features))
    found = [
        float((task.fit(replace(RECIPE, pose=pose))(task.orbits.evidence).upright[..., 0].argmax(1) == task.right)
              .float().mean())
        for pose in (0.0, 0.3)
    ]  # fmt: skip
    assert found[0] < 0.5 < 0.95 < found[1]


# --- how it starts, and what it adds ----------------------------------------------------------------------------------


def test_before_training_the_head_is_the_balance_but_for_the_pose_of_which_it_knows_nothing():
    task = Cue()
    head = task.fit(replace(RECIPE, epochs=0))
    balanced = Balance(torch.linspace(-0.1, 0.1, 4))(task.orbits.evidence)
    said = head(task.orbits.evidence)
    assert torch.equal(said.logits, balanced.logits)
    assert torch.equal(said.upright, torch.zeros(500, 8, 1))


def test_images_as_they_came_have_the_prior_on_top_and_no_other_difference(cue_head):
    first = Cue().orbits.evidence.at(slice(None), 0)
    assert float(cue_head.prior) != 0
    plain, came = cue_head(first), cue_head.as_it_came(first)
    assert_close(came.logits, plain.logits + cue_head.prior)
    assert torch.equal(came.upright, plain.upright)
    assert came.features is None


def test_the_loss_weighs_the_image_as_it_came_by_the_prior_and_all_others_by_their_number(cue_head):
    task = Cue()
    said = cue_head(task.orbits.evidence)
    logits = said.logits + log_weights(task.orbits.poses)[..., None]
    logits = torch.cat([logits[:, :1] + cue_head.prior, logits[:, 1:]], dim=1)
    expected = F.cross_entropy(logits.logsumexp(1), task.targets)
    assert_close(label_loss(cue_head, said, log_weights(task.orbits.poses), task.targets), expected)


def test_the_loss_of_the_pose_is_least_where_the_head_points_at_the_views_that_are_upright():
    task = Cue()
    aim, came = task.orbits.aim, task.orbits.upright

    def told(upright):
        return pose_loss(Evidence(task.orbits.evidence.logits, upright=upright[..., None]), aim, came)

    pointing = 8 * (aim / aim.amax(1, keepdim=True) - 0.5)
    pointing[:, 0] = torch.where(came, 8.0, -8.0)
    assert float(told(pointing)) < float(told(torch.zeros_like(pointing))) < float(told(-pointing))
    with pytest.raises(OptionError, match="upright"):
        pose_loss(Evidence(task.orbits.evidence.logits), aim, came)


def test_a_head_scores_classes_where_there_are_images_enough_of_each_and_views_elsewhere():
    classes = 4
    enough = FEWEST_PER_CLASS * classes
    recipe = replace(RECIPE, epochs=1)
    widths = [Cue(count).fit(recipe).network[-1].out_features for count in (enough - 1, enough)]
    assert widths == [2, classes + 1]


def test_a_head_that_scores_views_adds_the_same_to_every_class():
    task = Cue(count=500, classes=40)
    head = task.fit()
    assert head.network[-1].out_features == 2
    evidence = task.orbits.evidence
    added = head(evidence).logits - (evidence.logits + head.bias) * head.log_scale.exp()
    assert_close(added, added[..., :1].expand_as(added), rtol=0, atol=1e-4)
    assert accuracy(pooled(head, task.orbits), task.labels) > accuracy(evidence.logits.logsumexp(1), task.labels) + 0.2


def test_far_outside_of_what_it_was_fitted_on_a_head_reads_no_further(cue_head):
    far = Evidence(torch.zeros(1, 4), torch.full((1, 6), 1e4))
    farther = Evidence(torch.zeros(1, 4), torch.full((1, 6), 1e9))
    assert torch.equal(cue_head(far).logits, cue_head(farther).logits)
    assert bool(cue_head(farther).logits.isfinite().all())


# --- randomness, precision and freezing -------------------------------------------------------------------------------


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


def test_fitting_a_head_leaves_the_global_streams_alone_and_gradients_off_where_they_were():
    task, state, numpy_state = Cue(), torch.get_rng_state(), repr(np.random.get_state())
    with torch.no_grad():
        task.fit(replace(RECIPE, epochs=1))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(np.random.get_state()) == numpy_state


def test_a_fitted_head_is_frozen_and_deterministic_in_any_mode_that_its_wrapper_knows(cue_head):
    assert not cue_head.training
    assert not any(parameter.requires_grad for parameter in cue_head.parameters())
    seen = Cue().orbits.evidence
    assert torch.equal(cue_head(seen).logits, cue_head(seen).logits)


def test_a_head_on_double_precision_logits_answers_in_its_own_precision():
    task = Cue().without_features()
    task.orbits = replace(task.orbits, evidence=Evidence(task.orbits.evidence.logits.double()))
    said = task.fit(replace(RECIPE, epochs=1))(task.orbits.evidence)
    assert bool(said.logits.isfinite().all())
    assert said.logits.dtype in (torch.float32, torch.float64)


def test_features_in_half_precision_train_the_head_that_they_train_in_single():
    task = Cue()
    half = replace(task.orbits, evidence=Evidence(task.orbits.evidence.logits, task.orbits.evidence.features.half()))
    head = fit_head(half, task.targets, torch.zeros(4), RECIPE, np.random.SeedSequence(0))
    assert head.mean.dtype == torch.float32
    other = Cue(seed=1)
    assert accuracy(pooled(head, other.orbits), other.labels) > 0.95


def test_moments_are_those_of_all_views_and_constant_features_have_some_deviation():
    inputs = torch.randn(1500, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    inputs[..., 1] = 2
    mean, deviation = moments(inputs, torch.arange(len(inputs)))
    flat = inputs.flatten(0, 1).double()
    assert_close(mean, flat.mean(0).float())
    assert_close(deviation[[0, 2, 3]], flat.std(0, correction=0).float()[[0, 2, 3]])
    assert float(deviation[1]) > 0


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_features_that_are_not_finite_are_a_model_error(value):
    task = Cue()
    task.orbits.evidence.features[3, 2, 1] = value
    with pytest.raises(ht.ModelError, match=r"the model's features are NaN or infinite.*Nothing was fitted"):
        task.fit()


def test_a_head_survives_logits_of_minus_infinity():
    task = Cue().without_features()
    logits = torch.cat([task.orbits.evidence.logits, torch.full((500, 8, 1), -math.inf)], dim=-1)
    orbits = replace(task.orbits, evidence=Evidence(logits))
    targets = F.pad(task.targets, (0, 1))
    head = fit_head(orbits, targets, torch.zeros(5), replace(RECIPE, epochs=1), np.random.SeedSequence(0))
    scores = head(orbits.evidence).logits
    assert bool(scores.isfinite().all())
    assert float(scores[..., 4].max()) < -500 < float(scores[..., :4].min())


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_steps_grow_with_the_looks_between_a_least_and_a_most(monkeypatch):
    monkeypatch.setattr(heads, "FEWEST_STEPS", 10)
    monkeypatch.setattr(heads, "MOST_STEPS", 100)
    recipe = HeadRecipe(epochs=4, batch=50)
    assert [recipe.steps(looks) for looks in (1, 200, 201, 500, 10**6)] == [10, 16, 17, 40, 100]
    assert HeadRecipe(epochs=0).steps(10**6) == 0


@pytest.mark.parametrize(("images", "views", "looks"), [(50, 16, 12), (300, 16, 6), (600, 16, 3), (10_000, 16, 3)])
def test_few_images_are_looked_at_more_often(images, views, looks):
    assert HeadRecipe().looks_at(images, views) == looks
    assert HeadRecipe(looks=2).looks_at(images, views) == 2


def test_a_thorough_recipe_looks_more_often_with_a_wider_head():
    usual = HeadRecipe()
    assert (thorough().looks_at(50, 16), thorough().hidden) > (usual.looks_at(50, 16), usual.hidden)
    assert thorough().steps(100_000) > usual.steps(300)


def test_training_tells_how_far_it_is():
    told = []
    Cue().fit(RECIPE, progress=lambda *step: told.append(step))
    steps = RECIPE.steps(500)
    assert told[0] == (0, steps)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert {total for _, total in told} == {steps}


def test_a_head_on_features_refuses_evidence_without_them(cue_head):
    with pytest.raises(ht.OptionError, match="this head reads features, and the evidence has none"):
        cue_head(Evidence(torch.zeros(1, 4)))
    with pytest.raises(ht.OptionError, match="source='features' needs a model whose features can be read"):
        Cue().without_features().fit(replace(RECIPE, source="features"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "pixels"}, "source must be one of 'auto', 'features', 'logits'; got 'pixels'"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1"),
        ({"looks": 0}, "looks must be a whole number of at least 1"),
        ({"epochs": -1}, "epochs must be a whole number of at least 0"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 0"),
        ({"batch": None}, "batch must be a whole number of at least 1"),
        ({"views": 0}, "views must be a whole number of at least 1"),
        ({"learning_rate": 0}, "learning_rate must be a finite number above 0"),
        ({"upright": 1.0}, "upright must be a share from 0 up to, but not, 1; got 1.0"),
        ({"upright": -0.1}, "upright must be a share"),
        ({"upright": math.nan}, "upright must be a share"),
        ({"pose": -0.1}, "pose must be a weight of at least 0"),
        ({"pose": math.nan}, "pose must be a weight of at least 0"),
        ({"pose": math.inf}, "pose must be a weight of at least 0"),
        ({"pose": "much"}, "pose must be a weight of at least 0"),
    ],
    ids=str,
)
def test_recipes_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ht.OptionError, match=message):
        HeadRecipe(**options)


# --- how much each view counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("views", [24, 48, 72, 216, 1000])
def test_a_marginal_hardly_depends_on_how_many_views_are_seen(views):
    """A turn of which each stretch says the same: twice as many views of it are no more evidence."""

    def marginal(count):
        angles = (torch.arange(count) - count // 2) * (2 * math.pi / count)
        logits = torch.stack([3 * angles.cos(), 2 * (angles - 2).cos(), torch.zeros(count)], dim=-1)
        return (logits + log_weights(rotation().matrix(angles))[:, None]).logsumexp(0)

    assert_close(marginal(views), marginal(25), rtol=0, atol=0.15)


def test_the_image_as_it_came_counts_as_one_view_and_few_others_count_as_what_they_are():
    def weights(count):
        return log_weights(rotation().matrix((torch.arange(count) - count // 2) * (2 * math.pi / count)))

    for count in (2, 9, 72):
        assert float(weights(count)[count // 2]) == 0
    assert torch.equal(weights(9), torch.zeros(9))
    assert float(weights(72).exp().sum()) == pytest.approx(float(weights(216).exp().sum()), rel=1e-4)
    assert weights(9).dtype == torch.float32
