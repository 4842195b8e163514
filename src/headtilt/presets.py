"""Ready-made options: ``ITS(model, **accurate())``. Plain functions that return keyword arguments; levels by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headtilt.errors import OptionError
from headtilt.geometry.groups import (
    Group,
    quarter_turns,
    reflection,
    rotation,
    scale,
    shear,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
)
from headtilt.search.joint import Joint
from headtilt.search.tree import Tree

LEVELS: dict[str, Callable[[], Group]] = {
    "rotation": rotation,
    "scale": scale,
    "shear": shear,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "reflection": reflection,
    "quarter_turns": quarter_turns,
}


def levels_named(names: str) -> list[Group]:
    """Return the groups that names stand for, separated by commas: ``"rotation, scale"``."""
    words = [word.strip().replace("-", "_") for word in names.split(",") if word.strip()]
    for word in words or [names]:
        if word not in LEVELS:
            raise OptionError(f"levels must be some of {', '.join(LEVELS)}, separated by commas; got {word!r}.")
    return [LEVELS[word]() for word in words]


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
    return {
        "levels": levels,
        "search": search,
        "mc_passes": mc_passes,
        "gate": None,
        "interpolation": "bilinear",
    }


def paper5(mc_passes: int = 50) -> dict[str, Any]:
    """Return the paper's ITS⁵ as it is printed: the levels of ITS³, then rotation and scale once more."""
    options = paper3(mc_passes)
    return {**options, "levels": [*options["levels"], *options["levels"][:2]]}


def accurate(levels: Sequence[Group] | None = None) -> dict[str, Any]:
    """Return the search for the best labels: a dense lattice over all levels at once, read out over all views.

    Call `fit` afterwards: without it no class bias is removed. Once fitted it looks first where a view should
    tell most, and at nearly the whole lattice only where the head stays unsure.

    Args:
        levels: Groups to search; the full turn by default.
    """
    levels = [rotation()] if levels is None else list(levels)
    most = 36 if len(levels) == 1 else 72
    search = Joint(budget=most, lattice=most, mass=0.999, first=6)
    return {"levels": levels, "search": search, "readout": "marginal"}


def fast(levels: Sequence[Group] | None = None) -> dict[str, Any]:
    """Return the search for few views: 20 at most, and far fewer once it is fitted.

    Once fitted it looks where the head guesses that the image lies, until the head is sure. Until then it looks at a
    coarse lattice.
    """
    options = accurate(levels)
    return {**options, "search": Joint(budget=20, lattice=options["search"].lattice)}


def documents() -> dict[str, Any]:
    """Return the search for pages and photographs that lie on a side or on their head: four views, exact turns.

    On square images no pixel is interpolated. Call `fit` afterwards; then `result.quarters` says how to turn a page.
    """
    search = Joint(budget=4)
    return {"levels": [quarter_turns()], "search": search, "readout": "marginal", "interpolation": "nearest"}
