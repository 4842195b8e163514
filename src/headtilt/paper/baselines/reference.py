"""The search as the paper's public code behaves, written anew, with its mistakes, to compare with.

Kept on purpose: grids with both end points, logits averaged over passes, one smoothed curve for all hypotheses, one
child for each hypothesis, level one evaluated once for each hypothesis. Not kept: its damage to the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.errors import OptionError, at_least
from headtilt.geometry.groups import rotation, scale, shear_x
from headtilt.geometry.warp import check_images, warp

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class ReferenceResult:
    """What the reference search found.

    Attributes:
        labels: (B,), the label of the leading hypothesis.
        pose: (B, 3, 3), the matrices that bring the images into the canonical form of that hypothesis.
        logits: (B, Y), the mean logits there.
        hypothesis_labels: (B, K), the labels of all hypotheses, in their order.
        hypothesis_scores: (B, K), their scores, summed over the levels.
    """

    labels: Tensor
    pose: Tensor
    logits: Tensor
    hypothesis_labels: Tensor
    hypothesis_scores: Tensor


@dataclass(frozen=True)
class ReferenceITS:
    """The paper's search as its public code does it.

    Attributes:
        model: A classifier of images (B, C, H, W).
        levels: 3 for rotation, scale, shear; 5 for rotation and scale once more.
        samples: Samples of each orbit, odd.
        hypotheses: How many trajectories are followed.
        passes: Monte-Carlo passes with dropout on.
        seed: Of the dropout masks; the caller's random stream is left alone.

    Convention:
        Factors and angles of the grids move the content. The step of a level follows those before it, and every view is
        resampled from the original image.
    """

    model: nn.Module
    levels: int = 3
    samples: int = 17
    hypotheses: int = 3
    passes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.levels not in (3, 5):
            raise OptionError(f"levels must be 3 or 5; got {self.levels!r}.")
        at_least("samples", self.samples, 3)
        at_least("hypotheses", self.hypotheses, 1)
        at_least("passes", self.passes, 1)
        rotation().paper().check_samples(self.samples)

    def orbits(self) -> list[Tensor]:
        """Return the steps (N, 3, 3) of each level, float64."""
        turns, sizes, slants = rotation().paper(), scale(0.25).paper(), shear_x(0.25)
        return [group.orbit(self.samples) for group in (turns, sizes, slants, turns, sizes)[: self.levels]]

    @torch.no_grad()
    def search(self, images: Tensor) -> ReferenceResult:
        """Return labels, poses and logits for images (B, C, H, W)."""
        check_images(images)
        device = images.device
        pose = torch.eye(3, dtype=torch.float64, device=device).expand(len(images), self.hypotheses, 3, 3)
        total = torch.zeros(len(images), self.hypotheses, device=device)
        with sampling_dropout(self.model), own_randomness(self.seed, device):
            for orbit in self.orbits():
                poses = orbit.to(device) @ pose[:, :, None]
                logits = self._mean_logits(images, poses)
                score = scores(-logits.logsumexp(-1))
                index = unique_best(score, logits.argmax(-1))
                pose, logits = _at(poses, index), _at(logits, index)
                total = total + _at(score, index)
        lead = total.argsort(dim=1, descending=True, stable=True)[:, 0]
        best = _at(logits, lead)
        return ReferenceResult(best.argmax(-1), _at(pose, lead).to(images.dtype), best, logits.argmax(-1), total)

    def _mean_logits(self, images: Tensor, poses: Tensor) -> Tensor:
        """Return the logits (B, K, N, Y) of all views under poses (B, K, N, 3, 3), averaged over the passes."""
        views = warp(images.repeat_interleave(math.prod(poses.shape[1:3]), dim=0), poses.flatten(0, 2))
        logits = self.model(views)
        for _ in range(self.passes - 1):
            logits = logits + self.model(views)
        mean: Tensor = logits.unflatten(0, poses.shape[:3]) / self.passes
        return mean


def scores(energy: Tensor) -> Tensor:
    """Return the curvature (B, K, N) of the smoothed energy (B, K, N): positive in a valley, which wins.

    The smoothing sums over hypotheses, as a convolution without groups does: all of them get the same curve.
    """
    weight = torch.arange(-2, 3, dtype=energy.dtype, device=energy.device).square().mul(-0.5).exp()
    kernel = (weight / weight.sum()).expand(energy.shape[1], energy.shape[1], 5)
    smooth = F.conv1d(F.pad(energy, (2, 2), mode="replicate"), kernel)
    padded = F.pad(smooth, (1, 1), mode="replicate")
    return padded[..., :-2] - 2 * smooth + padded[..., 2:]


def unique_best(score: Tensor, labels: Tensor) -> Tensor:
    """Return for each hypothesis the sample (B, K) of best score whose label no earlier hypothesis has taken.

    Where no such sample is left the answer is 0, silently. Both arguments are (B, K, N).
    """
    chosen: list[Tensor] = []
    taken = labels.new_full((len(labels), 0), -1)
    for hypothesis in range(score.shape[1]):
        own = labels[:, hypothesis]
        free = (own[:, :, None] != taken[:, None, :]).all(-1)
        best = score[:, hypothesis].masked_fill(~free, -math.inf).argmax(-1)
        best = torch.where(free.any(-1), best, 0)
        chosen.append(best)
        taken = torch.cat([taken, own.gather(1, best[:, None])], dim=1)
    return torch.stack(chosen, dim=1)


@contextmanager
def sampling_dropout(model: nn.Module) -> Iterator[None]:
    """Put dropout layers in training mode and all others in evaluation mode; put every mode back in the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, _DROPOUT)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch for a while; put the random streams of the CPU and of the device back in the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return values (B, …, N, *rest) at index (B, …) of the axis that follows the index's own."""
    axis = index.ndim
    shape = [*index.shape, 1, *values.shape[axis + 1 :]]
    wide = index.reshape([*index.shape, *[1] * (values.ndim - axis)]).expand(shape)
    return values.gather(axis, wide).squeeze(axis)
