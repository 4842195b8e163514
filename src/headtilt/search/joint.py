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
from torch.compiler import is_compiling

from headtilt.errors import OptionError, at_least, is_number
from headtilt.geometry.groups import Group, check_levels
from headtilt.model.evidence import Evaluate, Evidence, concatenate
from headtilt.model.views import everywhere
from headtilt.search.confidence import Confidence, Orbit, is_curvature, resolve
from headtilt.search.found import Beam, Found, LatticeTrace, Posture, near_identity
from headtilt.search.lattice import covering, difference, elements, first_step, matrices, wrap
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
        lattice: Poses that a fitted head chooses from: it guesses from the image as it came which of them are likely,
            and only these are looked at, within the budget. None looks at a lattice of `budget` poses, as do models
            that nothing is fitted for or that give no features.
        mass: Probability of the poses that are looked at, at which no more are.
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
    lattice: int | None = None
    mass: float = 0.98

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("hypotheses", 1), ("rounds", 0), ("lattice", 1)):
            if name != "lattice" or self.lattice is not None:
                object.__setattr__(self, name, at_least(name, getattr(self, name), least))
        if not is_number(self.mass) or not 0 < float(self.mass) <= 1:
            raise OptionError(f"mass must be a probability above 0; got {self.mass!r}.")
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

    @property
    def choices(self) -> int:
        """Poses of the lattice from which a fitted head chooses."""
        wished = self.budget if self.lattice is None else self.lattice
        return min(wished, elements(self.levels) or wished)

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
        if self.lattice is None or root.poses is None:
            points, poses = covering(self.levels, self.coarse, root.logits)
            seen = look_around(evaluate, points, poses, root)
        else:
            points, poses = covering(self.levels, self.choices, root.logits)
            seen = look_where_likely(evaluate, points, poses, root, self.coarse, self.mass)
        step = points.new_tensor([first_step(group, self.coarse) for group in self.levels] if self.rounds else [])
        for keep in self.survivors:
            best = select(judge(measure, seen, self.levels)[:, None], seen.evidence.labels[:, None], keep)
            centres = seen.coordinates.gather(1, best.clamp_min(0)[..., None].expand(-1, -1, len(step)))
            moves = torch.cat([torch.diag(step), -torch.diag(step)])
            around = wrap(self.levels, (centres[:, :, None] + moves).flatten(1, 2))
            seen = join(seen, look(evaluate, self.levels, around))
            step = step / 2
        return harvest(self.levels, seen, judge(measure, seen, self.levels), self.hypotheses, root)


@dataclass(frozen=True)
class Seen:
    """Views of a batch.

    Attributes:
        coordinates: (B, V, L).
        poses: (B, V, 3, 3).
        evidence: (B, V, …).
        looked: (B, V), which of them the model was shown; what stands at the others means nothing.
        others: How many poses beside the identity they stand for: those of a lattice, seen or not.
    """

    coordinates: Tensor
    poses: Tensor
    evidence: Evidence
    looked: Tensor
    others: int

    @property
    def weights(self) -> Tensor:
        """By how much each view counts (B, V), as a logarithm: −∞ for those that were not shown."""
        return log_weights(self.poses, self.others).masked_fill(~self.looked, float("-inf"))


def check_pointwise(confidence: str | Confidence) -> None:
    """Raise `OptionError` for the group confidence, which needs an orbit."""
    if is_curvature(confidence):
        raise OptionError(
            'confidence must be "energy", "bayesian" or a callable here; "group" needs orbits. Use search="tree".'
        )
    resolve(confidence)


def look_around(evaluate: Evaluate, coordinates: Tensor, poses: Tensor, root: Evidence) -> Seen:
    """Return the views of every image under all poses (V, 3, 3) of coordinates (V, L).

    The one in the middle, at V // 2, is the identity and inherits what is known of the images as they came.
    """
    batch, count = root.logits.shape[0], poses.shape[0]
    found, here = root.reshape(batch, 1), count // 2
    if count > 1:
        others = torch.cat([poses[:here], poses[here + 1 :]])
        fresh = everywhere(evaluate, batch, others).reshape(batch, count - 1)
        before, after = fresh.at(slice(None), slice(None, here)), fresh.at(slice(None), slice(here, None))
        found = concatenate([before, found, after], dim=1)
    looked = torch.ones_like(found.labels, dtype=torch.bool)
    return Seen(coordinates.expand(batch, -1, -1), poses.expand(batch, -1, -1, -1), found, looked, count - 1)


def look_where_likely(
    evaluate: Evaluate, coordinates: Tensor, poses: Tensor, root: Evidence, most: int, mass: float
) -> Seen:
    """Return the image as it came, and views of each image under the poses that are likely for it.

    Args:
        evaluate: What the classifier says of views.
        coordinates: (P, L), of a lattice.
        poses: (P, 3, 3), of the same; the one in the middle is the identity.
        root: Evidence (B, …) of the images as they came, with log-probabilities (B, P) of the poses.
        most: Views of one image at most.
        mass: Probability at which no more are looked at.
    """
    count = len(poses)
    if root.poses is None or root.poses.shape[-1] != count:
        raise OptionError(f"the fitted head proposes poses of another lattice than one of {count}. Fit again.")
    likely = root.poses.exp()
    others = likely.clone()
    others[:, count // 2] = -1  # the identity is seen already
    best = others.topk(min(most, count) - 1, dim=1)
    before = likely[:, count // 2, None] + best.values.cumsum(1) - best.values
    wanted = before < mass
    chosen = torch.cat([torch.full_like(best.indices[:, :1], count // 2), best.indices], dim=1)
    looked = torch.cat([torch.ones_like(wanted[:, :1]), wanted], dim=1)
    rows, slots = _places(looked[:, 1:])
    fresh = evaluate(rows, poses[best.indices[rows, slots]]) if rows.shape[0] else None

    def put(first: Tensor, found: Tensor | None) -> Tensor:
        whole = first[:, None].repeat(1, chosen.shape[1], 1)
        if found is not None:
            whole[rows, slots + 1] = found.to(whole)
        return whole

    logits = put(root.logits, None if fresh is None else fresh.logits)
    upright = None if root.upright is None else put(root.upright, None if fresh is None else fresh.upright)
    return Seen(coordinates[chosen], poses[chosen], Evidence(logits, upright=upright), looked, count - 1)


def _places(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns (n,) of what is wanted (B, K); in a graph, whose shapes are fixed, of everything."""
    if not is_compiling():
        return wanted.nonzero(as_tuple=True)  # type: ignore[return-value]
    batch, count = wanted.shape
    everything = torch.arange(batch * count, device=wanted.device)
    return everything // count, everything % count


def look(evaluate: Evaluate, levels: Sequence[Group], coordinates: Tensor) -> Seen:
    """Return the views of each image at its own coordinates (B, V, L)."""
    batch, count = coordinates.shape[:2]
    poses = matrices(levels, coordinates)
    index = torch.arange(batch, device=poses.device).repeat_interleave(count)
    found = evaluate(index, poses.reshape(-1, 3, 3)).reshape(batch, count)
    return Seen(coordinates, poses, found, torch.ones_like(found.labels, dtype=torch.bool), count)


def join(first: Seen, second: Seen) -> Seen:
    """Return the views of both."""
    return Seen(
        torch.cat([first.coordinates, second.coordinates], dim=1),
        torch.cat([first.poses, second.poses], dim=1),
        concatenate([first.evidence, second.evidence], dim=1),
        torch.cat([first.looked, second.looked], dim=1),
        first.others + second.others,
    )


@dataclass(frozen=True)
class Scattered(Orbit):
    """Views that lie in no order: what a measure of one's own is told in a joint search or a walk.

    Attributes:
        group: The first of the levels.
        samples: Number of views V.
        levels: All of them, of which every view has a parameter.
    """

    levels: tuple[Group, ...] = ()


def judge(measure: Confidence, seen: Seen, levels: tuple[Group, ...]) -> Tensor:
    """Return the confidence (B, V) of each view under a pointwise measure."""
    batch, views = seen.coordinates.shape[:2]
    active = torch.ones(batch, 1, dtype=torch.bool, device=seen.poses.device)
    said = judged(measure, seen.evidence.reshape(batch, 1, views), Scattered(levels[0], views, levels), active)[:, 0]
    return said.masked_fill(~seen.looked, float("-inf"))


def harvest(levels: tuple[Group, ...], seen: Seen, confidence: Tensor, keep: int, root: Evidence) -> Found:
    """Return the best views as hypotheses, at most one per label, and the marginals over all of them."""
    chosen = select(confidence[:, None], seen.evidence.labels[:, None], keep)
    rows, index = torch.arange(chosen.shape[0], device=chosen.device)[:, None], chosen.clamp_min(0)
    taken = confidence[rows, index]
    weighed = seen.evidence.logits + seen.weights[..., None]
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
        near=weighed.masked_fill(~close, float("-inf")).logsumexp(1),
        views=seen.looked.sum(1),
        posture=None
        if upright is None
        else posture(levels, seen.coordinates, seen.poses, upright[..., 0] + seen.weights),
    )


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


def is_identity(poses: Tensor) -> Tensor:
    """Return whether poses (…, 3, 3) are exactly the identity."""
    return (poses == torch.eye(3, dtype=poses.dtype, device=poses.device)).flatten(-2).all(-1)


def posture(levels: Sequence[Group], coordinates: Tensor, poses: Tensor, weighed: Tensor) -> Posture:
    """Return how images lie by the posterior over views: where most of it is gathered, and the mean there.

    Args:
        levels: The groups.
        coordinates: (B, V, L), parameters of the views.
        poses: (B, V, 3, 3).
        weighed: (B, V), log-odds that a view is upright, and by how much the view counts.
    """
    share = weighed.softmax(1)
    candidates = share.topk(min(CANDIDATES, share.shape[1]), dim=1).indices
    rows = torch.arange(share.shape[0], device=share.device)[:, None]
    apart = (poses[rows, candidates][:, :, None] - poses[:, None]).flatten(3).square().sum(3)
    around = share[:, None] * torch.exp(-apart / (2 * POSE_WIDTH**2))
    best = around.sum(2).argmax(1, keepdim=True)
    local = around.gather(1, best[..., None].expand(-1, -1, around.shape[2]))[:, 0]
    centre = coordinates[rows, candidates.gather(1, best)]
    moved = centre[:, 0] + (local[..., None] * difference(levels, coordinates - centre)).sum(1) / local.sum(1)[:, None]
    close = near_identity(poses)
    here = weighed.masked_fill(~close, float("-inf")).logsumexp(1)
    away = weighed.masked_fill(close, float("-inf")).logsumexp(1)
    return Posture(matrices(levels, wrap(levels, moved)), away - here, local.sum(1).clamp_max(1))
