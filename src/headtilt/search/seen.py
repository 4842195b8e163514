"""Views that a search has seen, and what they come to: the best hypotheses, sums over all views, how images lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headtilt.geometry.groups import Group, matrices, shortest_difference, wrap
from headtilt.model.evidence import Evidence, concatenate
from headtilt.search.found import Beam, Found, LatticeTrace, Posture
from headtilt.search.lattice import farthest

REFERENCE_VIEWS = 16  # as many as all views beside the identity count for, where there are more of them
CANDIDATES = 8  # views among which the pose with the most mass around it is looked for
POSE_WIDTH = 0.25  # distance ‖A − B‖ within which views speak for the same pose: a turn by 10°
NEAR = 0.5  # distance ‖T − I‖ up to which a pose moves an image little, or half of the farthest pose if that is less


@dataclass(frozen=True)
class Seen:
    """Views of a batch.

    Attributes:
        coordinates: (B, V, L).
        poses: (B, V, 3, 3).
        evidence: (B, V, …).
        looked: (B, V), which of them the model was shown; what stands at the others means nothing.
        others: How many poses beside the identity they stand for: those of a lattice, seen or not.
        prior: (B, V), by how much each counted before it was seen, as a logarithm; None where nothing was guessed.
    """

    coordinates: Tensor
    poses: Tensor
    evidence: Evidence
    looked: Tensor
    others: int
    prior: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """By how much each view counts (B, V), as a logarithm: −∞ for those that were not shown."""
        weights = log_weights(self.poses, self.others)
        weights = weights if self.prior is None else weights + self.prior
        return weights.masked_fill(~self.looked, float("-inf"))


def join(first: Seen, second: Seen) -> Seen:
    """Return the views of both; something was guessed for both or for none."""
    guessed = first.prior is not None and second.prior is not None
    return Seen(
        torch.cat([first.coordinates, second.coordinates], dim=1),
        torch.cat([first.poses, second.poses], dim=1),
        concatenate([first.evidence, second.evidence], dim=1),
        torch.cat([first.looked, second.looked], dim=1),
        first.others + second.others,
        torch.cat([first.prior, second.prior], dim=1) if guessed else None,  # type: ignore[list-item]
    )


def harvest(levels: tuple[Group, ...], seen: Seen, confidence: Tensor, keep: int, root: Evidence) -> Found:
    """Return the best views as hypotheses, at most one per label, and the marginals over all of them."""
    chosen = select(confidence[:, None], seen.evidence.labels[:, None], keep)
    rows, index = torch.arange(chosen.shape[0], device=chosen.device)[:, None], chosen.clamp_min(0)
    taken = confidence[rows, index]
    weights, close = seen.weights, near_identity(seen.poses, levels)
    weighed = seen.evidence.logits + weights[..., None]
    upright, lies = seen.evidence.upright, None
    if upright is not None:
        lies = posture(levels, seen.coordinates, seen.poses, upright[..., 0] + weights, close)
    return Found(
        beam=Beam(
            pose=seen.poses[rows, index],
            evidence=seen.evidence.at(rows, index),
            confidence=taken,
            accumulated=taken,
            active=chosen >= 0,
        ),
        trace=(
            LatticeTrace(
                levels,
                seen.coordinates,
                seen.poses,
                confidence,
                seen.evidence.energy.masked_fill(~seen.looked, float("inf")),
                seen.evidence.labels.masked_fill(~seen.looked, -1),
            ),
        ),
        root=root.logits,
        marginal=weighed.logsumexp(1),
        near=weighed.masked_fill(~close[..., None], float("-inf")).logsumexp(1),
        views=seen.looked.sum(1),
        posture=lies,
    )


def select(scores: Tensor, labels: Tensor, keep: int) -> Tensor:
    """Return the best candidates (B, keep) as indices into K·N, at most one per label; −1 where none is left.

    Args:
        scores: (B, K, N), −inf where a candidate may not be chosen.
        labels: (B, K, N).
        keep: How many to keep.
    """
    scores, labels = scores.flatten(1), labels.flatten(1)
    chosen = []
    for _ in range(keep):
        best = scores.max(dim=1, keepdim=True)
        chosen.append(torch.where(best.values > float("-inf"), best.indices, -1))
        scores = scores.masked_fill(labels == labels.gather(1, best.indices), float("-inf"))
    return torch.cat(chosen, dim=1)


def log_weights(poses: Tensor, others: int | None = None) -> Tensor:
    """Return by how much the evidence of views (…, V) counts: a sum over poses must not depend on how many are seen.

    The image as it came counts as one view. All others together count as 16 where they are more: else an upright image,
    which has one view that is right, would lose to a dense lattice.

    Args:
        poses: (…, V, 3, 3).
        others: How many poses beside the identity they stand for; as many as there are where nobody says.
    """
    count = poses.shape[-3] - 1 if others is None else others
    weight = -math.log(max(count / REFERENCE_VIEWS, 1))
    return torch.where(is_identity(poses), 0.0, weight).to(poses)


def prior_at(prior: Tensor, lattice: Tensor, poses: Tensor) -> Tensor:
    """Return the prior (B, V) of poses that need not lie on a lattice: that of the nearest pose that does.

    Args:
        prior: (B, P), of the poses of the lattice.
        lattice: (P, 3, 3).
        poses: (B, V, 3, 3).
    """
    nearest = (poses[:, :, None] - lattice.to(poses)).square().flatten(3).sum(3).argmin(2)
    return prior.gather(1, nearest)


def is_identity(poses: Tensor) -> Tensor:
    """Return whether poses (…, 3, 3) are exactly the identity."""
    return (poses == torch.eye(3, dtype=poses.dtype, device=poses.device)).flatten(-2).all(-1)


def near_identity(poses: Tensor, levels: Sequence[Group]) -> Tensor:
    """Return whether poses (…, 3, 3) move the image little: ‖T − I‖_F ≤ 1/2, a rotation by 20° or so.

    Where the levels move it but little at the most, half of that is the limit: else no pose at all would be far.
    """
    identity = torch.eye(3, dtype=poses.dtype, device=poses.device)
    return (poses - identity).flatten(-2).norm(dim=-1) <= min(NEAR, farthest(tuple(levels)) / 2)


def posture(
    levels: Sequence[Group], coordinates: Tensor, poses: Tensor, weighed: Tensor, close: Tensor | None = None
) -> Posture:
    """Return how images lie by the posterior over views: where most of it is gathered, and the mean there.

    Args:
        levels: The groups.
        coordinates: (B, V, L), parameters of the views.
        poses: (B, V, 3, 3).
        weighed: (B, V), log-odds that a view is upright, and by how much the view counts.
        close: (B, V), see `near_identity`, where that is known already.
    """
    share = weighed.softmax(1)
    candidates = share.topk(min(CANDIDATES, share.shape[1]), dim=1).indices
    rows = torch.arange(share.shape[0], device=share.device)[:, None]
    apart = (poses[rows, candidates][:, :, None] - poses[:, None]).flatten(3).square().sum(3)
    around = share[:, None] * torch.exp(-apart / (2 * POSE_WIDTH**2))
    best = around.sum(2).argmax(1, keepdim=True)
    local = around.gather(1, best[..., None].expand(-1, -1, around.shape[2]))[:, 0]
    centre = coordinates[rows, candidates.gather(1, best)]
    moved = (
        centre[:, 0]
        + (local[..., None] * shortest_difference(levels, coordinates - centre)).sum(1) / local.sum(1)[:, None]
    )
    close = near_identity(poses, levels) if close is None else close
    return Posture(matrices(levels, wrap(levels, moved)), tilted_odds(weighed, close), local.sum(1).clamp_max(1))


def tilted_odds(weighed: Tensor, close: Tensor) -> Tensor:
    """Return the log-odds (B,) that images came tilted.

    Args:
        weighed: (B, V), log-odds that a view is upright, and by how much the view counts.
        close: (B, V), see `near_identity`.
    """
    here = weighed.masked_fill(~close, float("-inf")).logsumexp(1)
    away = weighed.masked_fill(close, float("-inf")).logsumexp(1)
    return away - here
