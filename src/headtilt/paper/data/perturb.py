"""G-transformed test sets as the paper defines them; the true transforms are kept, so pose errors can be measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from headtilt.calibration.sampler import nearly
from headtilt.errors import OptionError, one_of
from headtilt.geometry.groups import (
    FiniteGroup,
    Group,
    decompose,
    quarter_turns,
    rotation,
    scale,
    shear_x,
    translate_x,
    translate_y,
)
from headtilt.geometry.warp import Padding, centre_crop, invert, warp
from headtilt.paper.data.dataset import Dataset

Mode = Literal["each", "run", "grid", "paper"]
BATCH = 128  # the batch over which the paper takes its Frobenius norms
NEARLY, QUARTERS = 0, 1  # which of a seed's independent streams draws what
BLOCK = 512  # images that are moved at once


@dataclass(frozen=True)
class Schedule:
    """What is done to the images, and what a search should undo.

    Attributes:
        drawn: Groups to draw from; the last is done first, so that affine is R·S·H as in the paper.
        searched: Groups to search, in the order of the tree's levels.
    """

    drawn: tuple[Group, ...]
    searched: tuple[Group, ...]

    @property
    def whole_turn(self) -> bool:
        """Whether it turns images by any angle: only then a quarter turn is something that a search should undo."""
        return any(group.periodic for group in self.searched)


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
        mode: "each" draws one per image, continuously; "run" draws one for all; "grid" draws one per image from grids
            of `samples`; "paper" from the paper's own, which hold both ends of a turn.
        samples: Grid size for modes "grid" and "paper".
    """
    one_of("mode", mode, get_args(Mode))
    generator = torch.Generator().manual_seed(seed)
    result = torch.eye(3, dtype=torch.float64)
    for group in schedule(perturb).drawn:
        unit = torch.rand(1 if mode == "run" else count, generator=generator, dtype=torch.float64)
        drawn = group.paper() if mode == "paper" else group
        result = result @ drawn.matrix(parameters(drawn, unit, samples if mode in ("grid", "paper") else None))
    return result.expand(count, 3, 3).float()


def parameters(group: Group, unit: Tensor, samples: int | None = None) -> Tensor:
    """Return the group's parameters for even draws `unit` in [0, 1): from its whole range, or from a grid."""
    if samples is not None or isinstance(group, FiniteGroup):
        grid = group.grid(samples or 4)
        return grid[(unit * len(grid)).long()]
    if group.spacing == "factor":
        low, high = math.exp(group.low), math.exp(group.high)
        return torch.log(low + unit * (high - low))
    return group.low + unit * (group.high - group.low)


def derived_seed(seed: int, stream: int) -> int:
    """Return the seed of a stream of its own: independent of the seed itself and of the other streams."""
    sequence = np.random.SeedSequence(seed, spawn_key=(stream,))  # what `spawn` would give as child number `stream`
    return int(sequence.generate_state(1, np.uint64)[0])


def draw_nearly(count: int, size: int, seed: int = 0) -> Tensor:
    """Return transforms (count, 3, 3), float32, that hardly show: ± 3°, ± 3 % in scale, ± half a pixel in x and y.

    Args:
        count: Number of images.
        size: Longer side of the images, in pixels.
        seed: Independent of what `draw` makes of the same seed.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, NEARLY))
    unit = 2 * torch.rand(4, count, generator=generator, dtype=torch.float64) - 1
    return nearly(unit.T, size).float()


def draw_quarters(count: int, seed: int = 0) -> Tensor:
    """Return how many quarters each image is turned clockwise (count,): 1, 2 or 3, independent of the other draws."""
    generator = torch.Generator().manual_seed(derived_seed(seed, QUARTERS))
    return torch.randint(1, 4, (count,), generator=generator)


@dataclass(frozen=True, eq=False)
class TestSet:
    """Perturbed images with their labels and true transforms.

    Attributes:
        images: (N, C, H, W), float32 in [0, 1].
        labels: (N,).
        transforms: (N, 3, 3), what was done to each image, in the coordinates of the images as they are here.
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
    for start in range(0, len(dataset), BLOCK):
        rows = slice(start, start + BLOCK)
        parts.append(centre_crop(warp(dataset.floats(rows), transforms[rows], padding=padding), crop))
    height, width = dataset.images.shape[-2:]
    return TestSet(torch.cat(parts), dataset.labels, cropped_transforms(transforms, height, width, crop))


def cropped_transforms(transforms: Tensor, height: int, width: int, crop: int | None) -> Tensor:
    """Return transforms (N, 3, 3) of images in the coordinates of their centre square, whose side spans [−1, 1].

    A shift is more of the square than of the image; where the square cannot lie in the very middle, neither does the
    centre of a rotation.
    """
    if crop is None:
        return transforms
    longer = max(height, width)
    to_crop = torch.eye(3, dtype=torch.float64)
    to_crop[0, 0] = to_crop[1, 1] = longer / crop
    to_crop[0, 2], to_crop[1, 2] = ((side - crop) % 2 / crop for side in (width, height))
    return (to_crop @ transforms.double().cpu() @ invert(to_crop)).to(transforms)


def turn(images: Tensor, quarters: Tensor) -> Tensor:
    """Return images (B, C, H, W), each turned clockwise by its count of quarters (B,); no pixel is resampled."""
    height, width = images.shape[-2:]
    if height != width and bool((quarters % 2 == 1).any()):
        raise OptionError(f"a quarter turn needs square images; got {height}×{width}. Crop them to squares.")
    turned = images.clone()
    for count in (quarters % 4).unique().tolist():
        rows = (quarters % 4 == count).to(images.device)
        turned[rows] = torch.rot90(images[rows], -count, (-2, -1))  # rot90 turns the other way
    return turned


def turn_dataset(dataset: Dataset, quarters: Tensor, *, crop: int | None = None) -> TestSet:
    """Return the data set turned by whole quarters, its pixels as they are; by none at all it is the upright set.

    Args:
        dataset: Its images.
        quarters: (N,), how many quarters each is turned clockwise; see `draw_quarters`.
        crop: For photographs: side of the centre square, which is cut out first and then turned.
    """
    if len(quarters) != len(dataset):
        raise OptionError(f"quarters must be one per image; got {len(quarters)} for {len(dataset)}.")
    parts = []
    for start in range(0, len(dataset), BLOCK):
        rows = slice(start, start + BLOCK)
        parts.append(turn(centre_crop(dataset.floats(rows), crop), quarters[rows]))
    return TestSet(torch.cat(parts), dataset.labels, quarter_turns().matrix(quarters % 4))


def pose_errors(estimate: Tensor, truth: Tensor) -> dict[str, float]:
    """Return how far estimated transforms (N, 3, 3) are from the true ones.

    The median angle in degrees that remains after undoing the estimate, the mean Frobenius distance per image, and
    √(128 · mean ‖A − B‖²), the norm of what 128 images are off by: see `mini_batches` for the paper's own figure.
    """
    distance = distances(estimate, truth)
    return {
        "angle_error_deg": float(angles_left(estimate, truth).median()),
        "frobenius": float(distance.mean()),
        "frobenius_batch128": math.sqrt(BATCH * float(distance.square().mean())),
    }


def distances(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return the Frobenius distances (N,) of estimated transforms (N, 3, 3) from the true ones, float64."""
    return (estimate.double().cpu() - truth.double().cpu()).flatten(1).norm(dim=1)


def mini_batches(right: Tensor, distance: Tensor | None = None) -> dict[str, Any]:
    """Return accuracy and Frobenius norm as table 1 has them: mean and spread over mini-batches of 128.

    The last, short batch counts like any other, and its right answers are divided by 128, too. That is what the printed
    spreads say: an accuracy of 89 ± 14 over batches has no other explanation, nor has a norm of 23.0 ± 2.5.

    Args:
        right: (N,), whether each label is right.
        distance: (N,), see `distances`.
    """
    found: dict[str, Any] = {"accuracy": [100 * float(part.sum()) / BATCH for part in right.double().split(BATCH)]}
    if distance is not None:
        found["frobenius"] = [float(part.norm()) for part in distance.double().split(BATCH)]
    return {
        name: {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}
        for name, values in found.items()
    }


def filled(images: int) -> list[float]:
    """Return how full each mini-batch is: by their mean `mini_batches` is below the share of right answers."""
    whole, rest = divmod(images, BATCH)
    return [1.0] * whole + [rest / BATCH] * (rest > 0)


def expected_spread(mean: float, images: int) -> float:
    """Return the spread that `mini_batches` gives a method of which it printed that mean accuracy in percent.

    What the short batch adds, and what chance adds in batches whose images are right independently of one another.
    """
    shares = filled(images)
    right = mean / statistics.fmean(shares)
    chance = right * (100 - right) / BATCH
    off = [(share * right - mean) ** 2 + share * chance for share in shares]
    return math.sqrt(sum(off) / (len(off) - 1))


def angles_left(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return the angles (N,) in degrees, 0 to 180, that remain after undoing estimates (N, 3, 3) of the transforms."""
    return _degrees(invert(estimate.double().cpu()) @ truth.double().cpu()).abs()


def quarters_found(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return where (N,) the rotation of an estimate (N, 3, 3) rounds to the quarter turn that was truly made."""
    found, true = ((_degrees(transforms) / 90).round() % 4 for transforms in (estimate, truth))
    return found == true


def turned_more(estimate: Tensor, degrees: float) -> Tensor:
    """Return where (N,) an estimated transform (N, 3, 3) turns by more than so many degrees, either way."""
    return _degrees(estimate).abs() > degrees


def _degrees(transforms: Tensor) -> Tensor:
    return decompose(transforms.double().cpu()).rotation.rad2deg()
