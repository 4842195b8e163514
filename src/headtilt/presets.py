"""Ready-made options: ``ITS(model, **paper3())``. Plain functions that return keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headtilt.geometry.groups import Group, quarter_turns, rotation, scale, shear_x
from headtilt.search.joint import Joint
from headtilt.search.tree import Tree


def affine_levels() -> list[Group]:
    """Return what undoes the paper's affine perturbations: rotation, scale by 1 ± 1/4, shear by ± 1/4."""
    return [rotation(), scale(0.25), shear_x(0.25)]


def paper3(mc_passes: int = 50) -> dict[str, Any]:
    """Return the paper's ITS³ as it is printed: rotation, scale ±1/4, shear ±1/4; n = 17, K = 3, M = 50.

    Its grids keep both end points, orbits are padded by "nearest", a view is accepted as in Algorithm 1, and of the
    final hypotheses the one with the largest class support wins. For comparison: other rules are better.
    """
    search = Tree(samples=17, hypotheses=3, confidence="group-nearest", accept="zero", ranking="support")
    levels = [group.paper() for group in affine_levels()]
    return {"levels": levels, "search": search, "mc_passes": mc_passes, "gate": None}


def paper5(mc_passes: int = 50) -> dict[str, Any]:
    """Return the paper's ITS⁵ as it is printed: the levels of ITS³, then rotation and scale once more."""
    options = paper3(mc_passes)
    return {**options, "levels": [*options["levels"], *options["levels"][:2]]}


def accurate(levels: Sequence[Group] | None = None) -> dict[str, Any]:
    """Return the search for the best labels: a dense lattice over all levels at once, read out over all views.

    Call `fit` afterwards: without it no class bias is removed.

    Args:
        levels: Groups to search; the full turn by default.
    """
    levels = [rotation()] if levels is None else list(levels)
    return {"levels": levels, "search": Joint(budget=36 if len(levels) == 1 else 48), "readout": "marginal"}


def fast(levels: Sequence[Group] | None = None) -> dict[str, Any]:
    """Return the search for few views: a quarter of `accurate`'s at most, fewer still with a fitted gate."""
    options = accurate(levels)
    return {**options, "search": Joint(budget=options["search"].budget // 4)}


def documents() -> dict[str, Any]:
    """Return the search for pages and photographs that lie on a side or on their head: four views, exact turns.

    On square images no pixel is interpolated. Call `fit` afterwards; then `result.quarters` says how to turn a page.
    """
    search = Joint(budget=4)
    return {"levels": [quarter_turns()], "search": search, "readout": "marginal", "interpolation": "nearest"}
