"""Continuous piecewise-affine flows and the diffeomorphic transformer."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headtilt.paper.baselines.dtn import CPAB, DTN, affine_fit, field_basis, triangles
from headtilt.sources.zoo.cnn import SmallCNN

seeds = st.integers(0, 2**31 - 1)


def random_points(count: int, seed: int = 0) -> Tensor:
    return 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def random_theta(field: CPAB, seed: int, size: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * (2 * torch.rand(2, field.dimension, generator=generator, dtype=torch.float64) - 1)


def edge_jump(maps: Tensor, cells: int) -> float:
    """Return the largest difference between the maps (T, 2, 3) of two triangles along an edge that they share."""
    corners = triangles(cells).double() / cells - 1
    worst = 0.0
    for one, other in combinations(range(len(corners)), 2):
        shared = [vertex for vertex in corners[one].tolist() if vertex in corners[other].tolist()]
        if len(shared) == 2:
            first, second = torch.tensor(shared, dtype=torch.float64)
            for share in (0.0, 0.3, 1.0):
                point = torch.cat([first + share * (second - first), torch.ones(1, dtype=torch.float64)])
                worst = max(worst, float(((maps[one] - maps[other]) @ point).abs().max()))
    return worst


@pytest.mark.parametrize("cells", [1, 2, 3, 4])
def test_the_space_has_one_velocity_per_vertex_less_what_would_leave_the_square(cells: int) -> None:
    vertices = (cells + 1) ** 2 + cells**2
    outward = 4 * 2 + 4 * (cells - 1)  # two components at each corner, one at every other vertex of the boundary
    assert len(field_basis(cells)) == 2 * vertices - outward


def test_the_basis_is_orthonormal() -> None:
    basis = field_basis(3).flatten(1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64))


@pytest.mark.parametrize("cells", [1, 2, 3])
def test_every_field_of_the_basis_is_continuous_across_edges(cells: int) -> None:
    basis = field_basis(cells)
    assert max(edge_jump(maps, cells) for maps in basis) < 1e-12


def test_affine_maps_drawn_at_random_are_not_continuous_across_edges() -> None:
    maps = torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert edge_jump(maps, 2) > 0.1


@settings(max_examples=20)
@given(seed=seeds, cells=st.integers(1, 4))
def test_velocities_a_hair_apart_are_a_hair_apart(seed: int, cells: int) -> None:
    field = CPAB(cells).double()
    theta = random_theta(field, seed, 1.0)
    # Points on the edges of the cells and on their diagonals, seen from both sides.
    along = random_points(50, seed)[:, 0]
    line = torch.full_like(along, 2 / cells - 1)
    points = torch.cat([torch.stack([line, along], 1), torch.stack([along, line], 1), torch.stack([along, along], 1)])
    hair = torch.tensor([1e-7, -1e-7], dtype=torch.float64)
    jump = field.velocity(points + hair, theta) - field.velocity(points - hair, theta)
    assert jump.abs().max() < 1e-4
    assert field.velocity(points, theta).abs().max() > 0.01


@settings(max_examples=15)
@given(seed=seeds)
def test_flowing_along_theta_and_then_against_it_comes_back(seed: int) -> None:
    field = CPAB(3, steps=64).double()
    theta, points = random_theta(field, seed), random_points(200, seed)
    moved = field.flow(points, theta)
    assert (moved - points).abs().max() > 0.05
    assert (field.flow(moved, -theta) - points).abs().max() < 2e-3


def test_shorter_steps_bring_the_way_back_nearer_to_the_start() -> None:
    points = random_points(200)
    errors = []
    for steps in (8, 64, 512):
        field = CPAB(3, steps=steps).double()
        theta = random_theta(field, 3)
        errors.append(float((field.flow(field.flow(points, theta), -theta) - points).abs().max()))
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


def test_the_flow_solves_the_differential_equation() -> None:
    field = CPAB(3).double()
    theta, points = random_theta(field, 5), random_points(300)
    solution, count = points.expand(2, -1, -1), 1000
    for _ in range(count):
        half = solution + field.velocity(solution, theta) / (2 * count)
        solution = solution + field.velocity(half, theta) / count
    assert (solution - points).abs().max() > 0.1
    assert (field.flow(points, theta) - solution).abs().max() < 5e-3


def test_half_a_flow_done_twice_is_the_whole_flow() -> None:
    field = CPAB(2, steps=8).double()
    theta, points = random_theta(field, 2), random_points(100)
    twice = field.flow(field.flow(points, theta / 2), theta / 2)
    assert (twice - CPAB(2, steps=16).double().flow(points, theta)).abs().max() < 1e-12


@settings(max_examples=15)
@given(seed=seeds)
def test_the_boundary_of_the_square_flows_along_itself(seed: int) -> None:
    field = CPAB(3).double()
    theta, along = random_theta(field, seed, 1.0), random_points(60, seed)[:, 0]
    one = torch.ones_like(along)
    for axis, side in ((0, -one), (0, one), (1, -one), (1, one)):
        points = torch.stack([side, along] if axis == 0 else [along, side], dim=1)
        moved = field.flow(points, theta)
        torch.testing.assert_close(moved[..., axis], points[:, axis].expand(2, -1))
        assert (moved[..., 1 - axis] - along).abs().max() > 0.01
    corners = torch.tensor([[-1.0, -1], [-1, 1], [1, -1], [1, 1]], dtype=torch.float64)
    torch.testing.assert_close(field.flow(corners, theta), corners.expand(2, 4, 2))


def test_the_flow_never_folds_the_square() -> None:
    field = CPAB(3).double()
    theta = random_theta(field, 7, 1.0)
    line = torch.linspace(-1, 1, 60, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)
    moved = field.flow(grid.flatten(0, 1), theta).unflatten(1, (60, 60))
    right, down = moved[:, :-1, 1:] - moved[:, :-1, :-1], moved[:, 1:, :-1] - moved[:, :-1, :-1]
    assert (right[..., 0] * down[..., 1] - right[..., 1] * down[..., 0]).min() > 0


def test_each_triangle_is_found_from_its_own_centre() -> None:
    centres = (triangles(4).double() / 4 - 1).mean(1)
    assert CPAB(4).cell(centres).tolist() == list(range(64))


def test_an_affine_fit_of_an_affine_map_is_that_map() -> None:
    matrix = torch.tensor([[1.2, -0.3, 0.1], [0.4, 0.8, -0.2], [0.0, 0.0, 1.0]], dtype=torch.float64)
    points = random_points(50)
    moved = points @ matrix[:2, :2].T + matrix[:2, 2]
    torch.testing.assert_close(affine_fit(points, moved[None]), matrix[None])


def test_a_fresh_transformer_is_the_identity() -> None:
    torch.manual_seed(0)
    backbone = SmallCNN(9)
    model, images = DTN(backbone).eval(), torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(model.pose(images), torch.eye(3).expand(2, 3, 3))
    torch.testing.assert_close(model.canonical(images), images)
    torch.testing.assert_close(model(images), backbone(images))


def test_content_moves_with_the_flow_and_its_pose() -> None:
    torch.manual_seed(1)
    model = DTN(SmallCNN(9), cells=1)
    nn.init.normal_(model.localise.regress.bias, std=0.5)
    line = (2 * torch.arange(28) + 1) / 28 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    spot = torch.tensor([[0.15, -0.1]])
    images = torch.exp(-((x - spot[0, 0]) ** 2 + (y - spot[0, 1]) ** 2) / 0.005)[None, None]
    moved = model.canonical(images)[0, 0]
    centre = torch.stack([(moved * x).sum(), (moved * y).sum()]) / moved.sum()
    expected = model.field.flow(spot, model.theta(images))[0, 0]
    assert (expected - spot[0]).norm() > 0.1
    assert (centre - expected).norm() < 0.02
    # One cell has one inner vertex: its flow pushes the middle one way, and so must the affine fit.
    pose = model.pose(images)[0]
    assert torch.dot(pose[:2, 2], expected - spot[0]) > 0


def test_coefficients_stay_within_their_bound() -> None:
    model = DTN(SmallCNN(9), bound=0.7)
    nn.init.constant_(model.localise.regress.bias, 50.0)
    assert model.theta(torch.rand(1, 1, 28, 28)).tolist()[0] == pytest.approx([0.7] * model.field.dimension)
