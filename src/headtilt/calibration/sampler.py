"""What a fit shows the classifier: upright images as they are, moved a little, tilted at random, and turned exactly.

Real tilted images are not resampled and have no empty corners, and images made for a fit are both. Whatever could tell
upright from tilted by that must tell nothing: half of the upright images are resampled too, and of the tilted ones a
third is turned by exact quarters, which moves pixels and mixes none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headtilt.geometry.groups import Group, matrices, quarter_turns, rotation, scale, translate_x, translate_y
from headtilt.geometry.warp import Interpolation, Padding, around, centre_crop, invert, warp
from headtilt.model.evidence import Evidence, concatenate
from headtilt.model.predictor import Predictor
from headtilt.search.lattice import elements, every_element, lattice, nearness, spread

NEARLY_ANGLE, NEARLY_SCALE, NEARLY_PIXELS = math.radians(3), 0.03, 0.5  # what a classifier should not mind
RESAMPLED = 1 / 2  # of the upright images
QUARTERS = 1 / 3  # of the tilted images, where the search covers a full turn
RESAMPLINGS: tuple[Interpolation, ...] = ("bilinear", "bicubic")
COLUMNS = ("coordinates", "poses", "aim", "upright", "exact", "transforms")  # of `Orbits`, beside the evidence
BLOCK = 64  # images that are tilted at once: none but these exist in full size a second time


@dataclass(frozen=True)
class Orbits:
    """Images under some tilt, each seen from several views; the first view is the image as it came.

    Attributes:
        evidence: (n, V, …).
        coordinates: (n, V, L), parameters of the views.
        poses: (n, V, 3, 3), of the views.
        aim: (n, V), how close to upright each view comes: 1 where it undoes the tilt, falling to 0; NaN for none.
        upright: (n,), whether the image came upright, or nearly.
        exact: (n,), whether the image as it came was not resampled.
        transforms: (n, 3, 3), what was done to the image.
    """

    evidence: Evidence
    coordinates: Tensor
    poses: Tensor
    aim: Tensor
    upright: Tensor
    exact: Tensor
    transforms: Tensor

    def at(self, rows: Tensor) -> Orbits:
        """Return the orbits of the images at `rows`."""
        parts = (part[rows] for part in (getattr(self, name) for name in COLUMNS))
        return Orbits(self.evidence.at(rows), *parts)


@dataclass(frozen=True)
class Sampler:
    """How a fit looks at images.

    Attributes:
        predictor: The model, with the taps that the head reads.
        levels: The groups that are searched; images are tilted by what these undo.
        padding: See `warp`.
        interpolation: See `warp`.
        crop: Side of the centre square that the model sees, where images are larger: tilts then leave no corners.
        views: Views of each tilted image, beside the image as it came.
    """

    predictor: Predictor
    levels: tuple[Group, ...]
    padding: Padding = "auto"
    interpolation: Interpolation = "bicubic"
    crop: int | None = None
    views: int = 16

    def seen(self, images: Tensor) -> Tensor:
        """Return what the model sees of images, on its device."""
        device, _ = self.predictor.device_and_dtype(images)
        return centre_crop(images.to(device), self.crop)

    def moved(self, images: Tensor, transforms: Tensor) -> Tensor:
        """Return what the model sees of images (n, C, H, W) under transforms (n, 3, 3); the identity moves no pixel.

        Every other image is resampled more softly: how sharp an image is must say nothing about how it lies.
        """
        device, _ = self.predictor.device_and_dtype(images)
        still = (transforms == torch.eye(3)).flatten(1).all(1)
        whole = images.to(device)
        share = 1.0 if self.crop is None else self.crop / max(images.shape[-2:])
        moves = around(transforms.to(device), share)
        made = torch.empty_like(whole)
        kinds = ("nearest",) if self.interpolation == "nearest" else RESAMPLINGS
        for first, kind in enumerate(kinds[: len(whole)]):
            rows = slice(first, None, len(kinds))
            made[rows] = warp(whole[rows], moves[rows], padding=self.padding, interpolation=kind)
        return centre_crop(torch.where(still.to(device)[:, None, None, None], whole, made), self.crop)

    def draw(self, count: int, upright: float, size: int, generator: np.random.Generator) -> Presented:
        """Return transforms for `count` images, a share of them upright.

        Args:
            count: How many.
            upright: The share.
            size: Pixels of the longer side, in which small shifts are counted.
            generator: Where randomness comes from.
        """
        stays = generator.random(count) < upright
        unit = torch.from_numpy(generator.random((count, len(self.levels)))).float()
        coordinates = [spread(group, unit[:, place]) for place, group in enumerate(self.levels)]
        tilts = invert(matrices(self.levels, torch.stack(coordinates, dim=-1)))
        exact = generator.random(count) < QUARTERS
        if any(group.name == "rotation" and group.periodic for group in self.levels):
            turns = torch.from_numpy(generator.integers(1, 4, count))
            tilts = torch.where(torch.from_numpy(exact)[:, None, None], quarter_turns().matrix(turns), tilts)
        elif elements(self.levels) is not None:
            exact = generator.random(count) >= RESAMPLED  # every tilt is exact: some are resampled, as upright ones are
            tilts = torch.where(
                torch.from_numpy(exact)[:, None, None], tilts, tilts @ draw_nearly(count, size, generator)
            )
        else:
            exact[:] = False
        resampled = generator.random(count) < RESAMPLED
        nearly = draw_nearly(count, size, generator)
        still = torch.where(torch.from_numpy(resampled)[:, None, None], nearly, torch.eye(3))
        transforms = torch.where(torch.from_numpy(stays)[:, None, None], still, tilts).float()
        return Presented(transforms, torch.from_numpy(stays), torch.from_numpy(np.where(stays, ~resampled, exact)))

    def coordinates(self, generator: np.random.Generator) -> Tensor:
        """Return the parameters (V + 1, L) of a lattice moved at random, after those of the identity."""
        if elements(self.levels) is not None:
            return every_element(self.levels).float()
        shift = torch.from_numpy(generator.random(len(self.levels)))
        around = lattice(self.levels, self.views, shift).float()
        return torch.cat([torch.zeros_like(around[:1]), around])

    def orbits(self, images: Tensor, presented: Presented, coordinates: Tensor, tell: Callable[[int], None]) -> Orbits:
        """Return what the model says of images (n, C, H, W), each under its transform, over the same views.

        Args:
            images: Upright.
            presented: What is done to each.
            coordinates: (V, L), of the views, the identity's first.
            tell: Called with the number of views that were shown since the last call.
        """
        poses = matrices(self.levels, coordinates)
        parts = []
        for rows in torch.arange(len(images)).split(BLOCK):
            shown = self.moved(images[rows], presented.transforms[rows])
            seen = self.predictor(shown).reshape(len(rows), 1)
            if len(poses) > 1:
                around = self.predictor.all_views(
                    shown, poses[1:].to(shown.device), padding=self.padding, interpolation=self.interpolation
                )
                seen = concatenate([seen, around.reshape(len(rows), len(poses) - 1)], dim=1)
            parts.append(seen)
            tell(len(rows) * len(poses))
        evidence = concatenate(parts)
        aim = nearness(poses, presented.transforms.to(poses))
        device = evidence.logits.device
        views = (part.to(device).expand(len(images), *part.shape) for part in (coordinates, poses))
        rest = (aim, presented.upright, presented.exact, presented.transforms)
        return Orbits(evidence, *views, *(part.to(device) for part in rest))


@dataclass(frozen=True)
class Presented:
    """How images are presented.

    Attributes:
        transforms: (n, 3, 3), what is done to each; the identity leaves its pixels alone.
        upright: (n,), whether it stays upright, or nearly.
        exact: (n,), whether no pixel is resampled.
    """

    transforms: Tensor
    upright: Tensor
    exact: Tensor


def draw_nearly(count: int, size: int, generator: np.random.Generator) -> Tensor:
    """Return transforms (count, 3, 3) that are next to nothing: ±3°, ±3 % and half a pixel."""
    return nearly(torch.from_numpy(generator.uniform(-1, 1, (count, 4))).float(), size)


def nearly(unit: Tensor, size: int) -> Tensor:
    """Return transforms (n, 3, 3) that are next to nothing, of numbers (n, 4) between −1 and 1.

    Args:
        unit: For the angle, the scale, and the shifts in x and y.
        size: Pixels of the longer side, in which shifts are counted.
    """
    shift = unit[:, 2:] * (2 * NEARLY_PIXELS / size)
    turned = rotation().matrix(unit[:, 0] * NEARLY_ANGLE) @ scale().matrix(torch.log1p(unit[:, 1] * NEARLY_SCALE))
    return translate_x().matrix(shift[:, 0]) @ translate_y().matrix(shift[:, 1]) @ turned
