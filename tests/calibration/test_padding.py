"""The padding that is chosen is the one that disturbs the model least, and "auto" where that makes no difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headtilt as ht
from headtilt.calibration.padding import AT_ONCE, choose_padding
from headtilt.errors import ShapeError

SIDE = 24
TURNS = ht.rotation().matrix(torch.linspace(0.5, 1.1, 24))
SHIFTS = ht.translate_x().matrix(torch.linspace(0.5, 0.7, 24))


def corners(images: Tensor) -> Tensor:
    """Two classes: whether the corners on the right are bright or dark."""
    light = torch.stack([images[..., 1:5, -5:-1], images[..., -5:-1, -5:-1]]).mean((0, 2, 3, 4))
    return torch.stack([12 * light, 12 - 12 * light], dim=1)


def scenes(count: int, side: int = SIDE) -> Tensor:
    """Bright images without a plain part, (count, 1, side, side)."""
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(1)) * 0.4 + 0.6


def lined(count: int) -> Tensor:
    """The scenes with a black line for a frame."""
    images = scenes(count)
    images[..., 0, :] = images[..., -1, :] = images[..., 0] = images[..., -1] = 0
    return images


def crosses(count: int, arm: int) -> Tensor:
    """A bright cross from side to side on black, its arms of a width."""
    images, start = torch.zeros(count, 1, SIDE, SIDE), (SIDE - arm) // 2
    images[..., start : start + arm] = scenes(count)[..., start : start + arm]
    images[..., start : start + arm, :] = scenes(count)[..., start : start + arm, :]
    return images


def test_a_model_that_dark_corners_disturb_is_spared_them():
    chosen, scores = choose_padding(corners, scenes(24), TURNS)
    assert scores["zeros"] > 0.3
    assert scores["reflection"] < 0.1
    assert scores["auto"] == scores["reflection"]
    assert chosen == "auto"


def test_where_a_thin_dark_line_frames_bright_scenes_reflection_wins():
    """The line is flat, so that auto goes on in black; the model misses the light that reflection brings back."""
    chosen, scores = choose_padding(corners, lined(24), SHIFTS)
    assert chosen == "reflection"
    assert scores["reflection"] < scores["auto"] - 0.1
    assert scores["auto"] == scores["zeros"]


def test_on_a_black_ground_auto_is_as_good_as_zeros_and_chosen():
    chosen, scores = choose_padding(corners, crosses(24, 4), SHIFTS)
    assert scores["auto"] == scores["zeros"]
    assert scores["zeros"] < scores["reflection"] - 0.05
    assert chosen == "auto"


def test_zeros_win_on_a_black_ground_that_the_frame_does_not_show():
    """The arms take more than a quarter of the frame, so that auto mirrors them into the corners."""
    chosen, scores = choose_padding(corners, crosses(24, 10), SHIFTS)
    assert chosen == "zeros"
    assert scores["zeros"] < scores["auto"] - 0.05


def test_a_gain_that_may_be_chance_does_not_count():
    """Of many images one gains a lot from reflection and the others nothing: the mean is above the tolerance."""
    images = crosses(24, 4)
    images[0] = lined(1)[0]
    blind = torch.zeros(2).expand

    def ask(views: Tensor) -> Tensor:
        bright = views.mean((1, 2, 3)) > 0.5
        return torch.where(bright[:, None], corners(views), blind(len(views), 2))

    chosen, scores = choose_padding(ask, images, SHIFTS)
    assert scores["reflection"] < scores["auto"] - 0.002
    assert chosen == "auto"


def test_a_score_is_the_mean_total_variation_between_the_answers():
    """Worked out one image at a time, for both tilts of each image."""
    images, tilts = scenes(3), TURNS[:6]
    expected = []
    for number, tilt in enumerate(tilts):
        image = images[number % 3][None]
        undone = ht.warp(ht.warp(image, tilt[None], padding="reflection"), tilt.inverse()[None], padding="border")
        sure, then = (corners(view).softmax(1)[0] for view in (image, undone))
        expected.append(float((sure - then).abs().sum() / 2))
    scores = choose_padding(corners, images, tilts)[1]
    assert scores["border"] == pytest.approx(sum(expected) / 6, abs=1e-5)


def test_a_crop_is_what_the_model_sees_and_the_image_around_it_is_what_a_tilt_brings_in():
    """A scene in the dark, made smaller and moved to the right: the dark comes in, and auto takes it for the ground."""
    images = torch.zeros(4, 1, 80, 80)
    images[..., 28:-28, 28:-28] = scenes(4)
    tilt = ht.compose(ht.scale().matrix(torch.tensor(0.6).log()), ht.translate_x().matrix(torch.tensor(0.7)))
    tilts = tilt.expand(4, 3, 3)
    around = choose_padding(corners, images, tilts, crop=SIDE)[1]
    alone = choose_padding(corners, scenes(4), tilts)[1]
    assert around["auto"] == pytest.approx(around["zeros"], abs=1e-3)
    assert around["zeros"] > 0.3
    assert around["border"] < 0.1
    assert alone["auto"] == alone["reflection"] < 0.1


def test_a_tilt_is_measured_in_what_the_model_sees_so_that_a_shift_is_undone_whatever_lies_around():
    seen: list[Tensor] = []

    def ask(views: Tensor) -> Tensor:
        seen.append(views)
        return corners(views)

    shift = ht.translate_x().matrix(torch.tensor(0.5)).expand(2, 3, 3)  # by 6 of 24 pixels
    choose_padding(ask, scenes(2, 40), shift, crop=24)
    assert len(seen) == 5
    for view in seen[1:]:
        torch.testing.assert_close(view[..., :-6], seen[0][..., :-6], rtol=0, atol=1e-5)
        assert float((view[..., -6:] - seen[0][..., -6:]).abs().mean()) > 0.05


def test_a_single_logit_is_an_answer_too():
    scores = choose_padding(lambda views: corners(views)[:, :1] - 6, scenes(24), TURNS)[1]
    assert scores["zeros"] > scores["reflection"] + 0.2


def test_images_are_shown_in_small_parts_and_the_parts_change_nothing(monkeypatch):
    images, tilts = scenes(70), TURNS[:14].repeat(10, 1, 1)
    sizes: list[int] = []

    def ask(views: Tensor) -> Tensor:
        sizes.append(len(views))
        return corners(views)

    whole = choose_padding(ask, images, tilts)
    assert max(sizes) == AT_ONCE
    assert sum(sizes) == 140 * 5
    monkeypatch.setattr("headtilt.calibration.padding.AT_ONCE", 9)
    parts = choose_padding(corners, images, tilts)
    assert parts[0] == whole[0]
    assert parts[1] == pytest.approx(whole[1], abs=1e-6)


def test_the_choice_is_the_same_every_time_and_draws_nothing():
    state = torch.get_rng_state()
    first, second = (choose_padding(corners, scenes(24), TURNS) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


def test_a_single_image_is_no_evidence_against_auto():
    chosen, scores = choose_padding(corners, lined(1), SHIFTS)
    assert scores["reflection"] < scores["auto"] - 0.1
    assert chosen == "auto"


@pytest.mark.parametrize("count", [0, 5])
def test_tilts_must_be_as_many_as_images_or_a_multiple(count):
    with pytest.raises(ShapeError, match=r"tilts must be \(3, 3, 3\), or a multiple of as many"):
        choose_padding(corners, scenes(3), TURNS[:count])
