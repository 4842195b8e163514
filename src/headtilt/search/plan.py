"""Which way to search, by name and options; and what stands where no search was needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from headtilt.errors import one_of
from headtilt.geometry.groups import Group
from headtilt.model.evidence import Evidence
from headtilt.search.anneal import Anneal
from headtilt.search.found import Found, Posture, scatter
from headtilt.search.joint import Joint
from headtilt.search.tree import Tree, root_beam, take

Plan = Tree | Joint | Anneal
PLANS: dict[str, type[Tree] | type[Joint] | type[Anneal]] = {"tree": Tree, "joint": Joint, "anneal": Anneal}


def make_plan(search: str, levels: Sequence[Group], **options: Any) -> Plan:
    """Return the plan of that name with those options that it knows; one that no plan knows is an error."""
    one_of("search", search, PLANS)
    plan = PLANS[search]
    known = {item.name for item in fields(plan)}
    shared = {"samples", "hypotheses", "confidence", "budget", "seed"}
    for name in options.keys() - shared:
        one_of("option", name, sorted(known - shared - {"levels"}))
    if options.get("confidence") is None:
        options["confidence"] = "group" if plan is Tree else "energy"
    return plan(levels, **{name: value for name, value in options.items() if name in known})  # type: ignore[arg-type]


def plan_options(plan: Plan) -> dict[str, Any]:
    """Return the options, its name among them, from which `make_plan` makes that plan again."""
    name = next(name for name, kind in PLANS.items() if kind is type(plan))
    return {**{item.name: getattr(plan, item.name) for item in fields(plan)}, "search": name}


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
