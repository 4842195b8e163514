"""Decomposed filters on eight rotations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from headtilt.errors import OptionError
from headtilt.geometry.groups import rotation
from headtilt.geometry.warp import warp
from headtilt.paper.baselines.rotdcf import (
    DCFGroupConv,
    DCFLift,
    RotDCF,
    bessel,
    bessel_zeros,
    circle_basis,
    frequencies,
    plane_basis,
)
from headtilt.sources.zoo.cnn import SmallCNN


def turn(images: Tensor, quarters: int) -> Tensor:
    return torch.rot90(images, quarters, dims=(-2, -1))


def eighth_turn(images: Tensor) -> Tensor:
    """Return the images turned anticlockwise by 45°."""
    return warp(images, rotation().matrix(torch.tensor(-math.pi / 4)).expand(len(images), 3, 3))


def blobs(count: int = 16) -> Tensor:
    """Return smooth images (count, 1, 28, 28) of four blobs each, inside the circle that every turn keeps."""
    generator = torch.Generator().manual_seed(3)
    centre = 0.45 * (2 * torch.rand(count, 4, 2, 1, 1, generator=generator) - 1)
    line = (2 * torch.arange(28) + 1) / 28 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    distance = (x - centre[:, :, 0]) ** 2 + (y - centre[:, :, 1]) ** 2
    return torch.exp(-distance / 0.04).sum(1, keepdim=True)


def relative_change(model: nn.Module, images: Tensor, moved: Tensor) -> float:
    """Return how far logits move with the images, against how far they differ between images."""
    before, after = model(images), model(moved)
    return float((after - before).norm() / (before - before.mean(0)).norm())


def test_bessel_functions_and_their_zeros_have_the_tabulated_values() -> None:
    x = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    assert bessel(0, x).tolist() == pytest.approx([1.0, 0.7651976866, -0.1775967713], abs=1e-10)
    assert bessel(3, x).tolist() == pytest.approx([0.0, 0.0195633540, 0.3648312306], abs=1e-10)
    assert bessel_zeros(0)[:2] == pytest.approx([2.4048255577, 5.5200781103], abs=1e-9)
    assert bessel_zeros(2)[:2] == pytest.approx([5.1356223018, 8.4172441404], abs=1e-9)
    assert bessel_zeros(7) == pytest.approx([11.0863700192], abs=1e-9)
    assert bessel_zeros(8) == []  # the first lies beyond the limit


def test_frequencies_come_lowest_first_and_keep_pairs_whole() -> None:
    assert [order for order, _ in frequencies(14)] == [0, 1, 2, 0, 3, 1, 4, 2]
    with pytest.raises(OptionError, match=r"\[1, 3, 5\] do; got 4"):
        frequencies(4)
    with pytest.raises(OptionError, match="harmonics must be 1, 3, 5 or 7"):
        circle_basis(4)


@pytest.mark.parametrize("kernel", [3, 4, 5])
def test_a_phase_shift_of_a_quarter_is_a_quarter_turn_of_the_sampled_basis(kernel: int) -> None:
    plane = plane_basis(kernel, 8)
    for r in range(8):
        torch.testing.assert_close(plane[(r + 2) % 8], turn(plane[r], 1), atol=1e-12, rtol=0)
    assert (plane[1] - plane[0]).abs().max() > 0.05


def test_a_phase_shift_mixes_the_functions_of_an_order_and_no_others() -> None:
    plane = plane_basis(5, 8)
    angle = math.pi / 4
    position = 0
    for order, _ in frequencies(8):
        if order == 0:
            torch.testing.assert_close(plane[1, position], plane[0, position])
            position += 1
            continue
        cosine, sine = plane[0, position], plane[0, position + 1]
        mixed = math.cos(order * angle) * cosine + math.sin(order * angle) * sine
        torch.testing.assert_close(plane[1, position], mixed)
        position += 2


def test_pairs_of_the_basis_have_norm_one_on_average() -> None:
    norms = plane_basis(5, 5)[0].square().sum((1, 2))
    assert float(norms[0]) == pytest.approx(1)
    assert float(norms[1]) == pytest.approx(1)
    assert float(norms[3] + norms[4]) / 2 == pytest.approx(1)


def test_the_rotations_see_one_orthonormal_series_each_from_its_own_place() -> None:
    circle = circle_basis(7)
    for r in range(8):
        torch.testing.assert_close(circle[r], circle[0].roll(r, dims=-1))
    torch.testing.assert_close(circle[0] @ circle[0].T, torch.eye(7, dtype=torch.float64))


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_both_layers_are_exactly_equivariant_under_quarter_turns(quarters: int) -> None:
    torch.manual_seed(0)
    lift, convolve = DCFLift(2, 3, 5), DCFGroupConv(3, 2, 3, terms=5)
    nn.init.normal_(lift.bias)
    images = torch.rand(2, 2, 12, 12)
    features = lift(images)
    moved = lift(turn(images, quarters))
    torch.testing.assert_close(moved, turn(features, quarters).roll(2 * quarters, dims=2), atol=1e-5, rtol=0)
    expected = turn(convolve(features), quarters).roll(2 * quarters, dims=2)
    torch.testing.assert_close(convolve(moved), expected, atol=1e-5, rtol=0)
    assert features.std(dim=2).max() > 0.1


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_the_network_is_exactly_equivariant_and_invariant_under_quarter_turns(quarters: int) -> None:
    torch.manual_seed(0)
    model, images = RotDCF(9).eval(), torch.rand(3, 1, 28, 28)
    expected = turn(model.features(images), quarters).roll(2 * quarters, dims=2)
    torch.testing.assert_close(model.features(turn(images, quarters)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(turn(images, quarters)), model(images), atol=1e-5, rtol=0)
    assert (model.features(images) - expected).abs().max() > 0.01


@torch.no_grad()
def test_feature_maps_of_an_eighth_turn_move_one_place_along_the_rotation_axis() -> None:
    torch.manual_seed(0)
    model, images = RotDCF(9).eval(), blobs()
    features = model.maps[:2](images)
    inside = slice(4, 20)
    moved = model.maps[:2](eighth_turn(images))[..., inside, inside]
    turned = eighth_turn(features.flatten(1, 2)).unflatten(1, (4, 8))[..., inside, inside]
    error, without = (float((moved - turned.roll(shift, dims=2)).norm() / moved.norm()) for shift in (1, 0))
    assert error < 0.15
    assert without > 3 * error


@torch.no_grad()
def test_logits_barely_change_under_an_eighth_turn_where_those_of_a_plain_network_do() -> None:
    images = blobs()
    changes = []
    for seed in range(3):
        torch.manual_seed(seed)
        models = RotDCF(9).eval(), SmallCNN(9).eval()
        changes.append([relative_change(model, images, eighth_turn(images)) for model in models])
    equivariant, plain = torch.tensor(changes).mean(0).tolist()
    assert equivariant < 0.4
    assert plain > 3 * equivariant
