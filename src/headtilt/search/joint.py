"""Search over the whole group at once: a low-discrepancy lattice over the product of the levels, then refinement.

The paper walks the levels one after the other, which is exact only where they commute (its limitation 2). Here every
view has a coordinate in each group, so no order has to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from headtilt.errors import OptionError, at_least, is_number
from headtilt.geometry.groups import Group, check_levels, matrices, wrap
from headtilt.model.evidence import Evaluate, Evidence, Once, concatenate
from headtilt.model.views import everywhere
from headtilt.search.confidence import Confidence, confidence_of_scattered, is_curvature, resolve
from headtilt.search.found import Found
from headtilt.search.lattice import covering, elements, first_step
from headtilt.search.seen import Seen, harvest, join, select


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
        if self.lattice is None or root.poses is None:
            seen = look_around(evaluate, self.levels, self.coarse, root)
        else:
            points, poses = covering(self.levels, self.choices, root.logits)
            seen = look_where_likely(evaluate, points, poses, root, self.coarse, self.mass)
        step = root.logits.new_tensor([first_step(group, self.coarse) for group in self.levels] if self.rounds else [])
        for keep in survivors:
            confidence = confidence_of_scattered(self.confidence, seen.evidence.as_orbit(), seen.looked, self.levels)
            best = select(confidence[:, None], seen.evidence.labels[:, None], keep)
            centres = seen.coordinates.gather(1, best.clamp_min(0)[..., None].expand(-1, -1, len(step)))
            moves = torch.cat([torch.diag(step), -torch.diag(step)])
            around = wrap(self.levels, (centres[:, :, None] + moves).flatten(1, 2))
            seen = join(seen, look(evaluate, self.levels, around))
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
