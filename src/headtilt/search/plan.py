"""Which way to search, by name and options; and what stands where no search was needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from headtilt.errors import OptionError, one_of
from headtilt.geometry.groups import Group, check_levels, rotation
from headtilt.model.evidence import Evidence
from headtilt.search.anneal import Anneal
from headtilt.search.found import Found, Posture, root_beam, scatter, take
from headtilt.search.joint import Joint
from headtilt.search.tree import Tree

Plan = Tree | Joint | Anneal
PLANS: dict[str, type[Tree] | type[Joint] | type[Anneal]] = {"tree": Tree, "joint": Joint, "anneal": Anneal}


def made_plan(search: str | Plan, levels: Sequence[Group] | None) -> Plan:
    """Return the plan of a search that is named or given, for those levels; the full turn where nobody names any."""
    if isinstance(search, str):
        one_of("search", search, PLANS)
    plan: object = PLANS[search]() if isinstance(search, str) else search
    if not isinstance(plan, Plan):
        raise OptionError(f"search must be Tree(…), Joint(…), Anneal(…) or one of their names; got {search!r}.")
    if levels is None:
        return plan if plan.levels else replace(plan, levels=(rotation(),))
    if plan.levels:
        raise OptionError("levels must be given once: to ITS, or to the plan of the search.")
    if not isinstance(levels, Sequence) or not levels:
        check_levels(levels, 1)
    return replace(plan, levels=levels)  # type: ignore[arg-type]


def name_of(plan: Plan) -> str:
    """Return what a kind of plan is called: "tree", "joint" or "anneal"."""
    return type(plan).__name__.lower()


def plans_with_option(option: str) -> str | None:
    """Return which plans take an option, in words; None where none does."""
    kinds = [kind.__name__ for kind in PLANS.values() if option in {item.name for item in fields(kind)}]
    return " or ".join(f"{kind}({option}=…)" for kind in kinds) or None


def settled(root: Evidence, found: Found | None, left: Tensor, slots: int) -> Found:
    """Return what was found for the images at `left`, and for all others the image as it came, in the first slot.

    Args:
        root: Calibrated evidence (B, …) of the images as they came.
        found: Of the images at `left`; None where there are none.
        left: Which images were searched.
        slots: Hypotheses per image.
    """
    index = torch.zeros(len(root.logits), slots, dtype=torch.long, device=root.logits.device)
    beam = take(root_beam(Evidence(root.logits)), index)
    beam = replace(beam, active=(torch.arange(slots, device=index.device) == 0).expand_as(beam.active))
    upright = root.upright
    posture = None
    if upright is not None:
        posture = Posture(beam.pose[:, 0], -upright[:, 0], upright[:, 0].sigmoid())
    whole = Found(beam, (), root.logits, root.logits, root.logits, torch.ones_like(root.labels), posture)
    return whole if found is None else scatter(whole, found, left)
