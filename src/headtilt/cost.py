"""What a search costs: views and milliseconds per image, here and now, and what other budgets would cost and be worth.

Nothing needs a label: what a budget is worth is told by how often its answers to tilted images are what the model says
of the same images upright.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from headtilt.calibration.sampler import Sampler
from headtilt.errors import OptionError, at_least
from headtilt.geometry.warp import Interpolation, Padding, check_images
from headtilt.model.predictor import Predictor
from headtilt.progress import Progress
from headtilt.result import SearchResult
from headtilt.search.joint import Joint
from headtilt.search.lattice import elements
from headtilt.search.plan import Plan

FEWEST_IMAGES = 2
BUDGETS = (4, 8, 12, 16, 24, 36, 48, 72)  # that are tried beside a search's own
WARM_UP = 4  # images before the clock starts


class Searching(Protocol):
    """What a wrapper must offer to be asked for its cost."""

    predictor: Predictor
    plan: Plan
    padding: Padding
    interpolation: Interpolation

    def search(self, images: Tensor) -> SearchResult:
        """Return what the search finds."""
        ...

    def but(self, **changes: Any) -> Searching:
        """Return the same wrapper with some arguments changed."""
        ...


@dataclass(frozen=True)
class Cost:
    """What one budget costs and is worth.

    Attributes:
        budget: Most views of one image; 1 is the bare model.
        chosen: Whether it is the one that the wrapper has.
        views_upright: Views that an upright image took, on average.
        views_tilted: Views that a tilted image took, on average.
        milliseconds_upright: Time that an upright image took.
        milliseconds_tilted: Time that a tilted image took.
        agreement_upright: Answers to upright images that are the bare model's, in per cent.
        agreement_tilted: Answers to tilted images that are the bare model's to the same images upright, in per cent.
    """

    budget: int
    chosen: bool
    views_upright: float
    views_tilted: float
    milliseconds_upright: float
    milliseconds_tilted: float
    agreement_upright: float
    agreement_tilted: float


@dataclass(frozen=True)
class Costs:
    """What a wrapper costs, beside the bare model and other budgets.

    Attributes:
        images: By how many images this was measured.
        device: Where.
        rows: The bare model first, then by budget.
    """

    images: int
    device: str
    rows: tuple[Cost, ...]

    @property
    def chosen(self) -> Cost:
        """The row of the wrapper as it is."""
        return next(row for row in self.rows if row.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table."""
        head = f"{'most views':>12}{'upright: views':>16}{'ms':>8}{'tilted: views':>16}{'ms':>8}{'agree':>8}"
        rows = (
            f"{row.budget:>11}{'*' if row.chosen else ' '}"
            f"{row.views_upright:>16.1f}{row.milliseconds_upright:>8.1f}"
            f"{row.views_tilted:>16.1f}{row.milliseconds_tilted:>8.1f}{row.agreement_tilted:>6.0f} %"
            for row in self.rows
        )
        below = (
            f"Means per image, over {self.images} images on {self.device}. *: the search as it is. 1: the bare model.",
            "agree: answers to tilted images that are the bare model's answers to the same images upright.",
        )
        return "\n".join([head, *rows, *below])


def costs(
    robust: Searching,
    images: Tensor,
    *,
    budgets: Sequence[int] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Costs:
    """Return what a wrapper costs on upright images (B, C, H, W) and on the same images tilted at random.

    Args:
        robust: The wrapper, best after a fit.
        images: Upright, as the model takes them.
        budgets: Most views per image to try; some from 4 to twice its own by default. Searches that are no `Joint` have
            one budget, their own.
        seed: Seeds the tilts.
        progress: Called with (what is measured, budgets done, budgets in all).
    """
    check_images(images, "images")
    at_least("the number of images", len(images), FEWEST_IMAGES)
    plan = robust.plan
    sampler = Sampler(robust.predictor, plan.levels, robust.padding, robust.interpolation)
    draws = np.random.default_rng(seed)
    upright = sampler.seen(images)
    tilted = sampler.moved(images, sampler.draw(len(images), 0.0, max(images.shape[-2:]), draws).transforms)
    bare = robust.predictor.with_features(None)
    truth = bare(upright).labels
    wanted = sorted({plan.most_views, *tried(plan, budgets)})
    (before, spent), (after, later) = _timed(bare, upright), _timed(bare, tilted)
    same, found = (100 * float((said.labels == truth).double().mean()) for said in (before, after))
    rows = [Cost(1, False, 1.0, 1.0, spent, later, same, found)]
    for number, budget in enumerate(wanted):
        if progress is not None:
            progress(f"{budget} views", number, len(wanted))
        own = budget == plan.most_views
        other = robust if own else robust.but(levels=None, search=replace(cast(Joint, plan), budget=budget))
        rows.append(_measured(other, budget, own, upright, tilted, truth))
    return Costs(len(images), str(upright.device), tuple(rows))


def tried(plan: Plan, budgets: Sequence[int] | None) -> list[int]:
    """Return the budgets to try beside a plan's own."""
    if budgets is not None:
        wanted = [at_least("budgets", budget, 1) for budget in budgets]
        if wanted and not isinstance(plan, Joint):
            raise OptionError(f"budgets are for a Joint search; this one is {type(plan).__name__}. Leave them out.")
        return wanted
    if not isinstance(plan, Joint) or plan.rounds or plan.choices < plan.budget:
        return []
    most = min(2 * plan.most_views, elements(plan.levels) or math.inf) if plan.lattice is None else plan.choices
    return [budget for budget in BUDGETS if budget <= most]


def _measured(robust: Searching, budget: int, own: bool, upright: Tensor, tilted: Tensor, truth: Tensor) -> Cost:
    """Return what one wrapper costs and is worth."""
    straight, spent = _timed(robust.search, upright)
    turned, later = _timed(robust.search, tilted)

    def agreement(result: SearchResult) -> float:
        return 100 * float((result.logits.argmax(1) == truth).double().mean())

    few, more = (float(result.views.double().mean()) for result in (straight, turned))
    return Cost(budget, own, few, more, spent, later, agreement(straight), agreement(turned))


def _timed(run: Callable[[Tensor], Any], images: Tensor) -> tuple[Any, float]:
    """Return what a function makes of images, and milliseconds per image, after a few to warm up."""
    run(images[:WARM_UP])
    _wait(images)
    start = time.perf_counter()
    found = run(images)
    _wait(images)
    return found, 1000 * (time.perf_counter() - start) / len(images)


def _wait(images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
