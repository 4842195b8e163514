"""The diffeomorphic transformer (Detlefsen et al. 2018) with the piecewise-affine flows of Freifeld et al. (2017)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from headtilt.errors import at_least
from headtilt.geometry.warp import resample, sampling_grid
from headtilt.paper.baselines.stn import Localisation, Transformer

# The four triangles of a square cell, in the order in which `CPAB.cell` counts them.
_TOP, _RIGHT, _BOTTOM, _LEFT = range(4)


class CPAB(nn.Module):
    """Diffeomorphisms of the square [−1, 1]²: flows of continuous velocity fields that are affine on each triangle.

    The square is cut into n×n cells of four triangles. The fields along whose boundary nothing flows in or out form a
    vector space; `basis` (D, T, 2, 3) holds an orthonormal basis of it as one affine map per triangle. It is stored
    with the weights, since another machine may find another basis of the same space.

    Args:
        cells: Cells along each side, n.
        steps: How often along its way a point's triangle is looked up. Within a triangle the flow is exact.
    """

    basis: Tensor

    def __init__(self, cells: int = 3, *, steps: int = 16) -> None:
        super().__init__()
        at_least("cells", cells, 1)
        at_least("steps", steps, 1)
        self.cells, self.steps = cells, steps
        self.register_buffer("basis", field_basis(cells).to(torch.get_default_dtype()))

    @property
    def dimension(self) -> int:
        """Count of coefficients that make a field."""
        return len(self.basis)

    def velocity(self, points: Tensor, theta: Tensor) -> Tensor:
        """Return the velocity (B, P, 2) of the fields theta (B, D) at the points (B, P, 2) or (P, 2)."""
        return self._apply_affine(self._field(theta), _batched(points, theta))

    def flow(self, points: Tensor, theta: Tensor) -> Tensor:
        """Return where the points (B, P, 2) or (P, 2) are after flowing along the fields theta (B, D) for unit time.

        ``flow(flow(points, theta), -theta)`` gives the points back, up to the length of the steps.
        """
        field = self._field(theta) / self.steps
        generator = torch.cat([field, torch.zeros_like(field[:, :, :1])], dim=2)
        step = torch.matrix_exp(generator)[:, :, :2]
        points = _batched(points, theta)
        for _ in range(self.steps):
            points = self._apply_affine(step, points)
        return points

    def cell(self, points: Tensor) -> Tensor:
        """Return the index (…) of the triangle that holds each point (…, 2)."""
        scaled = (points + 1) * (self.cells / 2)
        corner = scaled.floor().clamp(0, self.cells - 1)
        x, y = (scaled - corner - 0.5).unbind(-1)
        beside = torch.where(x > 0, _RIGHT, _LEFT)
        above = torch.where(y > 0, _BOTTOM, _TOP)
        column, row = corner.long().unbind(-1)
        return 4 * (row * self.cells + column) + torch.where(x.abs() > y.abs(), beside, above)

    def _field(self, theta: Tensor) -> Tensor:
        return torch.einsum("bd,dtij->btij", theta, self.basis.to(theta.dtype))

    def _apply_affine(self, maps: Tensor, points: Tensor) -> Tensor:
        """Return the points (B, P, 2) under the map of their triangle, from maps (B, T, 2, 3)."""
        index = self.cell(points.detach())[..., None].expand(-1, -1, 6)
        here = maps.flatten(2).gather(1, index).unflatten(2, (2, 3))
        return (here[..., :2] * points[..., None, :]).sum(-1) + here[..., 2]


class DTN(Transformer):
    """A backbone behind one diffeomorphic transformer.

    Args:
        backbone: Any classifier of (B, C, H, W) images.
        channels: Channels of the images.
        size: Height and width of the images.
        cells: Cells along each side of the square on which the velocity field is piecewise affine.
        bound: Largest coefficient of the field, so that the flow's steps stay short against its triangles.

    Convention:
        Content flows along +theta, so that the image is sampled along −theta. `pose` is the affine matrix nearest to
        that flow over the pixel centres, in the least-squares sense. At first nothing flows.
    """

    def __init__(
        self, backbone: nn.Module, *, channels: int = 1, size: int = 28, cells: int = 3, bound: float = 1.0
    ) -> None:
        super().__init__()
        self.field = CPAB(cells)
        self.localise = Localisation(self.field.dimension, channels=channels, size=size)
        self.backbone = backbone
        self.bound = bound

    def theta(self, images: Tensor) -> Tensor:
        """Return the coefficients (B, D) of the velocity fields that bring the images into canonical form."""
        return self.bound * torch.tanh(self.localise(images) / self.bound)

    def pose(self, images: Tensor) -> Tensor:
        """Return the affine fits (B, 3, 3) of the flows that bring the images into canonical form."""
        pixels = _pixels(images)
        return affine_fit(pixels, self.field.flow(pixels, self.theta(images)))

    def canonical(self, images: Tensor) -> Tensor:
        """Return the images (B, C, H, W) with their content moved by the flow."""
        grid = self.field.flow(_pixels(images), -self.theta(images))
        return resample(images, grid.unflatten(1, images.shape[-2:]), "zeros", "bilinear")


def affine_fit(points: Tensor, moved: Tensor) -> Tensor:
    """Return the matrices (B, 3, 3) that take points (P, 2) nearest to moved (B, P, 2), by least squares."""
    homogeneous = torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
    upper = (torch.linalg.pinv(homogeneous) @ moved).mT
    bottom = upper.new_tensor([0.0, 0.0, 1.0]).expand(len(upper), 1, 3)
    return torch.cat([upper, bottom], dim=1)


def triangles(cells: int) -> Tensor:
    """Return the corners (T, 3, 2) of the triangles of n×n cells, in half cells from the upper left; whole numbers."""
    corners = []
    for row in range(0, 2 * cells, 2):
        for column in range(0, 2 * cells, 2):
            ring = [(column, row), (column + 2, row), (column + 2, row + 2), (column, row + 2)]
            corners += [[ring[side], ring[(side + 1) % 4], (column + 1, row + 1)] for side in range(4)]
    return torch.tensor(corners)


def field_basis(cells: int) -> Tensor:
    """Return an orthonormal basis (D, T, 2, 3) of the continuous fields that keep the square's boundary; float64.

    A field is one affine map for each of the T triangles; the fields wanted are the null space of `constraints`.
    """
    rows = constraints(cells)
    _, singular, right = torch.linalg.svd(rows, full_matrices=True)
    rank = int((singular > 1e-9 * singular[0]).sum())
    return right[rank:].reshape(-1, 4 * cells**2, 2, 3)


def constraints(cells: int) -> Tensor:
    """Return what a field must keep, one row for each condition (…, 6·T) that is linear in its affine maps; float64.

    Two triangles agree on the edge that they share if and only if they agree on its two ends; so it is enough that all
    triangles around a vertex give it one velocity, and that on the boundary its outward component is zero.
    """
    corners = triangles(cells)
    around: dict[tuple[int, int], list[int]] = {}
    for triangle, vertices in enumerate(corners.tolist()):
        for x, y in vertices:
            around.setdefault((x, y), []).append(triangle)
    rows = []
    for vertex, members in around.items():
        for axis in (0, 1):
            values = [_value_at(vertex, triangle, axis, cells) for triangle in members]
            rows += [one - other for one, other in pairwise(values)]
            if vertex[axis] in (0, 2 * cells):
                rows.append(values[0])
    return torch.stack(rows)


def _value_at(vertex: tuple[int, int], triangle: int, axis: int, cells: int) -> Tensor:
    """Return the row (6·T) that reads one component of a triangle's velocity at a vertex."""
    row = torch.zeros(4 * cells**2, 2, 3, dtype=torch.float64)
    row[triangle, axis] = torch.tensor([vertex[0] / cells - 1, vertex[1] / cells - 1, 1], dtype=torch.float64)
    return row.flatten()


def _batched(points: Tensor, theta: Tensor) -> Tensor:
    return points.expand(len(theta), -1, -1)


def _pixels(images: Tensor) -> Tensor:
    """Return the pixel centres (H·W, 2) of square images."""
    identity = torch.eye(3, dtype=images.dtype, device=images.device)
    return sampling_grid(identity[None], *images.shape[-2:])[0].flatten(0, 1)
