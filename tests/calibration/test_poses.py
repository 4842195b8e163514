"""Poses by a head's posterior: members of the group, judged apart from labels, and upright images are not touched."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.gate import Gate
from headtilt.calibration.head import HeadRecipe
from headtilt.geometry.groups import decompose, matrices
from headtilt.search.lattice import lattice
from headtilt.search.seen import log_weights, posture
from tests.toys import TinyNet, tiny_images

from .conftest import QUICK
from .toys import joint, twin

EYE = torch.eye(3)
TURN, AFFINE = (ht.rotation(),), (ht.rotation(), ht.scale(0.25), ht.shear_x(0.25))


def told(levels, count, upright):
    """The posture that views of a lattice give, by a function from coordinates (V, L) to log-odds of being upright."""
    coordinates = lattice(levels, count).float()[None]
    poses = matrices(levels, coordinates)
    return posture(levels, coordinates, poses, upright(coordinates[0])[None] + log_weights(poses))


def peak(at: float, sharpness: float = 20.0):
    return lambda coordinates: sharpness * ((coordinates[:, 0] - at).cos() - 1)


# --- the posterior ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.0, 0.4, -1.3, 2.0, math.pi, -3.0])
def test_a_pose_lies_between_the_views_where_the_posterior_does(at):
    found = told(TURN, 36, peak(at))
    off = decompose(found.pose.double()).rotation - at
    assert abs(float((off + math.pi) % (2 * math.pi) - math.pi)) < math.radians(3.5)


def test_a_turn_that_lies_around_the_end_of_the_range_is_averaged_by_the_shorter_way():
    """A mean of −175° and 175° is 180° and not 0°."""
    found = told(TURN, 36, peak(math.pi - 0.01))
    assert abs(abs(float(decompose(found.pose.double()).rotation)) - math.pi) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_pose_of_a_rotation_is_a_rotation_and_nothing_else(seed):
    logits = 5 * torch.randn(24, generator=torch.Generator().manual_seed(seed))
    pose = told(TURN, 24, lambda coordinates: logits).pose[0]
    assert_close(pose[:2, :2] @ pose[:2, :2].T, torch.eye(2), rtol=0, atol=1e-5)
    assert float(torch.linalg.det(pose)) == pytest.approx(1, abs=1e-5)
    assert pose[:2, 2].tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_a_pose_of_several_groups_stays_within_their_ranges(seed):
    logits = 5 * torch.randn(48, generator=torch.Generator().manual_seed(seed))
    pose = told(AFFINE, 48, lambda coordinates: logits).pose.double()
    parts = decompose(pose)
    assert 0.74 < float(parts.scale) < 1.36
    assert abs(float(parts.shear)) < 0.36
    assert pose[0, :2, 2].tolist() == [0, 0]


@pytest.mark.parametrize("best", range(4))
def test_elements_of_a_finite_group_are_not_averaged(best):
    levels = (ht.quarter_turns(),)
    found = told(levels, 4, lambda coordinates: -2.0 * (coordinates[:, 0] - best).abs())
    assert torch.equal(found.pose, ht.quarter_turns().matrix(torch.tensor([float(best)])).float())


def test_the_confidence_is_high_where_the_posterior_is_gathered_and_low_where_it_is_spread():
    sharp, broad, flat = (float(told(TURN, 36, peak(1.0, sharpness)).confidence) for sharpness in (200.0, 5.0, 0.0))
    assert 1 >= sharp > 0.8 > broad > flat > 0
    assert flat < 0.25


def test_an_image_is_tilted_where_most_of_the_posterior_lies_elsewhere():
    assert float(told(TURN, 36, peak(0.0)).tilted) < -3
    assert float(told(TURN, 36, peak(2.0)).tilted) > 3


# --- what a search makes of it ----------------------------------------------------------------------------------------


def test_images_that_are_not_turned_are_untouched_bit_for_bit(fitted, upright):
    result = fitted.search(upright[:60])
    still = (result.pose == EYE).flatten(1).all(1)
    assert int(still.sum()) >= 50
    assert torch.equal(result.canonical()[still], upright[:60][still])


def test_tilted_images_are_turned_back(fitted, digits_net):
    from headtilt.paper.data import load
    from headtilt.paper.data.perturb import draw, perturb_dataset

    data = load("digits", "test", limit=120)
    tilts = draw("rotation", 120, seed=4)
    result = fitted.search(perturb_dataset(data, tilts).images)
    confident = result.pose_confidence >= result.pose_confidence.median()
    apart = (result.perturbation.double() - tilts.double()).flatten(1).norm(dim=1) / math.sqrt(2)
    right = apart < math.radians(30)
    assert float(right.double().mean()) > 0.45  # chance is a sixth
    assert float(right[confident].double().mean()) > float(right[~confident].double().mean())


def test_poses_of_a_rotation_have_no_scale_and_no_shear(fitted, tilted):
    parts = decompose(fitted.search(tilted).pose.double())
    assert_close(parts.scale, torch.ones_like(parts.scale), rtol=0, atol=1e-5)
    assert_close(parts.shear, torch.zeros_like(parts.shear), rtol=0, atol=1e-5)


def test_labels_may_be_replaced_without_a_turn_and_images_turned_without_another_label(fitted, tilted, digits_net):
    with torch.no_grad():
        bare = digits_net(tilted)
    robust = twin(fitted)
    robust.gate = Gate(0.0, math.inf, math.inf)
    labels_alone = robust.search(tilted)
    assert torch.equal(labels_alone.pose, EYE.expand(60, 3, 3))
    assert torch.equal(labels_alone.canonical(), tilted)
    assert int((labels_alone.labels != bare.argmax(1)).sum()) > 10
    robust.gate = Gate(math.inf, math.inf, -math.inf)
    poses_alone = robust.search(tilted)
    assert bool(poses_alone.gated.all())
    assert torch.equal(poses_alone.logits, bare)
    assert int((poses_alone.pose != EYE).flatten(1).any(1).sum()) > 40
    assert torch.equal(poses_alone.pose_confidence, labels_alone.pose_confidence)


def test_without_a_gate_an_image_is_turned_where_it_is_more_likely_tilted_than_not(fitted, tilted, upright):
    robust = twin(fitted)
    robust.gate = None
    free = robust.search(tilted)
    robust.gate = Gate(-math.inf, math.inf, 0.0)
    assert torch.equal(robust.search(tilted).pose, free.pose)


def test_images_whose_pose_is_less_probable_than_asked_for_stay_as_they_came(fitted, tilted):
    result = fitted.search(tilted)
    plain = result.canonical()
    threshold = float(result.pose_confidence.median())
    some = result.canonical(min_confidence=threshold)
    doubtful = result.pose_confidence < threshold
    assert 10 < int(doubtful.sum()) < 50
    assert torch.equal(some[doubtful], tilted[doubtful])
    assert torch.equal(some[~doubtful], plain[~doubtful])
    assert not torch.equal(plain[doubtful], tilted[doubtful])
    assert torch.equal(result.canonical(min_confidence=0), plain)
    assert torch.equal(result.canonical(1.0), tilted)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "much", None, True], ids=str)
def test_confidences_that_mean_nothing_are_refused(fitted, tilted, value):
    with pytest.raises(ht.OptionError, match="min_confidence must be a probability between 0 and 1"):
        fitted.search(tilted[:1]).canonical(value)


@pytest.mark.parametrize("options", [{"gate": None}, {"gate": "cautious"}, {"search": "tree", "samples": 5}], ids=str)
def test_without_a_head_nobody_tells_how_probable_a_pose_is(options):
    result = joint(TinyNet(), **options).search(tiny_images(3))
    assert bool(result.pose_confidence.isnan().all())
    assert result.canonical().shape == (3, 1, 12, 12)
    with pytest.raises(ht.OptionError, match="min_confidence needs a head that tells poses: call fit first"):
        result.canonical(min_confidence=0.5)


def test_the_pose_of_a_tree_is_one_of_its_views():
    levels = [ht.rotation(), ht.scale(0.2)]
    robust = joint(TinyNet(), levels=levels, search="tree", samples=5).fit(tiny_images(60), recipe=QUICK, promise=None)
    result = robust.search(tiny_images(4))
    for image in range(4):
        seen = torch.cat([EYE[None], *(level.poses()[image].flatten(0, 1) for level in result.trace)])
        assert float((seen - result.pose[image]).flatten(1).norm(dim=1).min()) < 1e-5


@pytest.mark.parametrize("search", ["joint", "anneal", "tree"])
def test_poses_and_confidences_are_those_of_single_images_whatever_else_is_in_the_batch(search):
    robust = joint(TinyNet(), search=search, budget=9, samples=5).fit(
        tiny_images(60), recipe=HeadRecipe(looks=1, views=8, epochs=4, hidden=16), promise=10.0
    )
    images = tiny_images(5)
    whole = robust.search(images)
    for image in range(5):
        alone = robust.search(images[image : image + 1])
        assert_close(alone.pose[0], whole.pose[image], rtol=0, atol=1e-3)
        assert_close(alone.pose_confidence[0], whole.pose_confidence[image], rtol=0, atol=1e-3)
