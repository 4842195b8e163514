"""The equivariant transformer and its canonical coordinates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from headtilt.errors import ShapeError
from headtilt.geometry.groups import decompose, rotation, scale, shear_x
from headtilt.geometry.warp import warp
from headtilt.paper.baselines.etn import ETN, Marker, log_polar_points, read, shear_points
from headtilt.sources.zoo.cnn import SmallCNN

BIN = 2 * math.pi / 64


def blobs(count: int = 6, *, spread: float = 0.4) -> Tensor:
    """Return smooth images (count, 1, 28, 28) of three blobs each, away from the border, without symmetry."""
    generator = torch.Generator().manual_seed(3)
    centre = spread * (2 * torch.rand(count, 3, 2, 1, 1, generator=generator) - 1)
    height = torch.rand(count, 3, 1, 1, generator=generator) + 0.5
    line = (2 * torch.arange(28) + 1) / 28 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    distance = (x - centre[:, :, 0]) ** 2 + (y - centre[:, :, 1]) ** 2
    return (height * torch.exp(-distance / 0.06)).sum(1, keepdim=True)


def gap(one: Tensor, other: Tensor) -> float:
    """Return how far two tensors are apart, against their size."""
    return float((one - other).norm() / other.norm())


@pytest.fixture
def model() -> ETN:
    torch.manual_seed(0)
    return ETN(SmallCNN(9)).eval()


def turned(images: Tensor, angle: float) -> tuple[Tensor, Tensor]:
    """Return the images turned clockwise by an angle, and the matrix that did it."""
    matrix = rotation().matrix(torch.tensor(angle))
    return warp(images, matrix.expand(len(images), 3, 3)), matrix


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_a_quarter_turn_of_the_image_turns_the_pose_back_exactly(model: ETN, quarters: int) -> None:
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(5))
    turn = rotation().matrix(torch.tensor(-quarters * math.pi / 2))  # rot90 goes anticlockwise
    pose = model.pose(torch.rot90(images, quarters, dims=(-2, -1)))
    assert (pose @ turn - model.pose(images)).abs().max() < 2e-4
    torch.testing.assert_close(model(torch.rot90(images, quarters, dims=(-2, -1))), model(images), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bins", [1, 5, 8, 23, -11])
def test_the_pose_shifts_by_the_rotation_applied(model: ETN, bins: int) -> None:
    images = blobs()
    moved, _ = turned(images, bins * BIN)
    before, after = decompose(model.pose(images)), decompose(model.pose(moved))
    error = after.rotation + bins * BIN - before.rotation
    assert torch.atan2(error.sin(), error.cos()).abs().max() < math.radians(2)
    torch.testing.assert_close(after.scale, before.scale, atol=0.01, rtol=0)


def test_a_pose_that_ignores_the_image_fails_the_same_test() -> None:
    pose = torch.eye(3).expand(6, 3, 3)
    error = decompose(pose).rotation + 8 * BIN - decompose(pose).rotation
    assert error.abs().min() > math.radians(2)


@torch.no_grad()
def test_the_canonical_form_does_not_depend_on_how_the_image_was_turned(model: ETN) -> None:
    images = blobs()
    canonical = model.canonical(images)
    for angle in (0.4, 1.9, -2.6):
        moved, _ = turned(images, angle)
        assert gap(model.canonical(moved), canonical) < 0.08
    assert gap(turned(canonical, 0.4)[0], canonical) > 0.3


def test_cut_open_at_0_degrees_it_is_equivariant_no_more(model: ETN) -> None:
    cut = ETN(SmallCNN(9), wraps=False).eval()
    cut.load_state_dict(model.state_dict())
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(5))
    turn = rotation().matrix(torch.tensor(-math.pi / 2))
    with torch.no_grad():
        pose = cut.pose(torch.rot90(images, 1, dims=(-2, -1)))
        assert (pose @ turn - cut.pose(images)).abs().max() > 1e-2


def test_rotation_is_a_circular_shift_of_the_log_polar_map() -> None:
    images = blobs()
    points = log_polar_points().expand(len(images), -1, -1, -1)
    moved, _ = turned(images, 7 * BIN)
    assert gap(read(moved, points), read(images, points).roll(7, dims=-1)) < 0.04
    assert gap(read(moved, points), read(images, points)) > 0.5


def test_scale_is_a_shift_of_the_log_polar_map_along_the_radius() -> None:
    images = blobs()
    points = log_polar_points().expand(len(images), -1, -1, -1)
    step = float((points[0, 1, 0, 0] / points[0, 0, 0, 0]).log())
    grown = warp(images, scale(0.5).matrix(torch.tensor(4 * step)).expand(len(images), 3, 3))
    assert gap(read(grown, points)[:, :, 4:], read(images, points)[:, :, :-4]) < 0.04
    assert gap(read(grown, points), read(images, points)) > 0.3


def test_shear_is_a_shift_of_the_shear_map() -> None:
    images = blobs()
    points = shear_points().expand(len(images), -1, -1, -1)
    step = 2 / 31
    slanted = warp(images, shear_x(0.5).matrix(torch.tensor(4 * step)).expand(len(images), 3, 3))
    assert gap(read(slanted, points)[..., 4:], read(images, points)[..., :-4]) < 0.04
    assert gap(read(slanted, points), read(images, points)) > 0.2


def test_marks_on_a_circular_map_turn_with_it_and_are_distributions() -> None:
    torch.manual_seed(0)
    marker, maps = Marker(2, 3, circular=True), torch.rand(2, 2, 32, 64)
    marks = marker(maps)
    torch.testing.assert_close(marker(maps.roll(9, dims=-1)), marks.roll(9, dims=-1))
    torch.testing.assert_close(marks.sum((2, 3)), torch.ones(2, 3))
    flat = Marker(2, 3, circular=False)
    flat.load_state_dict(marker.state_dict())
    assert (flat(maps.roll(9, dims=-1)) - flat(maps).roll(9, dims=-1)).abs().max() > 1e-5


class Copy(nn.Module):
    """Marks the brightest place of a map."""

    def forward(self, maps: Tensor) -> Tensor:
        return (200 * maps).flatten(2).softmax(2).unflatten(2, maps.shape[2:]).expand(-1, 2, -1, -1)


@torch.no_grad()
def test_marks_on_the_brightest_place_give_its_angle_scale_and_shear(model: ETN) -> None:
    model.mark_polar = model.mark_shear = Copy()
    line = (2 * torch.arange(28) + 1) / 28 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    angle, radius = 2.2, 0.45
    spot = torch.exp(-((x - radius * math.cos(angle)) ** 2 + (y - radius * math.sin(angle)) ** 2) / 0.02)
    similar = decompose(model._undo_rotation_and_scale(spot[None, None])[0])
    assert float(similar.rotation) == pytest.approx(-angle, abs=0.06)
    assert float(similar.scale) == pytest.approx(math.exp(float(model.log_radius)) / radius, rel=0.05)
    below = torch.exp(-((x - 0.2) ** 2 + (y - 0.5) ** 2) / 0.02)
    shear = model._undo_shear(below[None, None], torch.eye(3)[None])[0]
    assert shear.flatten().tolist() == pytest.approx([1, -0.2 / 0.5, 0, 0, 1, 0, 0, 0, 1], abs=0.05)
    # After a first pose the shear is that of the moved image: half a turn leaves it, a mirrored image flips its sign.
    half_turn, mirror = torch.diag(torch.tensor([-1.0, -1, 1])), torch.diag(torch.tensor([-1.0, 1, 1]))
    assert float(model._undo_shear(below[None, None], half_turn[None])[0, 0, 1]) == pytest.approx(-0.4, abs=0.05)
    assert float(model._undo_shear(below[None, None], mirror[None])[0, 0, 1]) == pytest.approx(0.4, abs=0.05)


def test_images_of_another_size_are_refused(model: ETN) -> None:
    with pytest.raises(ShapeError, match=r"must be \(B, 1, 28, 28\)"):
        model(torch.rand(1, 1, 32, 32))
