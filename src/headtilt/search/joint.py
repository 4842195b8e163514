"""Search over the whole group at once: a low-discrepancy lattice over the product of the levels, then refinement.

The paper walks the levels one after the other, which is exact only where they commute (its limitation 2). Here every
view has a coordinate in each group, so no order has to be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headtilt.errors import OptionError, at_least
from headtilt.geometry.groups import FiniteGroup, Group, check_levels, reflection
from headtilt.model.evidence import Evaluate, Evidence, concatenate
from headtilt.model.predictor import everywhere
from headtilt.search.confidence import Confidence, Orbit, is_curvature, resolve
from headtilt.search.found import Beam, Found, LatticeTrace, Posture, near_identity
from headtilt.search.tree import judged, select

REFERENCE_VIEWS = 16  # as many as all views beside the identity count for, where there are more of them
CANDIDATES = 8  # views among which the pose with the most mass around it is looked for
POSE_WIDTH = 0.25  # distance ‖A − B‖ within which views speak for the same pose: a turn by 10°


@dataclass(frozen=True)
class Joint:
    """How to search the product of several groups.

    Attributes:
        levels: The groups; a pose does the first, then the second, and so on. `ITS` fills in its own where there are
            none.
        budget: Views per image.
        hypotheses: Hypotheses K to keep and refine, at most one per label.
        confidence: "energy", "bayesian" or a callable; curvature has no meaning on a lattice.
        rounds: Refinement rounds; each spends 2·L views around each of the best hypotheses, with half the step of the
            last, and half of the hypotheses go before the next (successive halving).
    """

    levels: tuple[Group, ...] = ()
    budget: int = 72
    hypotheses: int = 3
    confidence: str | Confidence = "energy"
    rounds: int = 0

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("hypotheses", 1), ("rounds", 0)):
            object.__setattr__(self, name, at_least(name, getattr(self, name), least))
        if self.levels != ():
            check_levels(self.levels, 1)
        object.__setattr__(self, "levels", tuple(self.levels))
        check_pointwise(self.confidence)
        if self.levels and self.coarse < 1:
            raise OptionError(
                f"budget must leave views for the lattice after {self.budget - self.coarse} for {self.rounds} rounds; "
                f"got {self.budget}. Use more views or fewer rounds."
            )

    @property
    def draws(self) -> bool:
        """Whether the search draws random numbers: never."""
        return False

    @property
    def survivors(self) -> list[int]:
        """Hypotheses that each round refines."""
        return [max(self.hypotheses >> number, 1) for number in range(self.rounds)]

    @property
    def coarse(self) -> int:
        """Views that the lattice gets: elements of finite groups are shown once each."""
        halved = min(self.rounds, self.hypotheses.bit_length())  # afterwards one is left; a file may ask for 10**12
        refined = sum(self.hypotheses >> number for number in range(halved)) + self.rounds - halved
        left = self.budget - refined * 2 * len(self.levels)
        return min(left, elements(self.levels) or left)

    def judged(self, seen: Seen, root: Evidence) -> Found:
        """Return the best hypotheses among views seen so far."""
        return harvest(self.levels, seen, judge(resolve(self.confidence), seen), self.hypotheses, root)

    @property
    def most_views(self) -> int:
        """Most views of one image."""
        return self.budget if self.rounds else self.coarse

    def search(self, evaluate: Evaluate, root: Evidence) -> Found:
        """Return the best hypotheses over the lattice and its refinements.

        Args:
            evaluate: What the classifier says of views.
            root: Evidence (B, …) of the images as they came; the lattice holds the identity and inherits it.
        """
        measure = resolve(self.confidence)
        points = lattice(self.levels, self.coarse).to(root.logits)
        seen = look(evaluate, self.levels, points[None], root)
        step = torch.tensor([first_step(group, self.coarse) for group in self.levels]).to(points)
        for keep in self.survivors:
            best = select(judge(measure, seen)[:, None], seen.evidence.labels[:, None], keep)
            centres = seen.coordinates.gather(1, best.clamp_min(0)[..., None].expand(-1, -1, len(step)))
            moves = torch.cat([torch.diag(step), -torch.diag(step)])
            around = wrap(self.levels, (centres[:, :, None] + moves).flatten(1, 2))
            seen = join(seen, look(evaluate, self.levels, around))
            step = step / 2
        return self.judged(seen, root)


@dataclass(frozen=True)
class Seen:
    """Views of a batch: coordinates (B, V, L), poses (B, V, 3, 3) and evidence (B, V, …)."""

    coordinates: Tensor
    poses: Tensor
    evidence: Evidence


def check_pointwise(confidence: str | Confidence) -> None:
    """Raise `OptionError` for the group confidence, which needs an orbit."""
    if is_curvature(confidence):
        raise OptionError(
            'confidence must be "energy", "bayesian" or a callable here; "group" needs orbits. Use search="tree".'
        )
    resolve(confidence)


def elements(levels: Sequence[Group]) -> int | None:
    """Return how many poses there are where all levels are finite groups, None where there is no end of them."""
    if not all(isinstance(group, FiniteGroup) for group in levels):
        return None
    return math.prod(len(group.grid(1)) for group in levels)


def every_element(levels: Sequence[Group]) -> Tensor:
    """Return the parameters (E, L) of all poses of finite groups, the identity's first."""
    return torch.cartesian_prod(*(group.grid(1).double() for group in levels)).reshape(-1, len(levels))


def lattice(levels: Sequence[Group], count: int, shift: Tensor | None = None) -> Tensor:
    """Return `count` points (count, L) that cover the product of the groups evenly; index count // 2 is the identity.

    The first full turn (or else the first level) is sampled evenly; the others follow an additive sequence with the
    generalised golden ratio, so that any stretch of the turn sees the whole range of the others.

    Args:
        levels: The groups.
        count: How many points.
        shift: (L,) in [0, 1): moves the lattice along each coordinate, for random lattices in fitting.
    """
    if count == elements(levels):
        return every_element(levels).roll(count // 2, 0)
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


def spread(group: Group, unit: Tensor) -> Tensor:
    """Return parameters for numbers in [0, 1); 1/2 is the identity."""
    if isinstance(group, FiniteGroup):
        return torch.floor((unit + 0.5) % 1 * 4)
    return torch.where(unit < 0.5, (1 - 2 * unit) * group.low, (2 * unit - 1) * group.high)


def matrices(levels: Sequence[Group], coordinates: Tensor) -> Tensor:
    """Return the poses (…, 3, 3) of coordinates (…, L): the first level done first."""
    pose = levels[0].matrix(coordinates[..., 0])
    for place, group in enumerate(levels[1:], start=1):
        pose = group.matrix(coordinates[..., place]) @ pose
    return pose


def wrap(levels: Sequence[Group], coordinates: Tensor) -> Tensor:
    """Return the coordinates (…, L) brought back into the groups' ranges: wrapped where periodic, clamped elsewhere."""
    columns = []
    for place, group in enumerate(levels):
        t = coordinates[..., place]
        if isinstance(group, FiniteGroup):
            t = t.round() % 4
        elif group.periodic:
            t = (t - group.low) % (group.high - group.low) + group.low
        else:
            t = t.clamp(group.low, group.high)
        columns.append(t)
    return torch.stack(columns, dim=-1)


def first_step(group: Group, count: int) -> float:
    """Return the first refinement step along a group after a lattice of `count` points."""
    if isinstance(group, FiniteGroup):
        return 1.0
    return 2 * math.pi / max(count, 8) if group.periodic else group.reach / 3


def look(evaluate: Evaluate, levels: Sequence[Group], coordinates: Tensor, root: Evidence | None = None) -> Seen:
    """Return the views at coordinates (B, V, L).

    With a root they are (1, V, L) for all images alike, and the view at V // 2 is the identity and inherits its
    evidence.
    """
    batch, count = (coordinates if root is None else root.logits).shape[0], coordinates.shape[1]
    poses = matrices(levels, coordinates)
    if root is None:
        index = torch.arange(batch, device=poses.device).repeat_interleave(count)
        return Seen(coordinates, poses, evaluate(index, poses.reshape(-1, 3, 3)).reshape(batch, count))
    found, here = root.reshape(batch, 1), count // 2
    if count > 1:
        others = torch.cat([poses[0, :here], poses[0, here + 1 :]])
        fresh = everywhere(evaluate, batch, others).reshape(batch, count - 1)
        before, after = fresh.at(slice(None), slice(None, here)), fresh.at(slice(None), slice(here, None))
        found = concatenate([before, found, after], dim=1)
    return Seen(coordinates.expand(batch, -1, -1), poses.expand(batch, -1, -1, -1), found)


def join(first: Seen, second: Seen) -> Seen:
    """Return the views of both."""
    return Seen(
        torch.cat([first.coordinates, second.coordinates], dim=1),
        torch.cat([first.poses, second.poses], dim=1),
        concatenate([first.evidence, second.evidence], dim=1),
    )


def judge(measure: Confidence, seen: Seen) -> Tensor:
    """Return the confidence (B, V) of each view under a pointwise measure."""
    batch, views = seen.coordinates.shape[:2]
    active = torch.ones(batch, 1, dtype=torch.bool, device=seen.poses.device)
    return judged(measure, seen.evidence.reshape(batch, 1, views), Orbit(reflection(), views), active)[:, 0]


def harvest(levels: tuple[Group, ...], seen: Seen, confidence: Tensor, keep: int, root: Evidence) -> Found:
    """Return the best views as hypotheses, at most one per label, and the marginals over all of them."""
    chosen = select(confidence[:, None], seen.evidence.labels[:, None], keep)
    rows, index = torch.arange(chosen.shape[0], device=chosen.device)[:, None], chosen.clamp_min(0)
    taken = confidence[rows, index]
    weighed = seen.evidence.logits + log_weights(seen.poses)[..., None]
    close = near_identity(seen.poses)[..., None]
    upright = seen.evidence.upright
    return Found(
        beam=Beam(
            pose=seen.poses[rows, index],
            evidence=seen.evidence.at(rows, index),
            confidence=taken,
            accumulated=taken,
            active=chosen >= 0,
        ),
        trace=(
            LatticeTrace(levels, seen.coordinates, seen.poses, confidence, seen.evidence.energy, seen.evidence.labels),
        ),
        root=root.logits,
        marginal=weighed.logsumexp(1),
        near=weighed.masked_fill(~close, float("-inf")).logsumexp(1),
        views=torch.full_like(chosen[:, 0], confidence.shape[1]),
        posture=None if upright is None else posture(levels, seen.coordinates, seen.poses, upright[..., 0]),
    )


def log_weights(poses: Tensor) -> Tensor:
    """Return by how much the evidence of views (…, V) counts: a sum over poses must not depend on how many are seen.

    The image as it came counts as one view. All others together count as 16 where they are more: else an upright image,
    which has one view that is right, would lose to a dense lattice.

    Args:
        poses: (…, V, 3, 3).
    """
    weight = -math.log(max((poses.shape[-3] - 1) / REFERENCE_VIEWS, 1))
    return torch.where(is_identity(poses), 0.0, weight).to(poses)


def is_identity(poses: Tensor) -> Tensor:
    """Return whether poses (…, 3, 3) are exactly the identity."""
    return (poses == torch.eye(3, dtype=poses.dtype, device=poses.device)).flatten(-2).all(-1)


def posture(levels: Sequence[Group], coordinates: Tensor, poses: Tensor, upright: Tensor) -> Posture:
    """Return how images lie by the posterior over views: where most of it is gathered, and the mean there.

    Args:
        levels: The groups.
        coordinates: (B, V, L), parameters of the views.
        poses: (B, V, 3, 3).
        upright: (B, V), log-odds that a view is upright.
    """
    weighed = upright + log_weights(poses)
    share = weighed.softmax(1)
    candidates = share.topk(min(CANDIDATES, share.shape[1]), dim=1).indices
    rows = torch.arange(share.shape[0], device=share.device)[:, None]
    apart = (poses[rows, candidates][:, :, None] - poses[:, None]).flatten(3).square().sum(3)
    around = share[:, None] * torch.exp(-apart / (2 * POSE_WIDTH**2))
    best = around.sum(2).argmax(1, keepdim=True)
    local = around.gather(1, best[..., None].expand(-1, -1, around.shape[2]))[:, 0]
    centre = coordinates[rows, candidates.gather(1, best)]
    moved = centre[:, 0] + (local[..., None] * _difference(levels, coordinates - centre)).sum(1) / local.sum(1)[:, None]
    close = near_identity(poses)
    here = weighed.masked_fill(~close, float("-inf")).logsumexp(1)
    away = weighed.masked_fill(close, float("-inf")).logsumexp(1)
    return Posture(matrices(levels, wrap(levels, moved)), away - here, local.sum(1).clamp_max(1))


def _difference(levels: Sequence[Group], apart: Tensor) -> Tensor:
    """Return differences of coordinates (…, L) by the shorter way round; elements of finite groups have no mean."""
    columns = []
    for place, group in enumerate(levels):
        difference = apart[..., place]
        if isinstance(group, FiniteGroup):
            difference = torch.zeros_like(difference)
        elif group.periodic:
            turn = group.high - group.low
            difference = (difference + turn / 2) % turn - turn / 2
        columns.append(difference)
    return torch.stack(columns, dim=-1)
