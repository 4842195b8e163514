"""How a fit looks at upright images: as they are, tilted at random, over whole orbits, and after a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headtilt.calibrate import Calibrator
from headtilt.errors import OptionError
from headtilt.evidence import Evaluate, Evidence, concatenate
from headtilt.groups import FiniteGroup, Group, invert
from headtilt.predictor import Predictor, Views
from headtilt.result import Found
from headtilt.search.joint import lattice, matrices, spread
from headtilt.warp import Interpolation, Padding, warp

SHIFT = 1 / 32  # of the side: what a classifier should not mind
CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))
NEARNESS = 0.35  # distance ‖T − I‖ of a view from upright at which it counts half as much or so: a turn by 15°


@dataclass(frozen=True)
class Looks:
    """How to look at images.

    Attributes:
        predictor: The model, with features tapped where they are needed.
        levels: The groups that are searched; images are tilted by what these undo.
        padding: See `warp`.
        interpolation: See `warp`.
        views: Views per orbit; None takes `default_views`.
        crop: Side of the centre square that the model sees, where images are larger: tilts then leave no corners.
        progress: Called with (stage, done, total).
    """

    predictor: Predictor
    levels: tuple[Group, ...]
    padding: Padding = "zeros"
    interpolation: Interpolation = "bilinear"
    views: int | None = None
    crop: int | None = None
    progress: Callable[[str, int, int], None] | None = None

    def upright(self, images: Tensor) -> Evidence:
        """Return the bare evidence of the upright images, block by block."""
        blocks, parts = images.split(1024), []
        for number, part in enumerate(blocks):
            self.tell("upright", number, len(blocks))
            parts.append(self.predictor(self.cropped(part)))
        return concatenate(parts)

    def tell(self, stage: str, done: int, total: int) -> None:
        """Tell whoever listens how far it is."""
        if self.progress is not None:
            self.progress(stage, done, total)

    def cropped(self, images: Tensor) -> Tensor:
        """Return what the model sees of images, on its device."""
        device, _ = self.predictor.device_and_dtype(images)
        return centre_crop(images.to(device), self.crop)

    def tilts(self, count: int, seed: int) -> Tensor:
        """Return transforms (count, 3, 3), each its own draw from what the groups of the search undo."""
        generator = torch.Generator().manual_seed(seed)
        unit = torch.rand(count, len(self.levels), generator=generator)
        coordinates = [spread(group, unit[:, place]) for place, group in enumerate(self.levels)]
        return invert(matrices(self.levels, torch.stack(coordinates, dim=-1)))

    def tilted(self, images: Tensor, index: Tensor, seed: int) -> Tensor:
        """Return the images at `index`, each tilted by its own draw."""
        tilts = self.tilts(len(index), seed)
        device, _ = self.predictor.device_and_dtype(images)
        whole = images[index.cpu()].to(device)
        return self.cropped(warp(whole, tilts.to(device), padding=self.padding, interpolation=self.interpolation))

    def orbits(self, images: Tensor, index: Tensor, seed: int, *, stage: str | None = None) -> tuple[Evidence, Tensor]:
        """Return the evidence (n, V, …) of tilted images over a shifted lattice of poses, and their aim (n, V)."""
        generator = torch.Generator().manual_seed(seed)
        count = self.views or default_views(self.levels)
        shift = torch.rand(len(self.levels), generator=generator)
        poses = matrices(self.levels, lattice(self.levels, count, shift).float())
        parts, aims = [], []
        blocks = index.split(256)
        for number, part in enumerate(blocks):
            if stage is not None:
                self.tell(stage, number, len(blocks))
            tilted = self.tilted(images, part, hash((seed, number)))
            left = poses @ self.tilts(len(part), hash((seed, number)))[:, None] - torch.eye(3)
            aims.append((-left.flatten(2).square().sum(2) / (2 * NEARNESS**2)).softmax(1).to(tilted.device))
            rows = torch.arange(len(part), device=tilted.device).repeat_interleave(count)
            evidence = self.predictor.views(
                tilted,
                rows,
                poses.to(tilted.device).repeat(len(part), 1, 1),
                padding=self.padding,
                interpolation=self.interpolation,
            )
            parts.append(evidence.reshape(len(part), count))
        return concatenate(parts), torch.cat(aims)

    def second_opinion(self, images: Tensor) -> Tensor:
        """Return how probable each class is (n, Y) by looks that neither the bare answer nor the search has had.

        The mean prediction over four small shifts. The image as it came would side with the bare answer, whose source
        it is, and condemn every change; the views of the search would side with the search.
        """
        return torch.cat([self._opinion(part) for part in images.split(256)])

    def _opinion(self, images: Tensor) -> Tensor:
        looks = [self.predictor(self.shifted(images, corner)).logits.softmax(1) for corner in range(len(CORNERS))]
        return torch.stack(looks).mean(0)

    def shifted(self, images: Tensor, corner: int) -> Tensor:
        """Return what the model sees of images moved a little towards a corner, as it has not seen them in training."""
        device, _ = self.predictor.device_and_dtype(images)
        side = images.shape[-1] if self.crop is None else self.crop
        shift = 2 * SHIFT * side / max(images.shape[-2:])
        x, y = CORNERS[corner]
        pose = torch.tensor([[1.0, 0.0, x * shift], [0.0, 1.0, y * shift], [0.0, 0.0, 1.0]]).expand(len(images), 3, 3)
        return self.cropped(warp(images.to(device), pose, padding=self.padding, interpolation=self.interpolation))

    def search(
        self,
        images: Tensor,
        bare: Evidence,
        calibrator: Calibrator | None,
        search: Callable[[Evaluate, Evidence], Found],
    ) -> tuple[Tensor, Found]:
        """Return the calibrated root logits and what a search finds, in blocks that fit memory."""
        roots, parts = [], []
        for start in range(0, len(images), 128):
            self.tell("gate", start, len(images))
            batch, root = images[start : start + 128], bare.at(slice(start, start + 128))
            root = root if calibrator is None else calibrator(root)
            roots.append(root.logits)
            parts.append(search(Views(self.predictor, batch, self.padding, self.interpolation, calibrator), root))
        marginal, near = (torch.cat([getattr(part, name) for part in parts]) for name in ("marginal", "near"))
        views = torch.cat([part.views for part in parts])
        return torch.cat(roots), Found(parts[0].beam, (), marginal, near, views)


def default_views(levels: Sequence[Group]) -> int:
    """Return how many views of an orbit a fit looks at: all of finite groups, else 24 of one level, 72 of several."""
    if all(isinstance(group, FiniteGroup) for group in levels):
        return math.prod(len(group.grid(1)) for group in levels)
    return 24 if len(levels) == 1 else 72


def centre_crop(images: Tensor, side: int | None) -> Tensor:
    """Return the centre square (B, C, side, side), or the images themselves where side is None."""
    if side is None:
        return images
    height, width = images.shape[-2:]
    if side > min(height, width):
        raise OptionError(f"crop must fit into the images; got {side} for {height}×{width}.")
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]
