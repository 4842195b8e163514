"""What a fit shows the classifier: nothing tells upright from tilted but the tilt itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.fitter import Seeds
from headtilt.calibration.sampler import BLOCK, Presented, Sampler
from headtilt.geometry.groups import decompose, matrices
from headtilt.model.predictor import Predictor
from tests.toys import TinyNet, tiny_images

EYE = torch.eye(3)
NET = TinyNet().eval()
TURN = (ht.rotation(),)
AFFINE = (ht.rotation(), ht.scale(0.25), ht.shear_x(0.25))


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sampler(levels=TURN, model=None, **options) -> Sampler:
    return Sampler(Predictor(NET if model is None else model), tuple(levels), **options)


def still(transforms: torch.Tensor) -> torch.Tensor:
    return (transforms == EYE).flatten(1).all(1)


def presented(transforms: torch.Tensor) -> Presented:
    yes = torch.ones(len(transforms), dtype=torch.bool)
    return Presented(transforms, yes, yes)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [TURN, AFFINE, (ht.scale(0.25),), (ht.quarter_turns(),)], ids=len)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.75])
def test_a_share_of_the_images_stays_upright_and_half_of_these_are_exactly_as_they_were(levels, share):
    drawn = sampler(levels).draw(4000, share, 28, stream())
    assert float(drawn.upright.float().mean()) == pytest.approx(share, abs=0.03)
    if share:
        exact = drawn.exact[drawn.upright]
        assert float(exact.float().mean()) == pytest.approx(0.5, abs=0.05)
        assert torch.equal(still(drawn.transforms[drawn.upright]), exact)


def test_upright_images_that_are_not_exact_are_moved_by_next_to_nothing():
    drawn = sampler().draw(3000, 0.99, 28, stream())
    nearly = drawn.transforms[drawn.upright & ~drawn.exact].double()
    parts = decompose(nearly)
    assert float(parts.rotation.abs().max().rad2deg()) < 3.5
    assert float(parts.rotation.abs().max().rad2deg()) > 2
    assert float((parts.scale - 1).abs().max()) < 0.035
    assert float(nearly[:, :2, 2].abs().max()) <= 1 / 28 + 1e-6  # half a pixel of a side that spans two
    assert float(nearly[:, :2, 2].abs().max()) > 0.8 / 28


def test_a_third_of_the_tilted_images_is_turned_by_exact_quarters():
    drawn = sampler(AFFINE).draw(6000, 0.0, 28, stream())
    turns = drawn.transforms[drawn.exact]
    assert float(drawn.exact.float().mean()) == pytest.approx(1 / 3, abs=0.03)
    assert set(turns.flatten().tolist()) <= {-1.0, 0.0, 1.0}
    quarters = (decompose(turns.double()).rotation / (math.pi / 2)).round().long() % 4
    assert set(quarters.tolist()) == {1, 2, 3}
    assert bool((quarters.bincount()[1:].float() / len(quarters) - 1 / 3).abs().max() < 0.05)


def test_the_other_tilts_are_undone_by_what_is_searched_and_cover_all_of_it():
    drawn = sampler().draw(4000, 0.0, 28, stream())
    angles = decompose(drawn.transforms[~drawn.exact].double()).rotation
    assert_close(drawn.transforms[~drawn.exact], ht.rotation().matrix(angles).float(), rtol=0, atol=1e-5)
    counts = torch.histc(angles, 8, -math.pi, math.pi)
    assert float((counts / counts.sum() - 1 / 8).abs().max()) < 0.03


@pytest.mark.parametrize(
    "levels", [(ht.rotation(1.0),), (ht.scale(0.25), ht.shear_x(0.2)), (ht.translate_x(0.2),)], ids=["arc", "size", "x"]
)
def test_where_the_levels_cover_no_full_turn_nothing_is_turned_by_quarters_and_every_tilt_is_resampled(levels):
    drawn = sampler(levels).draw(1000, 0.0, 28, stream())
    assert not bool(drawn.exact.any())
    assert float(decompose(drawn.transforms.double()).rotation.abs().max()) < 1.1


def test_a_finite_group_is_tilted_by_its_elements_and_half_of_them_are_resampled():
    drawn = sampler((ht.quarter_turns(),)).draw(3000, 0.0, 28, stream())
    assert float(drawn.exact.float().mean()) == pytest.approx(0.5, abs=0.05)
    elements = ht.quarter_turns().orbit().float()
    apart = (drawn.transforms[:, None] - elements).flatten(2).norm(dim=2).amin(1)
    assert float(apart[drawn.exact].max()) == 0
    assert float(apart[~drawn.exact].min()) > 0
    assert float(apart.max()) < 0.15


# --- the views --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [TURN, (ht.rotation(), ht.scale(0.25))], ids=["turn", "similarity"])
def test_the_first_view_is_the_image_as_it_came_and_the_others_are_a_lattice_moved_at_random(levels):
    poses = matrices(levels, sampler(levels, views=20).coordinates(stream(1)))
    assert poses.shape == (21, 3, 3)
    assert torch.equal(poses[0], EYE)
    assert not torch.equal(poses, matrices(levels, sampler(levels, views=20).coordinates(stream(2))))
    angles = decompose(poses[1:].double()).rotation.sort().values
    gaps = torch.cat([angles.diff(), angles[:1] + 2 * math.pi - angles[-1:]])
    assert_close(gaps, torch.full_like(gaps, 2 * math.pi / 20), rtol=0, atol=1e-4)


def test_the_views_of_finite_groups_are_all_their_elements_once_with_the_identity_first():
    both = (ht.quarter_turns(), ht.reflection())
    poses = matrices(both, sampler(both, views=99).coordinates(stream()))
    assert poses.shape == poses.unique(dim=0).shape == (8, 3, 3), "of sixteen pairs each pose has two"
    assert torch.equal(poses[0], EYE)
    assert len(sampler((ht.quarter_turns(),)).coordinates(stream()).unique(dim=0)) == 4


def test_the_aim_is_one_where_a_view_undoes_the_tilt_and_nothing_far_from_it():
    turn = ht.rotation().matrix
    tilts, angles = turn(torch.tensor([0.0, 0.5, -2.0])), torch.tensor([0.0, -0.5, 2.0, 3.0, -0.55])[:, None]
    orbits = sampler().orbits(tiny_images(3), presented(tilts), angles, lambda done: None)
    assert orbits.aim.shape == (3, 5)
    assert_close(orbits.aim[[0, 1, 2], [0, 1, 2]], torch.ones(3))
    assert torch.equal(orbits.aim.argmax(1), torch.tensor([0, 1, 2]))
    assert 0.5 < float(orbits.aim[1, 4]) < 1
    assert float(orbits.aim[0, 3]) < 1e-4
    assert orbits.evidence.logits.shape == (3, 5, 5)
    assert torch.equal(orbits.coordinates[1], angles)
    assert torch.equal(orbits.poses[1], turn(angles[:, 0]))


def test_orbits_are_what_the_model_says_of_the_tilted_image_from_each_pose():
    net, images = TinyNet().eval(), tiny_images(3)
    turn = ht.rotation().matrix
    tilts, angles = turn(torch.tensor([0.0, 0.5, -2.0])), torch.tensor([0.0, 1.0, -0.5])
    orbits = sampler(model=net, padding="zeros").orbits(images, presented(tilts), angles[:, None], lambda done: None)
    with torch.no_grad():
        shown = ht.warp(images, tilts)
        shown[0] = images[0]
        shown[1] = ht.warp(images[1:2], tilts[1:2], interpolation="bicubic")[0]  # every other one
        for place, pose in enumerate(turn(angles)):
            seen = shown if place == 0 else ht.warp(shown, pose.expand(3, 3, 3), interpolation="bicubic")
            expected = net(seen)
            assert_close(orbits.evidence.logits[:, place], expected, rtol=1e-4, atol=1e-4)


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("size", [12, 28, 33])
def test_exact_quarters_move_pixels_and_mix_none(size, interpolation):
    images = tiny_images(3, size, size) + 0.1
    how = sampler(padding="zeros", interpolation=interpolation)
    for turns in (1, 2, 3):
        quarter = ht.rotation().matrix(torch.tensor(turns * math.pi / 2)).round()
        seen = how.moved(images, quarter.expand(3, 3, 3))
        rounding = 0.0 if interpolation == "nearest" else 2e-5
        assert_close(seen, torch.rot90(images, -turns, (-2, -1)), rtol=0, atol=rounding)


def test_what_is_not_moved_stays_bit_for_bit():
    images = tiny_images(4, 13, 17)
    tilts = torch.stack([EYE, ht.rotation().matrix(torch.tensor(0.3)), EYE, EYE])
    seen = sampler().moved(images, tilts)
    assert torch.equal(seen[[0, 2, 3]], images[[0, 2, 3]])
    assert not torch.equal(seen[1], images[1])


def test_with_a_crop_images_are_tilted_first_and_cut_then_so_that_no_padding_comes_in():
    large = torch.nn.functional.pad(tiny_images(6, 28, 28), (8, 8, 8, 8), value=0.5)
    how = sampler(padding=-1.0, crop=28)
    drawn = how.draw(6, 0.0, 44, stream())
    seen = how.moved(large, drawn.transforms)
    assert seen.shape == (6, 1, 28, 28)
    assert float(seen.min()) > -0.5  # cubic curves dip a little below zero
    assert float(sampler(padding=-1.0).moved(large, drawn.transforms).min()) < -0.9
    assert torch.equal(how.seen(large), large[..., 8:36, 8:36])


def test_a_shift_is_by_as_much_of_what_the_model_sees_whatever_lies_around_it():
    small = tiny_images(3, 24, 24)
    large = torch.nn.functional.pad(small, (12, 12, 12, 12))
    shift = ht.translate_x(0.5).matrix(torch.tensor([0.25, -0.25, 0.0]))
    alone = sampler(padding="zeros").moved(small, shift)
    within = sampler(padding="zeros", crop=24).moved(large, shift)
    assert_close(within, alone, rtol=0, atol=1e-5)
    assert_close(within[0, 0, :, 3:], small[0, 0, :, :-3], rtol=0, atol=1e-5)


# --- memory and randomness --------------------------------------------------------------------------------------------


def test_no_more_than_a_block_of_images_is_tilted_at_once():
    sizes, moved = [], []

    class Watched(Sampler):
        def moved(self, images, transforms):
            moved.append(len(images))
            return super().moved(images, transforms)

    net = TinyNet().eval()
    net.conv.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    how = Watched(Predictor(net, chunk=10), TURN, "zeros")
    told = []
    how.orbits(tiny_images(150), how.draw(150, 0.4, 12, stream()), how.coordinates(stream()), told.append)
    assert moved == [BLOCK, BLOCK, 150 - 2 * BLOCK]
    assert told == [size * 17 for size in moved]
    assert max(sizes) == 10


def everything(seed: int):
    how, draws = sampler(AFFINE, views=8), Seeds(seed).numbers("tilts")
    drawn = how.draw(40, 0.4, 12, draws)
    return drawn.transforms, how.coordinates(draws)


def test_all_that_is_drawn_follows_the_seed_and_the_global_streams_stay_as_they_are():
    torch_state, numpy_state = torch.get_rng_state(), repr(np.random.get_state())
    first, again = everything(3), everything(3)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert repr(np.random.get_state()) == numpy_state
    for one, other in ((3, 4), (-1, -2), (-1, 1), (0, 2**63)):
        assert not torch.equal(everything(one)[0], everything(other)[0])
        assert not torch.equal(everything(one)[1], everything(other)[1])


def test_streams_of_different_names_have_nothing_in_common():
    seeds = Seeds(5)
    drawn = {name: seeds.numbers(name).random() for name in Seeds.NAMES}
    assert len(set(drawn.values())) == len(Seeds.NAMES)
    heads = {int(seeds.sequence("head", number).generate_state(1)[0]) for number in range(5)}
    assert len(heads) == 5
