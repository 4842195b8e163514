"""Proposals: a small network that guesses, from the image as it came, which poses are worth a view.

It reads what the head reads, of one view, and gives a distribution over the poses of the search's lattice. Every view
of a fit is such an image, whose tilt is known, so it is fitted on the very views that the head is fitted on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from headtilt.calibration.balance import InSingle
from headtilt.calibration.layers import SeededDropout, linear, seed_layers
from headtilt.calibration.sampler import Orbits
from headtilt.search.lattice import nearness

FEWEST_STEPS, MOST_STEPS, PASSES = 500, 4000, 8  # over all views of the fit
BATCH, LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 256, 2e-3, 0.1, 0.3
FIRST = 1 / 4  # of a batch are images as they came, which have no padding; the others are views of them
FARTHEST = 10  # deviations from the mean that are taken seriously


class Proposals(InSingle):
    """A distribution over the poses of a lattice, from the features of one view.

    Args:
        mean: (D,), mean of the features.
        deviation: (D,), their standard deviation.
        poses: How many poses the lattice has.
        hidden: Width of the hidden layers.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, *, poses: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("deviation", deviation.detach().clone())
        self.network = nn.Sequential(
            SeededDropout(DROPOUT),
            linear(len(mean), hidden),
            nn.GELU(),
            SeededDropout(DROPOUT),
            linear(hidden, hidden),
            nn.GELU(),
            linear(hidden, poses),
        ).to(mean)

    @property
    def poses(self) -> int:
        """Poses of the lattice."""
        return int(self.network[-1].out_features)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        """Return how probable it is that each pose turns the image upright, (…, poses), as logarithms."""
        standard = ((features.to(self.mean) - self.mean) / self.deviation).clamp(-FARTHEST, FARTHEST)
        guesses: Tensor = self.network(standard)
        return guesses.log_softmax(-1)


def steps(views: int) -> int:
    """Return how many optimiser steps so many views are worth."""
    return min(max(PASSES * views // BATCH, FEWEST_STEPS), MOST_STEPS)


def above_chance(guesses: Tensor) -> Tensor:
    """Return by how much log-probabilities (…, P) are above those of poses that are all as likely."""
    return guesses + math.log(guesses.shape[-1])


def fit_proposals(
    orbits: Orbits,
    rows: Tensor,
    poses: Tensor,
    mean: Tensor,
    deviation: Tensor,
    hidden: int,
    seed: np.random.SeedSequence,
) -> Proposals:
    """Return proposals trained on all views of a fit; the same seed gives the same ones.

    Args:
        orbits: Fit images under some tilt, (n, V, …), with features.
        rows: Which of them to learn from.
        poses: (P, 3, 3), of the search's lattice.
        mean: (D,), mean of the features.
        deviation: (D,), their standard deviation.
        hidden: Width of the hidden layers.
        seed: Seeds initial weights, dropout and batches.
    """
    features = orbits.evidence.features
    assert features is not None
    device = features.device
    generator = torch.Generator(device).manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
    proposals = Proposals(mean, deviation, poses=len(poses), hidden=hidden)
    seed_layers(proposals.network, generator)
    proposals.train()
    optimiser = torch.optim.AdamW(
        proposals.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
    )
    poses, rows, views = poses.to(device), rows.to(device), features.shape[1]
    most = steps(len(rows) * views)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, most)
    with torch.enable_grad():
        for _ in range(most):
            some = rows[torch.randint(len(rows), (BATCH,), generator=generator, device=device)]
            which = torch.randint(views, (BATCH,), generator=generator, device=device)
            which[: round(FIRST * BATCH)] = 0
            wanted = nearness(poses, orbits.poses[some, which] @ orbits.transforms[some])
            total = wanted.sum(1, keepdim=True)
            known = total[:, 0] > 1e-3  # no pose of the lattice is near: nothing is to be learnt
            said = proposals(features[some, which].float()[:, None])[:, 0]
            loss = -((wanted / total.clamp_min(1e-6) * said).sum(1) * known).mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return proposals.eval().requires_grad_(False)
