"""Matrices come apart and together again, and move content where they say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.warp import invert
from tests.toys import exact

EYE = torch.eye(3, dtype=torch.float64)


# --- matrices ---------------------------------------------------------------------------------------------------------

entries = st.floats(-3, 3, allow_nan=False)


@st.composite
def affine(draw):
    """Any affine matrix that is safely invertible, mirrored or not."""
    a, b, c, d, x, y = (draw(entries) for _ in range(6))
    assume(abs(a * d - b * c) > 0.05)
    return torch.tensor([[a, b, x], [c, d, y], [0, 0, 1]], dtype=torch.float64)


@given(matrix=affine())
def test_the_closed_form_inverse_is_the_inverse(matrix):
    assert_close(invert(matrix), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    assert_close(invert(matrix) @ matrix, EYE, rtol=0, atol=1e-9)
    assert torch.equal(invert(matrix)[2], EYE[2])


def test_the_inverse_takes_any_leading_shape_and_keeps_the_dtype():
    poses = ht.rotation().matrix(torch.linspace(-1, 1, 6)).reshape(2, 3, 3, 3)
    assert invert(poses).shape == (2, 3, 3, 3)
    assert invert(poses).dtype == torch.float32
    assert_close(invert(poses), poses.transpose(-1, -2))


def test_compose_does_the_first_argument_first():
    first, second, third = ht.rotation().matrix(0.3), ht.scale().matrix(0.2), ht.translate_x().matrix(0.5)
    assert torch.equal(ht.compose(first), first)
    assert_close(ht.compose(first, second, third), third @ second @ first)
    # Turn, then shift: the shift is untouched by the turn.
    assert_close(ht.compose(first, third)[:2, 2], torch.tensor([0.5, 0.0]))


@given(matrix=affine())
@example(matrix=torch.diag(torch.tensor([-1.0, 1, 1], dtype=torch.float64)))
@example(matrix=torch.diag(torch.tensor([1.0, -1, 1], dtype=torch.float64)))
@example(matrix=torch.diag(torch.tensor([-1.0, -1, 1], dtype=torch.float64)))
@example(matrix=torch.tensor([[0, 2.0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64))
def test_any_invertible_matrix_comes_apart_and_together_again(matrix):
    parts = ht.decompose(matrix)
    assert_close(parts.matrix(), matrix, rtol=1e-9, atol=1e-9)
    assert bool(parts.reflection) == (float(torch.linalg.det(matrix)) < 0)
    assert float(parts.scale) > 0
    assert float(parts.stretch) > 0
    assert abs(float(parts.rotation)) <= math.pi


@given(
    turn=st.floats(-3.1, 3.1),
    mirrored=st.booleans(),
    size=st.floats(0.3, 3),
    stretch=st.floats(0.4, 2.5),
    slant=st.floats(-2, 2),
    shift=st.tuples(entries, entries),
)
def test_decomposition_finds_the_parts_a_matrix_was_made_from(turn, mirrored, size, stretch, slant, shift):
    made = ht.compose(
        ht.shear_x().matrix(exact(slant)),
        torch.diag(torch.tensor([stretch, 1 / stretch, 1], dtype=torch.float64)),
        ht.scale().matrix(exact(math.log(size))),
        ht.reflection().matrix(exact(float(mirrored))),
        ht.rotation().matrix(exact(turn)),
        ht.translate_x().matrix(exact(shift[0])),
        ht.translate_y().matrix(exact(shift[1])),
    )
    parts = ht.decompose(made)
    assert bool(parts.reflection) == mirrored
    found = [parts.rotation, parts.scale, parts.stretch, parts.shear, *parts.translation]
    assert_close(
        torch.stack(found),
        torch.tensor([turn, size, stretch, slant, *shift], dtype=torch.float64),
        rtol=1e-8,
        atol=1e-8,
    )


def test_half_a_turn_is_plus_pi_whatever_the_sign_of_zero():
    """`Decomposition.rotation` is documented to lie in (−π, π]."""
    parts = ht.decompose(ht.reflection().matrix(torch.arange(4.0)))
    assert parts.rotation.tolist() == pytest.approx([0, 0, math.pi, math.pi])


def test_decomposition_takes_any_leading_shape_and_keeps_the_dtype():
    matrices = ht.rotation().matrix(torch.linspace(-3, 3, 6)).reshape(2, 3, 3, 3)
    parts = ht.decompose(matrices)
    assert parts.translation.shape == (2, 3, 2)
    assert_close(parts.rotation, torch.linspace(-3, 3, 6).reshape(2, 3))
    assert parts.matrix().dtype == torch.float32
    assert_close(parts.matrix(), matrices)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.eye(3), "upright"),
        (ht.rotation().matrix(math.radians(-42.4)), "turned by −42.4°"),
        (ht.rotation().matrix(math.radians(0.04)), "upright"),
        (ht.scale().matrix(math.log(0.91)), "scale 0.91"),
        (ht.shear_x().matrix(-0.2), "shear −0.20"),
        (ht.translate(1, math.pi / 2).matrix(0.5), "shift (+0.00, +0.50)"),
        (ht.reflection().matrix(1), "mirrored"),
        (ht.reflection().matrix(3), "turned by +180.0°"),
        (torch.diag(torch.tensor([2.0, 0.5, 1])), "stretch 2.00"),
        (ht.compose(ht.scale().matrix(0.5), ht.rotation().matrix(1.0)), "turned by +57.3°, scale 1.65"),
        (
            ht.compose(
                ht.shear_x().matrix(0.1),
                ht.reflection().matrix(1),
                ht.rotation().matrix(0.5),
                ht.translate_x().matrix(-0.3),
            ),
            "turned by +28.6°, mirrored, shear +0.10, shift (−0.30, +0.00)",
        ),
    ],
)
def test_a_matrix_is_described_in_words(matrix, words):
    assert ht.decompose(matrix.double()).describe() == words


def test_one_matrix_of_a_batch_is_described_by_its_index():
    parts = ht.decompose(ht.rotation().matrix(torch.tensor([[0.0, 0.5], [1.0, 1.5]])))
    assert parts.describe((1, 0)) == "turned by +57.3°"
    assert ht.decompose(ht.scale().matrix(torch.tensor([0.0, 0.5]))).describe(1) == "scale 1.65"


# --- directions, pinned on real pixels --------------------------------------------------------------------------------


def moved(group, t, row, column, size=7):
    """Where a single bright pixel goes, as (row, column)."""
    image = torch.zeros(1, 1, size, size)
    image[0, 0, row, column] = 1
    found = ht.warp(image, group.matrix(exact(t))[None])[0, 0]
    return divmod(int(found.argmax()), size)


def test_a_positive_rotation_turns_the_content_clockwise():
    assert moved(ht.rotation(), math.pi / 2, 0, 3) == (3, 6)  # the top goes to the right
    assert moved(ht.rotation(), math.pi / 2, 3, 6) == (6, 3)  # the right goes to the bottom
    assert moved(ht.rotation(), -math.pi / 2, 0, 3) == (3, 0)


def test_positive_shifts_go_right_and_down():
    pixel = 2 / 7
    assert moved(ht.translate_x(), 2 * pixel, 3, 3) == (3, 5)
    assert moved(ht.translate_y(), 2 * pixel, 3, 3) == (5, 3)
    assert moved(ht.translate(0.5, math.pi / 4), 2 * math.sqrt(2) * pixel, 3, 3) == (5, 5)


def test_positive_shears_move_the_lower_half_right_and_the_right_half_down():
    assert moved(ht.shear_x(), 1.0, 5, 3) == (5, 5)
    assert moved(ht.shear_x(), 1.0, 1, 3) == (1, 1)
    assert moved(ht.shear_y(), 1.0, 3, 5) == (5, 5)
    assert moved(ht.shear_y(), 1.0, 3, 1) == (1, 1)


def test_a_positive_scale_parameter_enlarges_about_the_centre():
    assert moved(ht.scale(), math.log(3), 3, 4) == (3, 6)
    assert moved(ht.scale(), math.log(3), 3, 3) == (3, 3)


@pytest.mark.parametrize(("index", "axes"), [(0, []), (1, [-1]), (2, [-2]), (3, [-1, -2])])
def test_reflections_swap_left_and_right_or_top_and_bottom(index, axes):
    image = torch.arange(35.0).reshape(1, 1, 5, 7)
    assert_close(ht.warp(image, ht.reflection().orbit()[index][None]), image.flip(axes), rtol=0, atol=1e-4)
