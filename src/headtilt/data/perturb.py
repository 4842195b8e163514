"""G-transformed test sets as the paper defines them; the true transforms are kept, so pose errors can be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headtilt.data.dataset import Dataset
from headtilt.errors import OptionError, one_of
from headtilt.groups import (
    FiniteGroup,
    Group,
    decompose,
    invert,
    rotation,
    scale,
    shear_x,
    translate_x,
    translate_y,
)
from headtilt.looks import centre_crop
from headtilt.warp import Padding, warp

Mode = Literal["each", "run", "grid"]
BATCH = 128  # the batch over which the paper takes its Frobenius norms


@dataclass(frozen=True)
class Schedule:
    """What is done to the images, and what a search should undo.

    Attributes:
        drawn: Groups to draw from; the last is done first, so that affine is R·S·H as in the paper.
        searched: Groups to search, in the order of the tree's levels.
    """

    drawn: tuple[Group, ...]
    searched: tuple[Group, ...]


def schedules() -> dict[str, Schedule]:
    """Return the named perturbations. Scale is drawn evenly in the factor 1 ± s, as the paper does."""
    turn, size, slant = rotation(), scale(0.25), shear_x(0.25)
    return {
        "rotation": Schedule((turn,), (turn,)),
        "scale": Schedule((size.paper(),), (size,)),
        "shear": Schedule((slant,), (slant,)),
        "translation": Schedule((translate_x(0.25), translate_y(0.25)), (translate_x(0.25), translate_y(0.25))),
        "rotation+scale": Schedule((turn, size.paper()), (turn, size)),
        "affine": Schedule((turn, size.paper(), slant), (turn, size, slant)),
    }


def schedule(perturb: str | Sequence[Group]) -> Schedule:
    """Return the schedule of that name, or one of the groups given."""
    if isinstance(perturb, str):
        known = schedules()
        one_of("perturb", perturb, known)
        return known[perturb]
    return Schedule(tuple(perturb), tuple(perturb))


def draw(
    perturb: str | Sequence[Group], count: int, *, seed: int = 0, mode: Mode = "each", samples: int = 17
) -> Tensor:
    """Return the true transforms (count, 3, 3), float32, of a test set.

    Args:
        perturb: A named schedule or a list of groups; the last is done first.
        count: Number of images.
        seed: The same seed gives the same transforms.
        mode: "each" draws one per image, continuously; "run" draws one for all; "grid" draws from grids of `samples`.
        samples: Grid size for mode "grid".
    """
    one_of("mode", mode, ("each", "run", "grid"))
    generator = torch.Generator().manual_seed(seed)
    result = torch.eye(3, dtype=torch.float64)
    for group in schedule(perturb).drawn:
        unit = torch.rand(1 if mode == "run" else count, generator=generator, dtype=torch.float64)
        result = result @ group.matrix(_parameters(group, unit, samples if mode == "grid" else None))
    return result.expand(count, 3, 3).float()


def _parameters(group: Group, unit: Tensor, samples: int | None) -> Tensor:
    if samples is not None or isinstance(group, FiniteGroup):
        grid = group.grid(samples or 4)
        return grid[(unit * len(grid)).long()]
    if group.spacing == "factor":
        low, high = math.exp(group.low), math.exp(group.high)
        return torch.log(low + unit * (high - low))
    return group.low + unit * (group.high - group.low)


@dataclass(frozen=True, eq=False)
class TestSet:
    """Perturbed images with their labels and true transforms.

    Attributes:
        images: (N, C, H, W), float32 in [0, 1].
        labels: (N,).
        transforms: (N, 3, 3), what was done to each image.
    """

    __test__ = False  # not a test, whatever pytest thinks of its name

    images: Tensor
    labels: Tensor
    transforms: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def perturb_dataset(
    dataset: Dataset, transforms: Tensor, *, crop: int | None = None, padding: Padding = "zeros"
) -> TestSet:
    """Return the data set under the transforms.

    Args:
        dataset: Its raw pixels are moved, before any normalisation.
        transforms: (N, 3, 3).
        crop: For photographs: side of the centre square kept afterwards, so that no empty corner gives the angle away.
        padding: What moves in from outside; see `warp`.
    """
    if len(transforms) != len(dataset):
        raise OptionError(f"transforms must be one per image; got {len(transforms)} for {len(dataset)}.")
    parts = []
    for start in range(0, len(dataset), 512):
        rows = slice(start, start + 512)
        parts.append(centre_crop(warp(dataset.floats(rows), transforms[rows], padding=padding), crop))
    return TestSet(torch.cat(parts), dataset.labels, transforms)


def pose_errors(estimate: Tensor, truth: Tensor) -> dict[str, float | None]:
    """Return how far estimated transforms (N, 3, 3) are from the true ones.

    The median angle in degrees that remains after undoing the estimate, the mean Frobenius distance per image, and the
    paper's Frobenius norm over batches of 128 (partial batches dropped; None where there is no whole one).
    """
    estimate, truth = estimate.double().cpu(), truth.double().cpu()
    angle = decompose(invert(estimate) @ truth).rotation.abs().rad2deg()
    distance = (estimate - truth).flatten(1).norm(dim=1)
    batches = distance[: len(distance) // BATCH * BATCH].reshape(-1, BATCH)
    return {
        "angle_error_deg": float(angle.median()),
        "frobenius": float(distance.mean()),
        "frobenius_batch128": float(batches.square().sum(1).sqrt().mean()) if len(batches) else None,
    }
