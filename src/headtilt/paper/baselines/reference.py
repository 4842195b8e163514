"""The search as the paper's public code behaves, written anew, with its mistakes, to compare with.

Kept on purpose: grids with both end points and one sample beyond each, logits averaged over passes, one smoothed curve
for all hypotheses, one child for each hypothesis, a leader that never changes. Not kept: its damage to the model, whose
batch normalisation it puts in training mode.
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
from headtilt.geometry.groups import rotation, shear_x
from headtilt.geometry.warp import check_images, invert, warp

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DEVIATION, RADIUS = 2.0, 3  # of the smoothing kernel, in samples


@dataclass(frozen=True)
class ReferenceResult:
    """What the reference search found.

    Attributes:
        labels: (B,), the label of the leading hypothesis.
        pose: (B, 3, 3), the matrices that bring the images into the canonical form of that hypothesis.
        logits: (B, Y), the mean logits there.
        hypothesis_labels: (B, K), the labels of all hypotheses, in their order.
        hypothesis_scores: (B, K), the best score of their orbits, summed over the levels; the same for all.
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
        model: A classifier of square images (B, C, S, S).
        levels: 3 for rotation, scale, shear; 5 for rotation and scale once more.
        samples: Samples of each orbit, odd; one more beyond each end is evaluated, and never chosen.
        hypotheses: How many trajectories are followed.
        passes: Monte-Carlo passes with dropout on; a single pass is without dropout.
        seed: Of the dropout masks; the caller's random stream is left alone.

    Convention:
        The grids are those of the matrices by which the code reads an image: rotation(t), diag(1 + t) and
        [[1, t], [0, 1]], a new one to the right of those before it. What an image shows is moved by their inverse: the
        content of a step of the scale grid grows by 1 / (1 + t).
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
        """Return the sampling matrices (N + 2, 3, 3) of each level, float64."""
        reach = (math.pi, 0.25, 0.25, math.pi, 0.25)
        matrices = (rotation().matrix, _factor, shear_x(0.25).matrix, rotation().matrix, _factor)
        grids = [grid(domain, self.samples) for domain in reach]
        return [matrix(t) for matrix, t in zip(matrices, grids, strict=True)][: self.levels]

    @torch.no_grad()
    def search(self, images: Tensor) -> ReferenceResult:
        """Return labels, poses and logits for images (B, C, S, S)."""
        check_images(images)
        device, count = images.device, len(images)
        read = torch.eye(3, dtype=torch.float64, device=device).expand(count, 1, 3, 3)
        total = torch.zeros(count, self.hypotheses, device=device)
        with sampling_dropout(self.model, self.passes > 1), own_randomness(self.seed, device):
            for orbit in self.orbits():
                reads = read[:, :, None] @ orbit.to(device)
                # At the first level all hypotheses are the image as it came, and the code takes the first one's views.
                reads, logits = (
                    part.expand(-1, self.hypotheses, *part.shape[2:])
                    for part in (reads, self._mean_logits(images, reads))
                )
                score = scores(logits.logsumexp(-1))
                reads, logits = reads[:, :, 1:-1], logits[:, :, 1:-1]
                index = unique_best(score, logits.argmax(-1))
                read, logits = _at(reads, index), _at(logits, index)
                total = total + score.amax(-1)  # of the whole orbit, chosen or not
        lead = total.argsort(dim=1, descending=True, stable=True)[:, 0]
        best, pose = _at(logits, lead), invert(_at(read, lead))
        return ReferenceResult(best.argmax(-1), pose.to(images.dtype), best, logits.argmax(-1), total)

    def _mean_logits(self, images: Tensor, reads: Tensor) -> Tensor:
        """Return the logits (B, K, N, Y) of views read by matrices (B, K, N, 3, 3), averaged over the passes."""
        views = warp(images.repeat_interleave(math.prod(reads.shape[1:3]), dim=0), invert(reads.flatten(0, 2)))
        logits = self.model(views)
        for _ in range(self.passes - 1):
            logits = logits + self.model(views)
        mean: Tensor = logits.unflatten(0, reads.shape[:3]) / self.passes
        return mean


def grid(domain: float, samples: int) -> Tensor:
    """Return the parameters (N + 2,), float64: both ends of ±domain, and 2 · domain / N beyond each of them."""
    inner = torch.linspace(-domain, domain, samples, dtype=torch.float64)
    step = 2 * domain / samples  # not the grid's own step, which is 2 · domain / (N − 1)
    return torch.cat([inner[:1] - step, inner, inner[-1:] + step])


def _factor(t: Tensor) -> Tensor:
    """Return diag(1 + t, 1 + t, 1) for parameters (N,)."""
    one = torch.ones_like(t)
    return torch.stack([1 + t, 1 + t, one], dim=-1).diag_embed()


def scores(confidence: Tensor) -> Tensor:
    """Return the scores (B, K, N) of orbits whose logsumexp (B, K, N + 2) is given: high at a smoothed peak.

    The smoothing sums over hypotheses, as a convolution without groups does: all of them get the same curve. Its second
    derivative is taken by two central differences, two samples wide, one-sided at the ends.
    """
    hypotheses = confidence.shape[1]
    weight = torch.arange(-RADIUS, RADIUS + 1, dtype=confidence.dtype, device=confidence.device)
    kernel = (-0.5 * (weight / DEVIATION) ** 2).softmax(0).expand(hypotheses, hypotheses, -1)
    smooth = F.conv1d(F.pad(confidence, (RADIUS, RADIUS), mode="replicate"), kernel)
    slope = torch.gradient(smooth, dim=-1)[0]
    return -torch.gradient(slope, dim=-1)[0][..., 1:-1]


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
def sampling_dropout(model: nn.Module, sampling: bool = True) -> Iterator[None]:
    """Put dropout layers in training mode, if asked, and all others in evaluation mode; put modes back in the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = sampling and isinstance(module, _DROPOUT)
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
