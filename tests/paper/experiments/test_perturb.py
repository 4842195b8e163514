"""Perturbed test sets: what is drawn, in which order it is done, and how far an estimate is from it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.groups import decompose, quarter_turns
from headtilt.geometry.warp import invert
from headtilt.paper.data import Dataset
from headtilt.paper.data.perturb import (
    Schedule,
    angles_left,
    cropped_transforms,
    derived_seed,
    distances,
    draw,
    draw_nearly,
    draw_quarters,
    expected_spread,
    mini_batches,
    perturb_dataset,
    pose_errors,
    quarters_found,
    schedule,
    schedules,
    turn,
    turn_dataset,
    turned_more,
)

EYE = torch.eye(3)
NAMES = sorted(schedules())


def white(count: int, height: int, width: int, channels: int = 1) -> Dataset:
    pixels = torch.full((count, channels, height, width), 255, dtype=torch.uint8)
    return Dataset("white", pixels, torch.zeros(count, dtype=torch.int64), ("white",))


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["each", "run", "grid"])
def test_the_same_seed_draws_the_same_transforms_and_another_others(name, mode):
    state = torch.get_rng_state()
    first, again, other = (draw(name, 20, seed=seed, mode=mode) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == (20, 3, 3)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_each_image_has_its_own_transform_and_a_run_has_one_for_all():
    assert len(draw("affine", 50).unique(dim=0)) == 50
    assert len(draw("affine", 50, mode="run").unique(dim=0)) == 1
    assert torch.equal(draw("affine", 50, mode="run")[:3], draw("affine", 3, mode="run"))


def test_grid_draws_lie_on_the_grids_and_hit_all_of_them():
    drawn = draw("rotation", 2000, mode="grid", samples=17)
    orbit = ht.rotation().orbit(17).float()
    distance = (drawn[:, None] - orbit).flatten(2).norm(dim=-1)
    assert float(distance.min(1).values.max()) < 1e-5
    assert len(distance.argmin(1).unique()) == 17


def test_rotations_are_drawn_evenly_from_the_whole_turn():
    angles = ht.decompose(draw("rotation", 4000).double()).rotation
    counts = torch.histc(angles, 8, -math.pi, math.pi)
    assert float((counts - 500).abs().max()) < 5 * math.sqrt(500)


def test_scales_are_drawn_evenly_in_the_factor_as_the_paper_does():
    factors = ht.decompose(draw("scale", 4000).double()).scale
    assert float(factors.min()) >= 0.75 - 1e-6
    assert float(factors.max()) <= 1.25 + 1e-6
    assert float(factors.mean()) == pytest.approx(1.0, abs=0.01)
    counts = torch.histc(factors, 5, 0.75, 1.25)
    assert float((counts - 800).abs().max()) < 5 * math.sqrt(800)


def test_translations_move_both_ways_independently():
    shifts = draw("translation", 4000)[:, :2, 2]
    assert float(shifts.abs().max()) <= 0.25
    assert abs(float(torch.corrcoef(shifts.T)[0, 1])) < 0.06
    assert_close(draw("translation", 5)[:, :2, :2], torch.eye(2).expand(5, 2, 2))


def test_affine_is_rotation_times_scale_times_shear():
    drawn = draw("affine", 500, seed=2).double()
    generator = torch.Generator().manual_seed(2)
    turn, size, slant = (torch.rand(500, generator=generator, dtype=torch.float64) for _ in range(3))
    rotations = ht.rotation().matrix((2 * turn - 1) * math.pi)
    scales = torch.diag_embed(torch.stack([0.75 + size / 2, 0.75 + size / 2, torch.ones(500)], dim=1))
    shears = ht.shear_x(0.25).matrix((2 * slant - 1) * 0.25)
    assert_close(drawn, rotations @ scales @ shears, rtol=0, atol=1e-5)
    parts = ht.decompose(drawn)
    assert_close(parts.stretch, torch.ones(500).double(), rtol=0, atol=1e-5)
    assert_close(parts.shear, (2 * slant - 1) * 0.25, rtol=0, atol=1e-5)
    backwards = shears @ scales @ rotations
    assert float((ht.decompose(backwards).stretch - 1).abs().max()) > 0.05


def test_a_list_of_groups_is_drawn_and_searched():
    groups = [ht.rotation(0.5), ht.reflection()]
    assert schedule(groups) == Schedule(tuple(groups), tuple(groups))
    drawn = draw(groups, 400)
    assert float(ht.decompose(drawn.double()).reflection.float().mean()) == pytest.approx(0.5, abs=0.1)
    assert len(draw([ht.reflection()], 400).unique(dim=0)) == 4


@pytest.mark.parametrize("name", NAMES)
def test_every_named_perturbation_can_be_undone_by_what_is_searched(name):
    """A scale of 1.25 is undone by 0.8, which the searched range from 0.75 to 1.33 holds."""
    plan = schedule(name)
    assert [group.name for group in plan.drawn] == [group.name for group in plan.searched]
    for drawn, searched in zip(plan.drawn, plan.searched, strict=True):
        assert searched.low <= -drawn.high + 1e-9
        assert searched.high >= -drawn.low - 1e-9


def test_perturbations_and_modes_that_mean_nothing_are_refused():
    with pytest.raises(ht.OptionError, match=r"perturb must be one of .*'affine'.*; got 'wobble'"):
        draw("wobble", 3)
    with pytest.raises(ht.OptionError, match="mode must be one of 'each', 'run', 'grid', 'paper'; got 'all'"):
        draw("affine", 3, mode="all")
    with pytest.raises(ht.OptionError, match="transforms must be one per image; got 2 for 3"):
        perturb_dataset(white(3, 8, 8), EYE.expand(2, 3, 3))


def test_draws_of_tilts_are_what_they_were_when_the_stored_results_were_measured():
    assert_close(
        draw("affine", 3)[0],
        torch.tensor([[-1.189, -0.0353, 0.0], [0.2264, -1.2254, 0.0], [0.0, 0.0, 1.0]]),
        rtol=0,
        atol=1e-4,
    )


def test_nearly_upright_is_within_three_degrees_three_percent_and_half_a_pixel():
    drawn = draw_nearly(4000, 28)
    assert drawn.shape == (4000, 3, 3)
    assert drawn.dtype == torch.float32
    parts = ht.decompose(drawn.double())
    pixels = parts.translation * 28 / 2
    for values, bound in (
        (parts.rotation.rad2deg(), 3),
        (parts.scale - 1, 0.03),
        (pixels[:, 0], 0.5),
        (pixels[:, 1], 0.5),
    ):
        assert 0.99 * bound < float(values.abs().max()) <= bound + 1e-4
        assert abs(float(values.mean())) < 0.05 * bound
    assert_close(parts.shear, torch.zeros(4000).double(), rtol=0, atol=1e-6)
    together = torch.stack([parts.rotation, parts.scale, *pixels.T])
    assert float((torch.corrcoef(together) - torch.eye(4)).abs().max()) < 0.06


def test_quarter_turns_are_one_two_or_three_and_equally_frequent():
    counts = draw_quarters(3000).bincount(minlength=4)
    assert int(counts[0]) == 0
    assert int((counts[1:] - 1000).abs().max()) < 5 * math.sqrt(1000)


def test_each_condition_draws_from_a_stream_of_its_own():
    state = torch.get_rng_state()
    for make in (lambda seed: draw_nearly(50, 28, seed), lambda seed: draw_quarters(50, seed)):
        assert torch.equal(make(3), make(3))
        assert not torch.equal(make(3), make(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert len({derived_seed(seed, stream) for seed in range(20) for stream in range(4)}) == 80
    angles = [ht.decompose(drawn.double()).rotation for drawn in (draw("rotation", 4000), draw_nearly(4000, 28))]
    both = torch.stack([*angles, draw_quarters(4000).double()])
    assert float((torch.corrcoef(both) - torch.eye(3)).abs().max()) < 0.06


def test_only_schedules_with_a_whole_turn_have_quarters():
    whole = {name for name in NAMES if schedule(name).whole_turn}
    assert whole == {"rotation", "rotation+scale", "affine"}
    assert not schedule([ht.rotation(0.5)]).whole_turn


# --- pose errors ------------------------------------------------------------------------------------------------------


def test_the_papers_frobenius_norm_of_doing_nothing_is_reproduced():
    """Table 1 prints 23.03 for the identity; the ranges of the paper give √(128 · E‖A − I‖²) = 22.8."""
    truth = draw("affine", 10_000)
    found = pose_errors(EYE.expand(10_000, 3, 3), truth)
    assert found["frobenius_batch128"] == pytest.approx(22.8, abs=0.3)
    assert found["angle_error_deg"] == pytest.approx(90, abs=3)


@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_the_truth_has_no_error(seed):
    truth = draw("affine", 200, seed=seed)
    found = pose_errors(truth, truth)
    assert found["angle_error_deg"] == pytest.approx(0, abs=1e-4)
    assert found["frobenius"] == 0
    assert found["frobenius_batch128"] == 0


def test_an_angle_that_is_left_over_is_found_whatever_else_was_done():
    truth = draw("affine", 99).double()
    extra = ht.rotation().matrix(torch.tensor(math.radians(17.0), dtype=torch.float64))
    assert pose_errors(truth @ extra, truth)["angle_error_deg"] == pytest.approx(17, abs=1e-6)


def test_the_frobenius_distance_is_the_mean_per_image_and_the_norm_of_what_128_images_are_off_by():
    truth = EYE.expand(300, 3, 3).clone()
    estimate = truth.clone()
    estimate[:200, 0, 2] = 0.5
    estimate[200:, 0, 2] = 1.0
    found = pose_errors(estimate, truth)
    assert found["frobenius"] == pytest.approx((200 * 0.5 + 100) / 300)
    assert found["frobenius_batch128"] == pytest.approx(math.sqrt(128 * (200 * 0.25 + 100) / 300))
    assert pose_errors(estimate[:27], truth[:27])["frobenius_batch128"] == pytest.approx(0.5 * math.sqrt(128))


def test_an_angle_left_over_is_measured_for_each_image():
    truth = ht.rotation().matrix(torch.tensor([10.0, 170.0, -90.0]).deg2rad())
    estimate = ht.rotation().matrix(torch.tensor([0.0, -170.0, 90.0]).deg2rad())
    assert_close(angles_left(estimate, truth), torch.tensor([10.0, 20.0, 180.0]).double(), rtol=0, atol=1e-3)


def test_a_quarter_is_found_where_the_estimate_is_nearest_to_it():
    truth = quarter_turns().matrix(torch.tensor([1, 1, 2, 2, 3, 3]))
    estimate = ht.rotation().matrix(torch.tensor([46.0, 44.0, -136.0, 134.0, -46.0, 91.0]).deg2rad())
    assert quarters_found(estimate, truth).tolist() == [True, False, True, False, True, False]


def test_an_upright_image_is_turned_where_the_estimate_says_so_either_way():
    estimate = ht.rotation().matrix(torch.tensor([0.0, 9.0, -11.0, 180.0]).deg2rad())
    assert turned_more(estimate, 10).tolist() == [False, False, True, True]


# --- perturbed sets ---------------------------------------------------------------------------------------------------


def test_the_transforms_are_what_was_done_to_the_images(digits):
    few = digits.subset(range(12))
    test = perturb_dataset(few, draw("affine", 12))
    assert len(test) == 12
    assert torch.equal(test.labels, few.labels)
    assert torch.equal(test.images, ht.warp(few.floats(), test.transforms))
    undone = ht.warp(test.images, invert(test.transforms))
    far = (undone - few.floats()).abs().mean()
    assert float(far) < 0.5 * float((test.images - few.floats()).abs().mean())


def test_large_sets_are_perturbed_in_parts_with_the_same_result(digits):
    whole = digits.subset([*range(500), *range(100)])
    transforms = draw("affine", 600)
    test = perturb_dataset(whole, transforms)
    assert test.images.shape == (600, 1, 28, 28)
    assert_close(test.images[500:530], ht.warp(whole.floats(range(500, 530)), transforms[500:530]))


def test_the_identity_changes_nothing(digits):
    few = digits.subset(range(5))
    assert_close(perturb_dataset(few, EYE.expand(5, 3, 3)).images, few.floats(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (60, 90)])
def test_the_crop_of_photographs_leaves_no_corner(height, width):
    """A turned square shows its corners; its centre, of side 1/√2, does not."""
    data, turns = white(64, height, width, channels=3), draw("rotation", 64)
    side = int(60 / math.sqrt(2)) - 2
    cropped = perturb_dataset(data, turns, crop=side).images
    assert cropped.shape == (64, 3, side, side)
    assert float(cropped.min()) > 1 - 1e-4
    assert float(perturb_dataset(data, turns).images.min()) == 0


def test_what_moves_in_from_outside_may_be_chosen():
    data, turns = white(4, 32, 32), draw("rotation", 4)
    assert float(perturb_dataset(data, turns, padding="reflection").images.min()) > 1 - 1e-4
    assert float(perturb_dataset(data, turns, padding=0.5).images.min()) == pytest.approx(0.5)


# --- quarter turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_quarter_turn_is_the_clockwise_rotation_of_its_matrix_and_of_warp(count):
    images = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    turned = turn(images, torch.full((2,), count))
    matrix = quarter_turns().matrix(torch.tensor(count))
    assert_close(turned, ht.warp(images, matrix.expand(2, 3, 3)), rtol=0, atol=1e-5)
    exact = ht.rotation().matrix(torch.tensor(count * math.pi / 2, dtype=torch.float64))
    assert_close(matrix.double(), exact, rtol=0, atol=1e-7)


def test_the_upper_left_corner_turns_to_the_upper_right():
    image = torch.zeros(1, 1, 3, 3)
    image[..., 0, 0] = 1
    assert turn(image, torch.tensor([1]))[0, 0, 0].tolist() == [0, 0, 1]


def test_a_turned_set_knows_what_was_done_to_it(digits):
    few = digits.subset(range(30))
    quarters = draw_quarters(30)
    test = turn_dataset(few, quarters)
    assert_close(test.images, ht.warp(few.floats(), test.transforms), rtol=0, atol=1e-5)
    assert torch.equal(turn(test.images, 4 - quarters), few.floats()), "no pixel is resampled"
    assert torch.equal(test.labels, few.labels)
    assert bool(quarters_found(test.transforms, test.transforms).all())


def test_turned_by_no_quarter_the_images_are_as_they_are(digits):
    few = digits.subset(range(5))
    test = turn_dataset(few, torch.zeros(5, dtype=torch.long))
    assert torch.equal(test.images, few.floats())
    assert torch.equal(test.transforms, EYE.expand(5, 3, 3))


def test_photographs_are_cropped_first_and_then_turned():
    pixels = torch.randint(0, 256, (4, 3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = Dataset("noise", pixels, torch.zeros(4, dtype=torch.int64), ("noise",))
    test = turn_dataset(data, torch.tensor([1, 2, 3, 1]), crop=12)
    assert test.images.shape == (4, 3, 12, 12)
    assert torch.equal(test.images[1], data.floats()[1, :, 4:16, 9:21].flip(-1, -2))


def test_a_quarter_turn_of_what_is_not_square_is_refused():
    with pytest.raises(ht.OptionError, match="a quarter turn needs square images; got 8×9"):
        turn_dataset(white(3, 8, 9), torch.tensor([2, 1, 0]))
    assert turn_dataset(white(2, 8, 9), torch.tensor([0, 2])).images.shape == (2, 1, 8, 9)
    with pytest.raises(ht.OptionError, match="quarters must be one per image; got 2 for 3"):
        turn_dataset(white(3, 8, 8), torch.tensor([2, 1]))


@pytest.mark.parametrize(("side", "crop"), [(32, 16), (33, 16), (32, 17)])
def test_the_transforms_of_cropped_images_are_in_their_own_coordinates(side, crop):
    """A dot that the transform moves is, in the crop, where the transform of the crop says."""
    truth = draw([ht.rotation(), ht.translate_x(0.1)], 8)
    inner = cropped_transforms(truth, side, side, crop)
    wide = torch.rand(8, 1, side, side, generator=torch.Generator().manual_seed(0))
    wide = torch.nn.functional.avg_pool2d(wide, 5, 1, 2)
    edge = (side - crop) // 2
    window = (..., slice(edge, edge + crop), slice(edge, edge + crop))
    moved = ht.warp(wide, truth)[window]
    again = ht.warp(wide[window], inner)
    middle = (..., slice(6, 10), slice(6, 10))
    assert_close(again[middle], moved[middle], rtol=0, atol=1e-4)
    assert cropped_transforms(truth, side, side, None) is truth


# --- the protocol of table 1 ------------------------------------------------------------------------------------------


def test_the_papers_protocol_draws_for_each_image_from_the_grid_with_both_ends():
    drawn = draw("rotation", 4000, seed=0, mode="paper")
    degrees = decompose(drawn.double()).rotation.rad2deg()
    assert sorted(set(degrees.round(decimals=2).tolist())) == pytest.approx([22.5 * k for k in range(-7, 9)], abs=0.01)
    # −180° and 180° are two of its seventeen points.
    share = float((degrees.abs() > 179).double().mean())
    assert share == pytest.approx(2 / 17, abs=0.02)
    factors = decompose(draw("scale", 4000, seed=0, mode="paper").double()).scale
    assert sorted(set((32 * factors).round().tolist())) == list(range(24, 41))


@pytest.mark.parametrize(("images", "mean", "std"), [(3991, 23.03, 2.48), (5000, 23.03, 2.80)])
def test_the_identity_is_as_far_off_as_table_1_says(images, mean, std):
    found = []
    for seed in range(5):
        truth = draw("affine", images, seed=seed, mode="paper")
        distance = distances(EYE.expand(images, 3, 3), truth)
        found.append(mini_batches(torch.ones(images), distance)["frobenius"])
    assert sum(one["mean"] for one in found) / 5 == pytest.approx(mean, abs=0.1)
    assert sum(one["std"] for one in found) / 5 == pytest.approx(std, abs=0.1)


def test_the_short_last_batch_counts_like_a_whole_one_and_is_divided_by_128():
    right = torch.ones(128 + 64)
    right[:32] = 0
    found = mini_batches(right)["accuracy"]
    assert found["mean"] == pytest.approx((75 + 50) / 2)
    assert found["std"] == pytest.approx(25 / math.sqrt(2))


def test_the_expected_spread_is_that_of_drawn_batches():
    generator = torch.Generator().manual_seed(0)
    runs = [mini_batches(torch.rand(3991, generator=generator) < 0.9)["accuracy"] for _ in range(40)]
    mean = sum(one["mean"] for one in runs) / 40
    assert expected_spread(mean, 3991) == pytest.approx(sum(one["std"] for one in runs) / 40, rel=0.02)
