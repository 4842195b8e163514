"""Search over the whole group at once: a low-discrepancy lattice over the product of the levels, then refinement.

The paper walks the levels one after the other, which is exact only where they commute (its limitation 2). Here every
view has a coordinate in each group, so no order has to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.compiler import is_compiling

from headtilt.errors import OptionError, at_least, is_number
from headtilt.geometry.groups import Group, check_levels, matrices, wrap
from headtilt.model.evidence import Evaluate, Evidence, Once, concatenate
from headtilt.model.views import everywhere
from headtilt.search.confidence import Confidence, confidence_of_scattered, is_curvature, resolve
from headtilt.search.found import Found
from headtilt.search.lattice import closeness, covering, elements, first_step
from headtilt.search.seen import Seen, harvest, join, near_identity, prior_at, select, tilted_odds

REPEATS = 3  # as a power of the closeness of two poses: by how much the view from one repeats that from the other
MOST_TOLD = 8.0  # log-odds that views may add to a guess
FEWEST_FOR_LABEL = 4  # views: the two likeliest poses may both be wrong, and agree


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
        mass: Probability of the poses that are looked at or lie beside one that is, at which no more are.
        first: Poses are looked at a few at a time, those that should tell most first: so many views, then twice as
            many, and so on, until the head is sure. Each time, what it says of the views so far is added to its guess.
        sure: Probability of a label at which the head is sure of it; 1 for never.
        upright: Probability that the image came upright and that its label as it came is right, at which the head is
            sure of that, which needs less: there the bare answer usually counts; 1 for never.
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
    mass: float = 0.95
    first: int = 2
    sure: float = 0.999
    upright: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("hypotheses", 1), ("rounds", 0), ("lattice", 1), ("first", 1)):
            if name != "lattice" or self.lattice is not None:
                object.__setattr__(self, name, at_least(name, getattr(self, name), least))
        for name in ("mass", "sure", "upright"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < float(value) <= 1:
                raise OptionError(f"{name} must be a probability above 0; got {value!r}.")
            object.__setattr__(self, name, float(value))
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

    @Once
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
    def stages(self) -> tuple[int, ...]:
        """Views after which the head is asked whether it is sure, and their most."""
        most, ends = min(self.coarse, self.choices), [self.first]
        while 2 * ends[-1] < most:
            ends.append(2 * ends[-1])
        return (*(end for end in ends if end < most), most)

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
        survivors = self.survivors
        guesses = None if self.lattice is None else root.poses
        if guesses is None:
            seen = look_around(evaluate, self.levels, self.coarse, root)
        else:
            seen = look_where_likely(self, evaluate, root)
        step = root.logits.new_tensor([first_step(group, self.coarse) for group in self.levels] if self.rounds else [])
        for keep in survivors:
            confidence = confidence_of_scattered(self.confidence, seen.evidence.as_orbit(), seen.looked, self.levels)
            best = select(confidence[:, None], seen.evidence.labels[:, None], keep)
            centres = seen.coordinates.gather(1, best.clamp_min(0)[..., None].expand(-1, -1, len(step)))
            moves = torch.cat([torch.diag(step), -torch.diag(step)])
            around = wrap(self.levels, (centres[:, :, None] + moves).flatten(1, 2))
            closer = look(evaluate, self.levels, around)
            if guesses is not None and root.pose_prior is not None:
                _, poses = covering(self.levels, self.choices, root.logits)
                closer = replace(closer, prior=prior_at(root.pose_prior, poses, closer.poses))
            seen = join(seen, closer)
            step = step / 2
        confidence = confidence_of_scattered(self.confidence, seen.evidence.as_orbit(), seen.looked, self.levels)
        return harvest(self.levels, seen, confidence, self.hypotheses, root)


def check_pointwise(confidence: str | Confidence) -> None:
    """Raise `OptionError` for the group confidence, which needs an orbit."""
    if is_curvature(confidence):
        raise OptionError(
            'confidence must be "energy", "bayesian" or a callable here; "group" needs orbits. Use search="tree".'
        )
    resolve(confidence)


def look_around(evaluate: Evaluate, levels: tuple[Group, ...], count: int, root: Evidence) -> Seen:
    """Return the views of every image under all poses of a lattice of `count`.

    The one in the middle, at count // 2, is the identity and inherits what is known of the images as they came.
    """
    coordinates, poses = covering(levels, count, root.logits)
    batch = root.logits.shape[0]
    here = count // 2
    fresh = everywhere(evaluate, batch, torch.cat([poses[:here], poses[here + 1 :]])) if count > 1 else None
    found = root.reshape(batch, 1)
    if fresh is not None:
        fresh = fresh.reshape(batch, count - 1)
        before, after = fresh.at(slice(None), slice(None, here)), fresh.at(slice(None), slice(here, None))
        found = concatenate([before, found, after], dim=1)
    looked = torch.ones_like(found.labels, dtype=torch.bool)
    return Seen(coordinates.expand(batch, -1, -1), poses.expand(batch, -1, -1, -1), found, looked, count - 1)


def look_where_likely(plan: Joint, evaluate: Evaluate, root: Evidence) -> Seen:
    """Return the image as it came, and views of each image under the poses that are likely for it.

    Args:
        plan: How to search.
        evaluate: What the classifier says of views.
        root: Evidence (B, …) of the images as they came, with log-probabilities (B, P) of the poses of the lattice, of
            which the one in the middle is the identity.
    """
    coordinates, poses = covering(plan.levels, plan.choices, root.logits)
    stages = plan.stages
    if root.poses is None or root.poses.shape[-1] != len(poses):
        raise OptionError(f"the fitted head proposes poses of another lattice than one of {len(poses)}. Fit again.")
    close = closeness(plan.levels, plan.choices, root.poses)
    places = torch.full_like(root.labels, plan.choices // 2)[:, None]
    prior = torch.zeros_like(root.poses) if root.pose_prior is None else root.pose_prior
    unsure = torch.ones_like(places, dtype=torch.bool)
    seen = Seen(coordinates[places], poses[places], _each(root, 1), unsure, len(poses) - 1, prior.gather(1, places))
    for begin, end in pairwise((1, *stages)):
        if is_compiling() or bool(unsure.any()):
            likely = told(root.poses, seen, places, close)
            index, left = most_telling(likely, places, seen.looked, close, end - begin)
            asked = unsure & (left > 1 - plan.mass) if plan.mass < 1 else unsure.expand_as(index)
            unsure = unsure & asked[:, :1]
        else:  # no more thought for what is settled; all batches have as many columns
            index = places[:, :1].expand(-1, end - begin)
            asked = torch.zeros_like(index, dtype=torch.bool)
        found = _looked_at(evaluate, poses, root, index, asked)
        seen = join(seen, Seen(coordinates[index], poses[index], found, asked, 0, prior.gather(1, index)))
        places = torch.cat([places, index], dim=1)
        if end < stages[-1]:
            unsure = unsure & ~is_sure(plan, seen)[:, None]
    return seen


def told(guesses: Tensor, seen: Seen, places: Tensor, close: Tensor) -> Tensor:
    """Return how likely each pose of a lattice is (B, P), by the guesses and by what the head says of views so far.

    A view in which the head finds the image upright speaks for the poses around it, one in which not against them.

    Args:
        guesses: (B, P), log-probabilities.
        seen: Views of the same images.
        places: (B, V), where in the lattice these are.
        close: (P, P), see `closeness`.
    """
    if seen.evidence.upright is None:
        return guesses.exp()
    beside = close[places] * seen.looked[..., None]
    odds = (beside * seen.evidence.upright).sum(1) / beside.sum(1).clamp_min(1e-6)
    return (guesses + (beside.amax(1) * odds).clamp(-MOST_TOLD, MOST_TOLD)).softmax(1)


def most_telling(likely: Tensor, places: Tensor, looked: Tensor, close: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the poses whose views should tell most beside those seen, and the probability that is left before each.

    The likeliest poses lie side by side, and their views show much the same. So a view is worth less close to another.

    Args:
        likely: (B, P), probabilities of the poses of a lattice.
        places: (B, V), of views.
        looked: (B, V), which of these the model was shown.
        close: (P, P), see `closeness`.
        count: How many to return.
    """
    fresh = 1 - close**REPEATS
    left = likely * torch.where(looked[..., None], fresh[places], 1.0).prod(1)
    free = 1 - torch.zeros_like(likely).scatter_add(1, places, looked.to(likely))
    chosen, before = [], []
    for _ in range(count):
        best = torch.where(free > 0, left @ close, -1.0).argmax(1)
        chosen.append(best)
        before.append(left.sum(1))
        left = left * fresh[best]
        free = free.scatter(1, best[:, None], 0.0)
    return torch.stack(chosen, dim=1), torch.stack(before, dim=1)


def is_sure(plan: Joint, seen: Seen) -> Tensor:
    """Return of which images (B,) the views seen so far say enough: the label, or that the first view was right.

    Args:
        plan: How sure that must be.
        seen: Views that a head has scored.
    """
    weights, evidence = seen.weights, seen.evidence
    labels = (evidence.logits + weights[..., None]).logsumexp(1).softmax(1)
    known = (labels.amax(1) > plan.sure) & (seen.looked.sum(1) >= FEWEST_FOR_LABEL)
    if evidence.upright is None:
        return known
    tilted = tilted_odds(evidence.upright[..., 0] + weights, near_identity(seen.poses, plan.levels))
    stays = (-tilted).sigmoid() * labels.gather(1, evidence.labels[:, :1])[:, 0]
    return known | (stays > plan.upright)


def _looked_at(evaluate: Evaluate, poses: Tensor, root: Evidence, index: Tensor, asked: Tensor) -> Evidence:
    """Return evidence (B, K, …) of the views that are asked for (B, K); what stands at the others means nothing."""
    rows, slots = _places(asked)
    found = _each(root, asked.shape[1])
    if not rows.shape[0]:
        return found
    fresh = evaluate(rows, poses[index[rows, slots]])
    logits, upright = found.logits.clone(), found.upright
    logits[rows, slots] = fresh.logits.to(logits)
    if upright is not None and fresh.upright is not None:
        upright = upright.clone()
        upright[rows, slots] = fresh.upright.to(upright)
    return Evidence(logits, upright=upright)


def _each(root: Evidence, count: int) -> Evidence:
    """Return what is known of images (B, …) as they came, `count` times for each."""
    logits = root.logits[:, None].expand(-1, count, -1)
    return Evidence(logits, upright=None if root.upright is None else root.upright[:, None].expand(-1, count, -1))


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
