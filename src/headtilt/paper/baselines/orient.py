"""Orient, then classify: from one pass a small network guesses how an image lies, a second pass sees it turned back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headtilt.geometry.groups import Group, matrices, quarter_turns
from headtilt.geometry.warp import Padding, centre_crop, invert, warp
from headtilt.model.evidence import Evidence, floored
from headtilt.model.predictor import Predictor
from headtilt.paper.data.perturb import cropped_transforms, derived_seed, draw_nearly, turn
from headtilt.search.lattice import NEARNESS, lattice, spread

EXAMPLES = 49_152  # looks at images from which it learns
EPOCHS, BATCH, RATE, DROPOUT = 12, 256, 2e-3, 0.2
TILTS, TRAINING = 2, 3  # streams of a seed; those before are of the test sets


@dataclass(frozen=True, eq=False)
class Orienter:
    """A classifier that is shown each image twice: as it came, and turned back by the most probable pose.

    Attributes:
        predictor: The classifier, with its features tapped where it has any.
        poses: (P, 3, 3), among which it chooses.
        weights: Weight (out, in) and bias (out,) of each layer of the network that chooses.
        mean: (D,), of what the network reads.
        deviation: (D,), of the same.
        padding: See `warp`.
    """

    predictor: Predictor
    poses: Tensor
    weights: tuple[Tensor, ...]
    mean: Tensor
    deviation: Tensor
    padding: Padding = "zeros"

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels (B,) of images (B, C, H, W), and the poses (B, 3, 3) that turned them back."""
        inputs = (_read(self.predictor(images)) - self.mean) / self.deviation
        poses = self.poses[_scores(self.weights, inputs).argmax(1)]
        rows = torch.arange(len(images), device=images.device)
        return self.predictor.views(images, rows, poses.to(images.device), padding=self.padding).labels, poses


def fit_orienter(
    predictor: Predictor,
    images: Tensor,
    levels: Sequence[Group],
    *,
    padding: Padding = "zeros",
    crop: int | None = None,
    examples: int | None = None,
    hidden: int = 256,
    seed: int = 0,
) -> Orienter:
    """Return the classifier with a network that guesses poses, trained on unlabelled upright images.

    Args:
        predictor: The classifier; with ``features="auto"`` the network reads its features, else its logits.
        images: (n, C, H, W), raw pixels.
        levels: Groups whose tilts are to be undone.
        padding: See `warp`.
        crop: Side of the centre square that the classifier sees, where the images are larger.
        examples: How often it looks at an image, each time under another tilt; None for `EXAMPLES`.
        hidden: Width of the network's two hidden layers.
        seed: Seeds tilts, first weights, batches and dropout; the global stream stays as it is.
    """
    examples = EXAMPLES if examples is None else examples
    poses = matrices(levels, lattice(levels, 36 if len(levels) == 1 else 72).float())
    height, width = images.shape[-2:]
    square = crop is not None or height == width
    tilts, quarters, exact = _draws(levels, examples, max(height, width), square, derived_seed(seed, TILTS))
    device, _ = predictor.device_and_dtype(images)
    parts = []
    for rows in torch.arange(examples).split(512):
        upright = images[rows % len(images)].to(device)
        moved = centre_crop(warp(upright, tilts[rows].to(device), padding=padding), crop)
        turned = turn(centre_crop(upright, crop), quarters[rows])
        parts.append(_read(predictor(torch.where(exact[rows, None, None, None].to(device), turned, moved))))
    inputs = torch.cat(parts)
    done = torch.where(
        exact[:, None, None], quarter_turns().matrix(quarters), cropped_transforms(tilts, height, width, crop)
    )
    left = (poses @ done[:, None] - torch.eye(3)).flatten(2).square().sum(2)
    aims = (-left / (2 * NEARNESS**2)).softmax(1).to(inputs.device)
    mean, deviation = inputs.mean(0), inputs.std(0, correction=0).clamp_min(1e-3)
    weights = _train((inputs - mean) / deviation, aims, hidden, derived_seed(seed, TRAINING))
    return Orienter(predictor, poses.to(inputs.device), weights, mean, deviation, padding)


def _draws(levels: Sequence[Group], count: int, size: int, square: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tilts (count, 3, 3), counts of quarters (count,), and where (count,) the latter stand for the former.

    A third is tilted, a third turned by whole quarters, a third upright: half of that as it came, half a little off, so
    that sharp pixels are no sign of lying upright, nor blurred ones of a tilt.
    """
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(count, len(levels), generator=generator)
    coordinates = [spread(group, unit[:, place]) for place, group in enumerate(levels)]
    tilts = invert(matrices(levels, torch.stack(coordinates, dim=1)))
    # Sixths: 0 and 1 are tilted, 2 is nearly upright, 3 upright; 4 and 5 are quarters, where a search would undo them.
    sixth = torch.randint(6 if square and any(group.periodic for group in levels) else 4, (count,), generator=generator)
    tilts = torch.where((sixth < 2)[:, None, None], tilts, draw_nearly(count, size, seed))
    return tilts, torch.randint(1, 4, (count,), generator=generator) * (sixth > 3), sixth > 2


def _read(evidence: Evidence) -> Tensor:
    """Return what the network reads (B, D), float32: features, or the logits of a black box."""
    return (floored(evidence.logits) if evidence.features is None else evidence.features).float()


def _scores(weights: Sequence[Tensor], inputs: Tensor, masks: torch.Generator | None = None) -> Tensor:
    """Return a score for each pose (B, P) from standardised inputs (B, D); `masks` leave out hidden units."""
    *hidden, last = zip(weights[::2], weights[1::2], strict=True)
    for layer in hidden:
        inputs = F.gelu(F.linear(inputs, *layer))
        if masks is not None:
            kept = torch.rand(inputs.shape, generator=masks) >= DROPOUT
            inputs = inputs * kept.to(inputs.device) / (1 - DROPOUT)
    return F.linear(inputs, *last)


def _train(inputs: Tensor, aims: Tensor, hidden: int, seed: int) -> tuple[Tensor, ...]:
    """Return weights under which the scores of standardised inputs (n, D) match the aims (n, P)."""
    generator = torch.Generator().manual_seed(seed)
    weights: list[Tensor] = []
    for out, width in ((hidden, inputs.shape[1]), (hidden, hidden), (aims.shape[1], hidden)):
        drawn = torch.randn(out, width, generator=generator) / math.sqrt(width)
        weights += [tensor.to(inputs.device).requires_grad_() for tensor in (drawn, torch.zeros(out))]
    optimiser = torch.optim.AdamW(weights, lr=RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * -(-len(inputs) // BATCH))
    with torch.enable_grad():
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(inputs), generator=generator).to(inputs.device).split(BATCH):
                loss = F.cross_entropy(_scores(weights, inputs[rows], generator), aims[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
                falling.step()
    return tuple(weight.detach() for weight in weights)
