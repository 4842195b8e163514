"""Lattices of poses that cover a product of groups.

What depends on the groups alone is computed once and kept as plain numbers, which the tracing of a graph can read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from headtilt.geometry.groups import FiniteGroup, Group, matrices
from headtilt.geometry.warp import invert

POSES_TRIED = 64  # by which it is told how far levels move an image
NEARNESS = 0.35  # distance ‖T − I‖ of a pose from another at which it counts half as much or so: a turn by 15°
KEPT = 256  # lattices kept at most: a process has a few, a test run some hundreds

Numbers = tuple[tuple[float, ...], ...]


def elements(levels: Sequence[Group]) -> int | None:
    """Return how many poses there are where all levels are finite groups, None where there is no end of them."""
    finite = tuple(group for group in levels if isinstance(group, FiniteGroup))
    return len(_distinct(finite)) if len(finite) == len(levels) else None


def every_element(levels: Sequence[Group]) -> Tensor:
    """Return parameters (E, L) of all poses of finite groups, each pose once, the identity's first."""
    return torch.tensor(_distinct(tuple(levels)), dtype=torch.float64)


@lru_cache(maxsize=KEPT)
def _distinct(levels: tuple[FiniteGroup, ...]) -> Numbers:
    """Return the first parameters of each pose of a product: two flips may be a half turn, which is another element."""
    found: dict[tuple[int, ...], tuple[float, ...]] = {(1, 0, 0, 1): ()}
    for group in levels:
        reached: dict[tuple[int, ...], tuple[float, ...]] = {}
        for (p, q, r, s), places in found.items():
            for place, (a, b, c, d) in enumerate(group.elements):
                pose = (a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s)
                reached.setdefault(pose, (*places, float(place)))
        found = reached
    return tuple(found.values())


def lattice(levels: Sequence[Group], count: int, shift: Tensor | None = None) -> Tensor:
    """Return `count` points (count, L) that cover the product of the groups evenly; index count // 2 is the identity.

    The first full turn (or else the first level) is sampled evenly; the others follow an additive sequence with the
    generalised golden ratio, so that any stretch of the turn sees the whole range of the others.

    Args:
        levels: The groups.
        count: How many points.
        shift: (L,) in [0, 1): moves the lattice along each coordinate, for random lattices in fitting.
    """
    every = elements(levels)
    if every is not None and count <= every:
        return every_element(levels)[torch.arange(count) * every // count].roll(count // 2, 0)
    fine = next((place for place, group in enumerate(levels) if group.periodic), 0)
    others = len(levels) - 1
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (others + 1))
    steps = torch.arange(count, dtype=torch.float64) - count // 2
    columns, rank = [], 0
    for place in range(len(levels)):
        if place == fine:
            columns.append(steps / count + 0.5)
        else:
            rank += 1
            columns.append(steps * golden**-rank + 0.5)
    unit = torch.stack(columns, dim=1) + (0 if shift is None else shift.to(torch.float64))
    return torch.stack([spread(group, unit[:, place] % 1) for place, group in enumerate(levels)], dim=1)


@lru_cache(maxsize=KEPT)
def _covering(levels: tuple[Group, ...], count: int) -> tuple[Numbers, tuple[Numbers, ...]]:
    points = lattice(levels, count)
    poses = matrices(levels, points)
    return tuple(map(tuple, points.tolist())), tuple(tuple(map(tuple, pose)) for pose in poses.tolist())


@lru_cache(maxsize=KEPT)
def farthest(levels: tuple[Group, ...]) -> float:
    """Return the distance ‖T − I‖_F of the pose that moves images most."""
    _, poses = _covering(levels, POSES_TRIED)
    return max(math.dist(sum(pose, ()), (1, 0, 0, 0, 1, 0, 0, 0, 1)) for pose in poses)


def covering(levels: tuple[Group, ...], count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points (count, L) of `lattice` and their poses (count, 3, 3), in the precision of another tensor."""
    # A graph that is being traced can hold no tensor from outside of it.
    made = _covering_on.__wrapped__ if is_compiling() else _covering_on
    return made(levels, count, like.dtype, like.device)


@lru_cache(maxsize=KEPT)
def _covering_on(
    levels: tuple[Group, ...], count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    points, poses = _covering(levels, count)
    with torch.inference_mode(False):  # whoever asks next may be outside of it
        return torch.tensor(points, dtype=dtype, device=device), torch.tensor(poses, dtype=dtype, device=device)


def closeness(levels: tuple[Group, ...], count: int, like: Tensor) -> Tensor:
    """Return how much a view from each pose of a lattice tells of each other one (count, count): from 1 down to 0.

    Levels of a small range have poses that are all close; there, closeness falls the faster.
    """
    made = _closeness_on.__wrapped__ if is_compiling() else _closeness_on
    return made(levels, count, like.dtype, like.device)


@lru_cache(maxsize=KEPT)
def _closeness_on(levels: tuple[Group, ...], count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        _, poses = _covering_on.__wrapped__(levels, count, dtype, device)
        return nearness(poses, invert(poses), min(NEARNESS, farthest(levels) / 6))


def nearness(poses: Tensor, transforms: Tensor, width: float = NEARNESS) -> Tensor:
    """Return how close to upright (n, P) each pose brings each image: 1 where it undoes the transform, falling to 0.

    That is ‖P T − I‖² = ⟨PᵀP, TTᵀ⟩ − 2⟨Pᵀ, T⟩ + 3, two products of matrices for all of them.

    Args:
        poses: (P, 3, 3).
        transforms: (n, 3, 3), of the images.
        width: Distance at which it has fallen by half or so.
    """
    squares = (transforms @ transforms.mT).flatten(1) @ (poses.mT @ poses).flatten(1).T
    apart = squares - 2 * transforms.flatten(1) @ poses.mT.flatten(1).T + 3
    return (-apart.clamp_min(0) / (2 * width**2)).exp()


def spread(group: Group, unit: Tensor) -> Tensor:
    """Return parameters for numbers in [0, 1); 1/2 is the identity."""
    if isinstance(group, FiniteGroup):
        return torch.floor((unit + 0.5) % 1 * 4)
    return torch.where(unit < 0.5, (1 - 2 * unit) * group.low, (2 * unit - 1) * group.high)


def first_step(group: Group, count: int) -> float:
    """Return the first refinement step along a group after a lattice of `count` points."""
    if isinstance(group, FiniteGroup):
        return 1.0
    return 2 * math.pi / max(count, 8) if group.periodic else group.reach / 3
