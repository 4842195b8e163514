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

from headtilt.confidence import Confidence, Orbit, resolve
from headtilt.errors import OptionError, at_least
from headtilt.evidence import Evaluate, Evidence, concatenate
from headtilt.groups import FiniteGroup, Group, check_levels, reflection
from headtilt.predictor import everywhere
from headtilt.result import Beam, Found, LatticeTrace, near_identity
from headtilt.search.tree import judged, select

GLANCES = 6  # views that may already decide


@dataclass(frozen=True)
class Joint:
    """How to search the product of several groups.

    Attributes:
        levels: The groups; a pose does the first, then the second, and so on.
        budget: Views per image.
        hypotheses: Hypotheses K to keep and refine, at most one per label.
        confidence: "energy", "bayesian" or a callable; curvature has no meaning on a lattice.
        rounds: Refinement rounds; each spends 2·L views around each of the best hypotheses, with half the step of the
            last, and half of the hypotheses go before the next (successive halving).
    """

    levels: tuple[Group, ...]
    budget: int = 72
    hypotheses: int = 3
    confidence: str | Confidence = "energy"
    rounds: int = 0

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("hypotheses", 1), ("rounds", 0)):
            object.__setattr__(self, name, at_least(name, getattr(self, name), least))
        check_levels(self.levels, 1)
        object.__setattr__(self, "levels", tuple(self.levels))
        check_pointwise(self.confidence)
        if self.coarse < 1:
            raise OptionError(
                f"budget must leave views for the lattice after {self.budget - self.coarse} for {self.rounds} rounds; "
                f"got {self.budget}. Use more views or fewer rounds."
            )

    @property
    def survivors(self) -> list[int]:
        """Hypotheses that each round refines."""
        return [max(self.hypotheses >> number, 1) for number in range(self.rounds)]

    @property
    def coarse(self) -> int:
        """Views that the lattice gets."""
        halved = min(self.rounds, self.hypotheses.bit_length())  # afterwards one is left; a file may ask for 10**12
        refined = sum(self.hypotheses >> number for number in range(halved)) + self.rounds - halved
        return self.budget - refined * 2 * len(self.levels)

    @property
    def glances(self) -> list[int]:
        """Places in the lattice of a few views that cover it evenly, the identity in their middle."""
        stride = max(self.coarse // GLANCES, 1)
        around = range(self.coarse // 2 - GLANCES // 2 * stride, self.coarse, stride)
        return [place for place in around if place >= 0][:GLANCES] if self.coarse >= GLANCES else [self.coarse // 2]

    def glance(self, evaluate: Evaluate, root: Evidence) -> Seen:
        """Return the first few views of the lattice, which may already decide; `search` goes on from there."""
        points = lattice(self.levels, self.coarse)[self.glances].to(root.logits)
        return look(evaluate, self.levels, points[None], root)

    def judged(self, seen: Seen) -> Found:
        """Return the best hypotheses among views seen so far."""
        return harvest(self.levels, seen, judge(resolve(self.confidence), seen), self.hypotheses)

    def search(self, evaluate: Evaluate, root: Evidence, seen: Seen | None = None) -> Found:
        """Return the best hypotheses over the lattice and its refinements.

        Args:
            evaluate: What the classifier says of views.
            root: Evidence (B, …) of the images as they came; the lattice holds the identity and inherits it.
            seen: What a `glance` at these images saw, which is not looked at again.
        """
        measure = resolve(self.confidence)
        points = lattice(self.levels, self.coarse).to(root.logits)
        if seen is None:
            seen = look(evaluate, self.levels, points[None], root)
        else:
            known = set(self.glances)
            rest = points[[place for place in range(self.coarse) if place not in known]]
            if len(rest):
                seen = join(seen, look_everywhere(evaluate, self.levels, rest, root.logits.shape[0]))
        step = torch.tensor([first_step(group, self.coarse) for group in self.levels]).to(points)
        for keep in self.survivors:
            best = select(judge(measure, seen)[:, None], seen.evidence.labels[:, None], keep)
            centres = seen.coordinates.gather(1, best.clamp_min(0)[..., None].expand(-1, -1, len(step)))
            moves = torch.cat([torch.diag(step), -torch.diag(step)])
            around = wrap(self.levels, (centres[:, :, None] + moves).flatten(1, 2))
            seen = join(seen, look(evaluate, self.levels, around))
            step = step / 2
        return self.judged(seen)


@dataclass(frozen=True)
class Seen:
    """Views of a batch: coordinates (B, V, L), poses (B, V, 3, 3) and evidence (B, V, …)."""

    coordinates: Tensor
    poses: Tensor
    evidence: Evidence

    def at(self, rows: Tensor) -> Seen:
        """Return the views of the images at `rows`."""
        return Seen(self.coordinates[rows], self.poses[rows], self.evidence.at(rows))


def check_pointwise(confidence: str | Confidence) -> None:
    """Raise `OptionError` for the group confidence, which needs an orbit."""
    if confidence == "group":
        raise OptionError(
            'confidence must be "energy", "bayesian" or a callable here; "group" needs orbits. Use search="tree".'
        )
    resolve(confidence)


def lattice(levels: Sequence[Group], count: int, shift: Tensor | None = None) -> Tensor:
    """Return `count` points (count, L) that cover the product of the groups evenly; index count // 2 is the identity.

    The first full turn (or else the first level) is sampled evenly; the others follow an additive sequence with the
    generalised golden ratio, so that any stretch of the turn sees the whole range of the others.

    Args:
        levels: The groups.
        count: How many points.
        shift: (L,) in [0, 1): moves the lattice along each coordinate, for random lattices in fitting.
    """
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


def look_everywhere(evaluate: Evaluate, levels: Sequence[Group], points: Tensor, batch: int) -> Seen:
    """Return the views of each of `batch` images at the same points (V, L)."""
    poses = matrices(levels, points)
    evidence = everywhere(evaluate, batch, poses).reshape(batch, points.shape[0])
    return Seen(points.expand(batch, -1, -1), poses.expand(batch, -1, -1, -1), evidence)


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


def harvest(levels: tuple[Group, ...], seen: Seen, confidence: Tensor, keep: int) -> Found:
    """Return the best views as hypotheses, at most one per label, and the marginals over all of them."""
    chosen = select(confidence[:, None], seen.evidence.labels[:, None], keep)
    rows, index = torch.arange(chosen.shape[0], device=chosen.device)[:, None], chosen.clamp_min(0)
    taken = confidence[rows, index]
    logits = seen.evidence.logits
    close = near_identity(seen.poses)[..., None]
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
        marginal=logits.logsumexp(1),
        near=logits.masked_fill(~close, float("-inf")).logsumexp(1),
        views=torch.full_like(chosen[:, 0], confidence.shape[1]),
    )
