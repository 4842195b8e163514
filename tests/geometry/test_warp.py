"""Warping moves content as the poses say, on any aspect ratio, and invents nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.warp import all_finite, checked_padding, frame_colour, sampling_grid, warp_all
from tests.toys import TEMPLATES, render, shrunk, tiny_images

EYE = torch.eye(3, dtype=torch.float64)
SIZES = {"square": (64, 64), "wide": (48, 96), "tall": (96, 48)}
every_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
every_interpolation = pytest.mark.parametrize("interpolation", ["bilinear", "nearest", "bicubic"])
every_padding = pytest.mark.parametrize(
    "padding", ["auto", "zeros", "border", "reflection", 0.5, (0.1, 0.2, 0.3)], ids=str
)


def fitting(size: tuple[int, int]) -> float:
    """How much the templates must shrink to stay inside the frame in any pose drawn below."""
    return 0.8 if size[0] == size[1] else 0.5


def turn(degrees: float) -> torch.Tensor:
    return ht.rotation().matrix(torch.tensor(math.radians(degrees), dtype=torch.float64))[None]


def shift_pixels(right: int, down: int, height: int, width: int) -> torch.Tensor:
    pose = EYE.clone()
    pose[:2, 2] = torch.tensor([right, down], dtype=torch.float64) * 2 / max(height, width)
    return pose[None]


poses = st.builds(
    lambda angle, size, slant, x, y: ht.compose(
        ht.shear_x().matrix(torch.tensor(slant, dtype=torch.float64)),
        ht.scale().matrix(torch.tensor(math.log(size), dtype=torch.float64)),
        ht.rotation().matrix(torch.tensor(angle, dtype=torch.float64)),
        ht.translate_x().matrix(torch.tensor(x, dtype=torch.float64)),
        ht.translate_y().matrix(torch.tensor(y, dtype=torch.float64)),
    ),
    angle=st.floats(-math.pi, math.pi),
    size=st.floats(0.8, 1.2),
    slant=st.floats(-0.25, 0.25),
    x=st.floats(-0.05, 0.05),
    y=st.floats(-0.05, 0.05),
)


# --- an action --------------------------------------------------------------------------------------------------------


@every_size
@settings(max_examples=25)
@given(pose=poses, which=st.integers(0, 2))
def test_warping_agrees_with_the_formula_that_drew_the_image(size, pose, which):
    """The rendered image knows nothing of resampling: this pins every direction at once, on every aspect ratio."""
    blobs = shrunk(fitting(size))[which]
    upright = render(blobs, EYE, *size)[None, None]
    expected = render(blobs, pose, *size)[None, None]
    assert_close(ht.warp(upright, pose[None]), expected, rtol=0, atol=0.05)
    assert_close(ht.warp(upright, pose[None], interpolation="bicubic"), expected, rtol=0, atol=0.02)


def read_within(pose: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Where (H, W) a bicubic warp reads all its 4 × 4 pixels from within the frame."""
    x, y = ((sampling_grid(pose[None], height, width)[0] + 1) * torch.tensor([width, height]) / 2 - 0.5).unbind(-1)
    return (x >= 1) & (x <= width - 2) & (y >= 1) & (y <= height - 2)


@every_size
@settings(max_examples=25)
@given(first=poses, second=poses)
def test_warping_twice_is_warping_by_the_product_wherever_nothing_left_the_frame_in_between(size, first, second):
    # torch's bicubic kernel misses a slope by a share of a pixel, so that its error halves with the pixels: 0.033 at
    # the sizes themselves, 0.017 at twice as many pixels a side.
    height, width = 2 * size[0], 2 * size[1]
    image = render(shrunk(fitting(size))[0], EYE, height, width)[None, None]
    twice = ht.warp(ht.warp(image, first[None], interpolation="bicubic"), second[None], interpolation="bicubic")
    once = ht.warp(image, (second @ first)[None], interpolation="bicubic")
    # What leaves a wide frame at the first step is missing at the second.
    there = read_within(second, height, width)
    assert float(there.float().mean()) > 0.3
    assert_close(twice[0, 0, there], once[0, 0, there], rtol=0, atol=0.02)


def test_the_order_of_the_product_matters_and_is_last_on_the_left():
    image = render(TEMPLATES[0], EYE)[None, None]
    first, second = turn(70)[0], ht.shear_x().matrix(torch.tensor(0.4, dtype=torch.float64))
    twice = ht.warp(ht.warp(image, first[None]), second[None])
    right, wrong = (ht.warp(image, product[None]) for product in (second @ first, first @ second))
    assert float((twice - right).abs().max()) < 0.08
    assert float((twice - wrong).abs().max()) > 0.3


@every_size
@settings(max_examples=15)
@given(pose=poses)
def test_the_inverse_pose_brings_the_image_back(size, pose):
    image = render(shrunk(fitting(size))[1], EYE, *size)[None, None]
    there = ht.warp(image, pose[None], interpolation="bicubic")
    assert_close(ht.warp(there, torch.linalg.inv(pose)[None], interpolation="bicubic"), image, rtol=0, atol=0.03)


# --- exact cases ------------------------------------------------------------------------------------------------------


@every_padding
@every_interpolation
@pytest.mark.parametrize("size", [(12, 12), (9, 16), (16, 9), (1, 7), (1, 1)], ids=str)
def test_the_identity_returns_the_image(size, interpolation, padding):
    image = tiny_images(2, *size, channels=3).double() * 3 - 1
    warped = ht.warp(image, EYE.expand(2, 3, 3), padding=padding, interpolation=interpolation)
    assert_close(warped, image, rtol=0, atol=1e-12)


@every_interpolation
@pytest.mark.parametrize("size", [1, 8, 9, 48])
@pytest.mark.parametrize("quarters", [-1, 1, 2, 3, 4])
def test_quarter_turns_of_square_images_are_exact(quarters, size, interpolation):
    image = torch.rand(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pose = turn(90 * quarters).expand(2, 3, 3)
    clockwise = image.rot90(-quarters, dims=(-2, -1))
    assert_close(ht.warp(image, pose, interpolation=interpolation), clockwise, rtol=0, atol=1e-10)
    assert_close(
        ht.warp(image.float(), pose.float(), interpolation=interpolation), clockwise.float(), rtol=0, atol=1e-4
    )


@every_interpolation
@pytest.mark.parametrize("size", [(8, 8), (7, 12), (48, 96), (5, 1)], ids=str)
def test_flips_and_half_turns_are_exact_on_any_aspect_ratio(size, interpolation):
    image = torch.rand(1, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flips = ht.warp(image, ht.reflection().orbit(), interpolation=interpolation)
    expected = torch.cat([image, image.flip(-1), image.flip(-2), image.flip(-1, -2)])
    assert_close(flips, expected, rtol=0, atol=1e-10)
    assert_close(ht.warp(image, turn(180), interpolation=interpolation), image.flip(-1, -2), rtol=0, atol=1e-10)


@every_interpolation
@pytest.mark.parametrize("size", [(8, 8), (6, 11), (11, 6)], ids=str)
@pytest.mark.parametrize(
    ("padding", "mode"),
    [
        ("zeros", {"mode": "constant"}),
        ("border", {"mode": "edge"}),
        ("reflection", {"mode": "symmetric"}),
        (0.7, {"mode": "constant", "constant_values": 0.7}),
    ],
    ids=["zeros", "border", "reflection", "number"],
)
def test_whole_pixel_shifts_are_exact_and_show_what_lies_outside(size, padding, mode, interpolation):
    """Of the three words, `numpy.pad` is the witness; reflection repeats the edge pixel, as half a pixel outside is."""
    image = torch.rand(1, 1, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    height, width = size
    padded = torch.from_numpy(np.pad(image[0, 0].numpy(), 3, **mode))
    for right, down in [(0, 0), (2, 0), (0, -3), (-1, 2)]:
        expected = padded[3 - down : 3 - down + height, 3 - right : 3 - right + width]
        warped = ht.warp(image, shift_pixels(right, down, *size), padding=padding, interpolation=interpolation)
        assert_close(warped[0, 0], expected, rtol=0, atol=1e-10)


# --- aspect ratio -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [17, 60, 90, 135, -101])
def test_a_dot_on_a_wide_image_turns_on_a_circle_of_pixels(degrees):
    height, width, radius = 48, 96, 14.0
    angle = math.radians(degrees)
    dot = render([(radius * 2 / width, 0.0, 0.05, 1.0)], EYE, height, width)[None, None]
    turned = ht.warp(dot, turn(degrees))[0, 0]
    rows, columns = torch.meshgrid(torch.arange(48.0) - 23.5, torch.arange(96.0) - 47.5, indexing="ij")
    weight = turned / turned.sum()
    centroid = float((weight * columns).sum()), float((weight * rows).sum())
    assert centroid == pytest.approx((radius * math.cos(angle), radius * math.sin(angle)), abs=0.1)


def test_one_unit_is_half_the_longer_side_along_both_axes():
    image = torch.zeros(1, 1, 10, 20)
    image[0, 0, 5, 10] = 1
    right = ht.warp(image, ht.translate_x().matrix(0.5)[None])
    down = ht.warp(image, ht.translate_y().matrix(0.2)[None])
    assert float(right[0, 0, 5, 15]) == pytest.approx(1)
    assert float(down[0, 0, 7, 10]) == pytest.approx(1)


@pytest.mark.parametrize("size", [(6, 6), (6, 9), (9, 6)], ids=str)
def test_the_sampling_grid_of_the_identity_is_the_one_of_torch(size):
    expected = F.affine_grid(torch.eye(2, 3)[None], [1, 1, *size], align_corners=False)
    assert_close(sampling_grid(torch.eye(3)[None], *size), expected, rtol=0, atol=1e-6)


# --- padding and interpolation ----------------------------------------------------------------------------------------


def far_away(channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """An image, and a pose that moves all of it out of sight."""
    return tiny_images(1, 8, 8, channels=channels) + 1, ht.translate_x().matrix(50.0)[None]


def test_zeros_and_numbers_fill_what_lies_outside():
    image, pose = far_away()
    assert float(ht.warp(image, pose).abs().max()) == 0
    assert_close(ht.warp(image, pose, padding=0.25), torch.full_like(image, 0.25))
    assert_close(ht.warp(image, pose, padding=-3), torch.full_like(image, -3.0))


@pytest.mark.parametrize("colour", [(0.1, 0.5, 0.9), [0.1, 0.5, 0.9]], ids=["tuple", "list"])
def test_a_colour_fills_each_channel_with_its_own_value(colour):
    image, pose = far_away(channels=3)
    filled = ht.warp(image, pose, padding=colour)
    assert_close(filled, torch.tensor([0.1, 0.5, 0.9])[None, :, None, None].expand_as(image))


def test_a_single_colour_serves_all_channels():
    image, pose = far_away(channels=3)
    assert torch.equal(ht.warp(image, pose, padding=0.5), ht.warp(image, pose, padding=(0.5, 0.5, 0.5)))


def test_border_padding_repeats_the_edge():
    image, pose = far_away()
    assert_close(ht.warp(image, pose, padding="border"), image[..., :1].expand_as(image))


@every_interpolation
@settings(max_examples=15)
@given(pose=poses)
def test_an_image_of_one_colour_padded_with_it_stays_so(interpolation, pose):
    image = torch.tensor([0.2, 0.6, 0.9])[None, :, None, None].expand(1, 3, 9, 14)
    for padding in ((0.2, 0.6, 0.9), "border", "reflection", "auto"):
        warped = ht.warp(image, pose[None], padding=padding, interpolation=interpolation)
        assert_close(warped, image, rtol=0, atol=1e-5)


def test_padding_is_in_raw_pixels_so_normalising_afterwards_is_normalising_the_padding_too():
    image, mean, spread = tiny_images(1, 8, 8), 0.4, 0.2
    raw_then_normalised = (ht.warp(image, turn(45)) - mean) / spread
    normalised_then_warped = ht.warp((image - mean) / spread, turn(45), padding=(0 - mean) / spread)
    assert_close(raw_then_normalised, normalised_then_warped, rtol=0, atol=1e-5)
    assert float(raw_then_normalised[0, 0, 0, 0]) == pytest.approx(-2, abs=0.2)  # black, not grey


@settings(max_examples=20)
@given(pose=poses)
def test_nearest_invents_no_value(pose):
    image = torch.arange(99.0).reshape(1, 1, 9, 11) + 1
    values = set(ht.warp(image, pose[None], interpolation="nearest").flatten().tolist())
    assert values <= set(image.flatten().tolist()) | {0.0}
    assert len(values) > 20


@settings(max_examples=20)
@given(pose=poses)
def test_bilinear_stays_between_the_extremes(pose):
    image = tiny_images(1, 9, 13)
    warped = ht.warp(image, pose[None], padding="reflection")
    assert float(warped.min()) >= float(image.min()) - 1e-6
    assert float(warped.max()) <= float(image.max()) + 1e-6


def test_interpolations_differ_where_pixels_are_mixed():
    image = tiny_images(1)
    warped = [ht.warp(image, turn(20), interpolation=kind) for kind in ("bilinear", "nearest", "bicubic")]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert float((warped[first] - warped[second]).abs().max()) > 0.01


# --- padding by the frame ---------------------------------------------------------------------------------------------


def noise(count: int, height: int = 12, width: int = 17, channels: int = 3) -> torch.Tensor:
    """Images without any plain part, as photographs are at their worst; float64."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(count, channels, height, width, generator=generator, dtype=torch.float64)


def framed(images: torch.Tensor, colour: object) -> torch.Tensor:
    """The images with their outermost pixels painted over; a colour is a number, or (C, 1)."""
    images, paint = images.clone(), torch.as_tensor(colour, dtype=images.dtype)
    images[..., 0, :] = images[..., -1, :] = images[..., 0] = images[..., -1] = paint
    return images


def turns(count: int) -> torch.Tensor:
    return ht.rotation().matrix(torch.linspace(0.4, 2.4, count, dtype=torch.float64))


@every_interpolation
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("paint", "padding"), [(0.0, "zeros"), (1.0, 1.0), (0.37, 0.37), (None, "reflection")], ids=str
)
def test_auto_goes_on_with_the_colour_of_the_frame_and_mirrors_where_there_is_no_one_colour(
    paint, padding, channels, interpolation
):
    images = noise(3, channels=channels)
    images = images if paint is None else framed(images, paint)
    auto = ht.warp(images, turns(3), padding="auto", interpolation=interpolation)
    assert torch.equal(auto, ht.warp(images, turns(3), padding=padding, interpolation=interpolation))


def test_auto_knows_a_colour_of_three_channels():
    colour = (0.2, 0.5, 0.9)
    image = framed(noise(1), torch.tensor(colour)[:, None].double())
    assert_close(frame_colour(image)[0], torch.tensor([colour]).double(), rtol=0, atol=1e-7)
    assert_close(ht.warp(image, turns(1), padding="auto"), ht.warp(image, turns(1), padding=colour), rtol=0, atol=1e-6)


def test_the_colour_of_a_frame_is_the_median_of_its_outermost_pixels():
    images = noise(4, 9, 14)
    ring = torch.ones(9, 14, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    colour, flat = frame_colour(images)
    assert torch.equal(colour, images[..., ring].median(dim=-1).values)
    assert not flat.any()


def test_a_quarter_of_the_frame_may_differ_and_no_more():
    images = framed(noise(2, 11, 11), 0.0)  # 40 pixels of frame
    images[0, :, 0, :10] = 1
    images[1, :, 0, :11] = 1
    assert frame_colour(images)[1].tolist() == [True, False]


def test_the_noise_of_jpeg_does_not_spoil_a_flat_frame_and_a_gradient_does():
    wobble = (noise(1) - 0.5) * 0.07
    noisy = 0.5 + wobble
    slope = torch.linspace(0, 1, 17, dtype=torch.float64).expand_as(noisy)
    assert frame_colour(torch.cat([noisy, slope]))[1].tolist() == [True, False]


def test_a_pixel_counts_as_of_the_frame_s_colour_only_if_every_channel_does():
    image = framed(noise(1), 0.5)
    image[:, 2, 0], image[:, 2, -1] = 0.0, 1.0
    assert frame_colour(image)[1].tolist() == [False]
    assert frame_colour(image[:, :2])[1].tolist() == [True]


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (2, 2)], ids=str)
def test_the_smallest_images_have_a_frame_too(size):
    colour, flat = frame_colour(torch.full((1, 1, *size), 0.3))
    assert_close(colour, torch.tensor([[0.3]]))
    assert flat.tolist() == [True]


@every_interpolation
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_under_auto_an_image_does_not_depend_on_its_batch(dtype, interpolation):
    images = noise(5).to(dtype)
    images[1], images[3] = framed(images[1], 0.0), framed(images[3], 0.8)
    options = {"padding": "auto", "interpolation": interpolation}
    together = ht.warp(images, turns(5), **options)
    alone = [ht.warp(images[row : row + 1], turns(5)[row : row + 1], **options) for row in range(5)]
    assert together.dtype == dtype
    assert torch.equal(together, torch.cat(alone))
    everywhere = warp_all(images, turns(4), **options)
    each = [ht.warp(images, pose.expand(5, 3, 3), **options) for pose in turns(4)]
    assert torch.equal(everywhere, torch.stack(each))
    for kind in ([1, 3], [0, 2, 4]):
        assert torch.equal(warp_all(images[kind], turns(4), **options), everywhere[:, kind])


def test_under_auto_one_image_gives_a_view_for_each_pose():
    image = framed(noise(1), 1.0)
    views = ht.warp(image, turns(6), padding="auto")
    assert torch.equal(views, ht.warp(image.expand(6, -1, -1, -1), turns(6), padding=1.0))


def test_gradients_pass_through_auto_in_a_mixed_batch():
    images = noise(2)
    images[0] = framed(images[0], 0.0)
    images.requires_grad_()
    ht.warp(images, turns(2), padding="auto").sum().backward()
    assert torch.equal(images.grad.flatten(1).abs().sum(1) > 0, torch.tensor([True, True]))


class Turning(torch.nn.Module):
    """Turns images by 0.7, as a search within a graph does."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pose = ht.rotation().matrix(torch.tensor(0.7)).expand(images.shape[0], 3, 3)
        return ht.warp(images, pose, padding="auto")


def test_auto_is_the_same_in_an_exported_graph_whatever_the_batch_it_was_exported_with():
    images = noise(5).float()
    images[1], images[3] = framed(images[1], 0.0), framed(images[3], 0.8)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(
        Turning(), (torch.zeros(2, *images.shape[1:]),), dynamic_shapes={"images": {0: batch}}, strict=False
    )
    graph = program.module()
    assert_close(graph(images), Turning()(images), rtol=0, atol=1e-6)
    assert_close(graph(images[:1]), Turning()(images[:1]), rtol=0, atol=1e-6)


def test_auto_is_a_padding_and_other_words_are_not():
    assert checked_padding("auto") == "auto"
    for call in (checked_padding, lambda word: ht.warp(noise(1), turns(1), padding=word)):
        with pytest.raises(ht.OptionError, match="padding must be one of 'auto', 'zeros', 'border', 'reflection'"):
            call("automatic")


# --- batches, dtypes, purity ------------------------------------------------------------------------------------------


def test_every_image_gets_its_own_pose():
    images = tiny_images(3)
    angles = torch.tensor([10.0, 80.0, -45.0]).deg2rad()
    batch = ht.warp(images, ht.rotation().matrix(angles))
    for number in range(3):
        alone = ht.warp(images[number : number + 1], ht.rotation().matrix(angles[number : number + 1]))
        assert_close(batch[number : number + 1], alone, rtol=0, atol=1e-6)


def test_one_image_under_many_poses_gives_one_view_each():
    image, orbit = tiny_images(1, channels=2), ht.rotation().orbit(6)
    views = ht.warp(image, orbit)
    assert views.shape == (6, 2, 12, 12)
    assert_close(views, ht.warp(image.expand(6, -1, -1, -1), orbit))
    assert_close(views[3:4], image, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("pose_dtype", [torch.float32, torch.float64])
def test_the_dtype_of_the_images_is_kept_and_their_precision_used(dtype, pose_dtype):
    image = tiny_images(1).to(dtype)
    warped = ht.warp(image, turn(33).to(pose_dtype))
    assert warped.dtype == dtype
    reference = ht.warp(image.double(), turn(33))
    assert_close(warped.double(), reference, rtol=0, atol={torch.float64: 1e-6}.get(dtype, torch.finfo(dtype).eps * 8))


def test_double_images_with_double_poses_are_resampled_in_double_precision():
    image = tiny_images(1).double()
    assert float((ht.warp(image, turn(33)) - ht.warp(image, turn(33).float())).abs().max()) > 1e-10
    there_and_back = ht.warp(image, turn(90) @ turn(-90))
    assert_close(there_and_back, image, rtol=0, atol=1e-12)


def test_warping_changes_neither_images_nor_poses():
    images, pose = tiny_images(2), turn(30).expand(2, 3, 3).clone()
    before = images.clone(), pose.clone()
    ht.warp(images, pose, padding=0.5)
    assert torch.equal(images, before[0])
    assert torch.equal(pose, before[1])


def test_images_that_are_not_contiguous_are_resampled_alike():
    images = tiny_images(2, 9, 14, channels=3)
    turned = ht.rotation().matrix(torch.tensor([0.3, 0.4]))
    assert_close(ht.warp(images.to(memory_format=torch.channels_last), turned), ht.warp(images, turned))
    assert_close(ht.warp(images[:, :, ::2], turned), ht.warp(images[:, :, ::2].contiguous(), turned))


def test_gradients_reach_images_and_poses():
    """Nothing in the core needs it; a search by gradient, and the baselines that learn a pose, do."""
    images = tiny_images(1).requires_grad_()
    pose = turn(20).float().requires_grad_()
    (ht.warp(images, pose) ** 2).sum().backward()
    assert float(images.grad.abs().sum()) > 0
    assert float(pose.grad[:, :2].abs().sum()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_pixel_that_is_not_finite_is_seen(dtype, bad):
    images = torch.rand(2, 3, 4, 5).to(dtype)
    assert all_finite(images)
    images[1, 2, 3, 0] = bad
    assert not all_finite(images)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection", "auto", 0.5])
def test_cubic_curves_leave_no_pixel_outside_of_the_range_of_its_channel(padding):
    images = (torch.rand(3, 2, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.5).float() * 0.6 + 0.2
    poses = ht.rotation().matrix(torch.tensor([0.3, 1.0, 2.0]))
    for views in (
        ht.warp(images, poses, padding=padding, interpolation="bicubic"),
        warp_all(images, poses, padding=padding, interpolation="bicubic"),
    ):
        low = 0.0 if padding == "zeros" else 0.2
        assert low - 1e-6 <= float(views.min()) < float(views.max()) <= 0.8 + 1e-6
