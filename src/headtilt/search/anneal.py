"""Simulated annealing over the whole group: the paper's future work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headtilt.errors import OptionError, at_least, checked_seed, positive
from headtilt.geometry.groups import FiniteGroup, Group, check_levels, wrap
from headtilt.model.evidence import Evaluate, Evidence
from headtilt.search.confidence import Confidence, confidence_of_scattered
from headtilt.search.found import Found
from headtilt.search.joint import check_pointwise, look, look_around
from headtilt.search.seen import Seen, harvest, join


@dataclass(frozen=True)
class Anneal:
    """How to anneal.

    Attributes:
        levels: The groups whose product is searched; `ITS` fills in its own where there are none.
        budget: Views per image; a third seeds the walk with a lattice, the rest are its steps.
        hypotheses: Hypotheses to report, at most one per label.
        confidence: "energy", "bayesian" or a callable.
        hot: Temperature of the first step, in units of confidence.
        cold: Temperature of the last step; in between it falls geometrically, and the step length with its square root.
        reach: Length of the first step as a share of each group's reach.
        seed: Seed of the proposals, which all images share, so that results do not depend on how a batch is split.
    """

    levels: tuple[Group, ...] = ()
    budget: int = 72
    hypotheses: int = 3
    confidence: str | Confidence = "energy"
    hot: float = 1.0
    cold: float = 0.05
    reach: float = 0.25
    seed: int = 0

    lattice: ClassVar[None] = None  # a walk asks no head for likely poses; see `Joint`
    choices: ClassVar[None] = None
    draws: ClassVar[bool] = True  # random numbers, always

    def __post_init__(self) -> None:
        for name, least in (("budget", 3), ("hypotheses", 1)):
            object.__setattr__(self, name, at_least(name, getattr(self, name), least))
        if self.levels != ():
            check_levels(self.levels, 1)
        object.__setattr__(self, "levels", tuple(self.levels))
        check_pointwise(self.confidence)
        object.__setattr__(self, "seed", checked_seed(self.seed))
        for name in ("hot", "cold", "reach"):
            positive(name, getattr(self, name))
        if self.cold > self.hot:
            raise OptionError(f"cold must not be above hot; got cold={self.cold}, hot={self.hot}.")

    @property
    def most_views(self) -> int:
        """Most views of one image."""
        return self.budget

    def search(self, evaluate: Evaluate, root: Evidence) -> Found:
        """Return the best hypotheses that the walk passed."""
        generator = torch.Generator().manual_seed(self.seed)
        seen = look_around(evaluate, self.levels, self.budget // 3, root)
        level, best = self._confidence(seen).max(dim=1)
        here = seen.coordinates[torch.arange(len(best), device=best.device), best]
        spread = torch.tensor([_span(group) for group in self.levels], dtype=torch.float32) * self.reach
        steps = self.budget - self.budget // 3
        for number in range(steps):
            heat = (self.cold / self.hot) ** (number / max(steps - 1, 1))
            move = torch.randn(len(self.levels), generator=generator, dtype=torch.float32) * spread * heat**0.5
            luck = torch.rand((), generator=generator, dtype=torch.float32)
            proposal = wrap(self.levels, here + move.to(here))
            step = look(evaluate, self.levels, proposal[:, None])
            seen = join(seen, step)
            score = self._confidence(step)[:, 0]
            accept = luck.log().to(score) * self.hot * heat < score - level
            here = torch.where(accept[:, None], proposal, here)
            level = torch.where(accept, score, level)
        return harvest(self.levels, seen, self._confidence(seen), self.hypotheses, root)

    def _confidence(self, seen: Seen) -> Tensor:
        """Return the confidence (B, V) of each view."""
        return confidence_of_scattered(self.confidence, seen.evidence.as_orbit(), seen.looked, self.levels)


def _span(group: Group) -> float:
    return 2.0 if isinstance(group, FiniteGroup) else group.reach
