"""Planted poses: a template matcher knows what upright is, and the search must find its way back there.

The tilted images are drawn from a formula, not warped, so these tests also pin every direction from end to end.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.groups import FiniteGroup, OneParameterGroup
from headtilt.geometry.warp import invert
from tests.toys import TemplateMatcher, render, shrunk, ungated

SIZES = {"square": (32, 32), "wide": (32, 64)}
BLOBS = {size: shrunk(1.0 if size[0] == size[1] else 0.55) for size in SIZES.values()}
MATCHER = {size: TemplateMatcher(BLOBS[size], *size) for size in SIZES.values()}
every_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())

GROUPS = {
    "full turn, odd": (ht.rotation(), 17),
    "full turn, even": (ht.rotation(), 12),
    "partial turn": (ht.rotation(1.0), 9),
    "scale": (ht.scale(0.4), 9),
    "shear_x": (ht.shear_x(0.4), 9),
    "shear_y": (ht.shear_y(0.4), 9),
    "shear along 40°": (ht.shear(0.4, math.radians(40)), 9),
    "translate_x": (ht.translate_x(0.2), 9),
    "translate_y": (ht.translate_y(0.2), 9),
    "translate along 115°": (ht.translate(0.2, math.radians(115)), 9),
    "reflection": (ht.reflection(), 4),
}
every_group = pytest.mark.parametrize(("group", "samples"), GROUPS.values(), ids=GROUPS.keys())
continuous = pytest.mark.parametrize(
    ("group", "samples"),
    [pair for pair in GROUPS.values() if not isinstance(pair[0], FiniteGroup)],
    ids=[name for name, pair in GROUPS.items() if not isinstance(pair[0], FiniteGroup)],
)


def planted(size: tuple[int, int], perturbations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All templates under all perturbations (P, 3, 3): images (3·P, 1, H, W) and their classes."""
    drawn = [render(blobs, pose, *size) for blobs in BLOBS[size] for pose in perturbations]
    return torch.stack(drawn)[:, None], torch.arange(len(BLOBS[size])).repeat_interleave(len(perturbations))


def look(size, levels, samples, images, **options):
    return ungated(
        MATCHER[size], levels, samples=samples, **{"confidence": "energy", "padding": "zeros", **options}
    ).search(images)


# --- on the grid ------------------------------------------------------------------------------------------------------


@every_size
@every_group
def test_energy_recovers_every_pose_of_the_grid_exactly(group, samples, size):
    perturbation = group.orbit(samples)
    images, classes = planted(size, perturbation)
    result = look(size, [group], samples, images)
    assert torch.equal(result.labels, classes)
    assert_close(result.pose, group.inverse(group.grid(samples)).float().repeat(3, 1, 1), rtol=0, atol=1e-5)
    assert_close(result.perturbation, perturbation.float().repeat(3, 1, 1), rtol=0, atol=1e-5)


@every_size
@pytest.mark.parametrize("samples", [8, 12, 17])
def test_group_confidence_recovers_every_rotation_of_the_grid_exactly(samples, size):
    group = ht.rotation()
    images, classes = planted(size, group.orbit(samples))
    result = look(size, [group], samples, images, confidence="group")
    assert torch.equal(result.labels, classes)
    assert_close(result.pose, group.inverse(group.grid(samples)).float().repeat(3, 1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "group",
    [ht.rotation(1.0), ht.scale(0.4), ht.shear_x(0.4), ht.shear_y(0.4), ht.translate_x(0.3), ht.translate(0.3, 2.0)],
    ids=lambda group: group.name,
)
def test_group_confidence_recovers_bounded_poses_away_from_the_padded_ends(group):
    """A valley at an end is cut in half by the padding, one beside it is still smoothed into the padding."""
    samples, size = 9, SIZES["square"]
    inner = slice(2, -2)
    images, classes = planted(size, group.orbit(samples)[inner])
    result = look(size, [group], samples, images, confidence="group")
    assert torch.equal(result.labels, classes)
    assert_close(result.pose, group.orbit(samples).flip(0)[inner].float().repeat(3, 1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("confidence", ["energy", "bayesian", "group"])
def test_upright_images_stay_upright_over_a_full_turn(confidence):
    size = SIZES["square"]
    images, classes = planted(size, torch.eye(3)[None])
    result = look(size, [ht.rotation()], 12, images, confidence=confidence)
    assert torch.equal(result.labels, classes)
    assert_close(result.pose, torch.eye(3).expand(3, 3, 3), rtol=0, atol=1e-6)


# --- off the grid -----------------------------------------------------------------------------------------------------


def steps_off(group: OneParameterGroup, samples: int, planted_at: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """By how many steps of the grid the poses found miss the inverse of what was planted."""
    step = float(group.grid(samples)[samples // 2 + 1])
    missed = found.double() + planted_at
    if group.periodic:
        missed = (missed + math.pi) % (2 * math.pi) - math.pi
    return (missed / step).abs()


@continuous
@settings(max_examples=5)
@given(fraction=st.lists(st.floats(-1, 1), min_size=4, max_size=4, unique=True))
def test_energy_recovers_poses_between_the_samples_to_within_half_a_step(group, samples, fraction):
    size = SIZES["square"]
    half = float(group.grid(samples)[samples // 2 + 1]) / 2
    at = torch.tensor(fraction, dtype=torch.float64) * (group.high if group.periodic else group.high - half)
    images, classes = planted(size, group.matrix(at))
    result = look(size, [group], samples, images)
    found = result.trace[0].parameters[result.trace[0].chosen[:, 0]]
    # Halfway between two samples, resampling may tip the balance by a few hundredths of a step.
    assert float(steps_off(group, samples, at.repeat(3), found).max()) < 0.56
    assert torch.equal(result.labels, classes)


@settings(max_examples=5)
@given(fraction=st.lists(st.floats(-1, 1), min_size=4, max_size=4, unique=True))
def test_group_confidence_recovers_rotations_between_the_samples_to_within_half_a_step(fraction):
    group, samples, size = ht.rotation(), 17, SIZES["square"]
    at = torch.tensor(fraction, dtype=torch.float64) * math.pi
    result = look(size, [group], samples, planted(size, group.matrix(at))[0], confidence="group")
    found = result.trace[0].parameters[result.trace[0].chosen[:, 0]]
    assert float(steps_off(group, samples, at.repeat(3), found).max()) < 0.6


# --- two levels -------------------------------------------------------------------------------------------------------

PAIRS = {
    "rotation, scale": (ht.rotation(), ht.scale(0.25)),
    "scale, partial turn": (ht.scale(0.4), ht.rotation(0.4)),
    "rotation, shear": (ht.rotation(), ht.shear_x(0.4)),
    "rotation, translation": (ht.rotation(), ht.translate(0.06, 0.5)),
    "translations": (ht.translate_x(0.1), ht.translate_y(0.1)),
    "reflection, scale": (ht.reflection(), ht.scale(0.25)),
    "reflection, shear": (ht.reflection(), ht.shear_x(0.25)),
}


@every_size
@pytest.mark.parametrize("levels", PAIRS.values(), ids=PAIRS.keys())
def test_energy_recovers_every_pair_of_steps_of_two_levels(levels, size):
    """What undoes the perturbation is "first level, then second": its inverse is what was planted."""
    samples = 5
    first, second = (group.orbit(samples) for group in levels)
    undo = torch.stack([b @ a for a, b in itertools.product(first, second)])
    images, classes = planted(size, invert(undo))
    result = look(size, levels, samples, images)
    assert torch.equal(result.labels, classes)
    assert_close(result.pose, undo.float().repeat(3, 1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("second", [ht.scale(0.4), ht.shear_x(0.4), ht.translate_x(0.3)], ids=lambda g: g.name)
def test_group_confidence_recovers_every_rotation_with_a_second_level_behind_it(second):
    levels, samples, size = (ht.rotation(), second), 9, SIZES["square"]
    first, second = levels[0].orbit(samples), levels[1].orbit(samples)[4:5]
    undo = torch.stack([b @ a for a, b in itertools.product(first, second)])
    images, classes = planted(size, invert(undo))
    result = look(size, levels, samples, images, confidence="group", interpolation="bilinear")
    assert torch.equal(result.labels, classes)
    assert_close(result.pose, undo.float().repeat(3, 1, 1), rtol=0, atol=1e-5)


# --- what the user gets -----------------------------------------------------------------------------------------------


@every_size
def test_the_canonical_image_is_the_upright_one(size):
    group = ht.rotation()
    images, classes = planted(size, group.orbit(12)[[1, 4, 10]])
    canonical = look(size, [group], 12, images).canonical()
    upright = torch.stack([render(BLOBS[size][int(label)], torch.eye(3), *size) for label in classes])[:, None]
    assert float((canonical - upright).abs().max()) < 0.12
    assert float((images - upright).abs().max()) > 0.5


def test_the_description_names_the_tilt_that_was_planted():
    size = SIZES["square"]
    tilt = ht.rotation().orbit(12)[4]
    images, _ = planted(size, tilt[None])
    words = look(size, [ht.rotation()], 12, images).describe(1, names=["ant", "bee", "cat"])
    assert words.startswith("turned by −60.0° → bee (")


def test_without_the_search_the_matcher_fails_on_the_same_images():
    """The planted poses are hard: what recovers them is the search."""
    size = SIZES["square"]
    images, classes = planted(size, ht.rotation().orbit(12))
    bare = float((MATCHER[size](images).argmax(1) == classes).float().mean())
    assert bare < 0.7
    assert torch.equal(look(size, [ht.rotation()], 12, images).labels, classes)
