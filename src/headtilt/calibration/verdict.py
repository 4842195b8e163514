"""What a fit is worth, told without labels: by images that had no part in it, upright and tilted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from headtilt.calibration.gate import Gate, expected_cost, for_replacing, for_turning, lead_of_rival
from headtilt.geometry.groups import decompose
from headtilt.model.evidence import Evidence
from headtilt.search.found import Posture

TURNED = 10.0  # degrees by which an upright image must not be turned
KEPT_NEARLY_ALL = 90.0  # per cent of tilted answers: a gate that keeps more has next to no effect


@dataclass(frozen=True)
class Straight:
    """Upright images after a search without a gate.

    Attributes:
        lead: (n,), log-odds of the best rival against the bare answer.
        score: (n,), what speaks for answering with that rival; −∞ where the search does not.
        cost: (n,), what it is expected to cost.
        tilted: (n,), log-odds that the image came tilted; −∞ where no head tells.
        turned: (n,), by how many degrees it would be turned.
    """

    lead: Tensor
    score: Tensor
    cost: Tensor
    tilted: Tensor
    turned: Tensor

    @property
    def for_turning(self) -> Tensor:
        """What speaks for turning the image (n,)."""
        return for_turning(self.lead, self.tilted)


def straight(bare: Evidence, root: Tensor, answer: Tensor, posture: Posture | None) -> Straight:
    """Return what a search made of upright images.

    Args:
        bare: What the bare model says of them.
        root: (n, Y), what the calibrator says of them as they came.
        answer: (n, Y), what the search answers.
        posture: How it thinks that they lie; None where no head tells.
    """
    lead = lead_of_rival(bare, answer)
    none = torch.full_like(lead, -math.inf)
    angle = none if posture is None else decompose(posture.pose.double()).rotation.abs().rad2deg().to(lead)
    return Straight(
        lead,
        for_replacing(bare, root, answer, posture),
        expected_cost(bare, root, answer),
        none if posture is None else posture.tilted,
        angle,
    )


@dataclass(frozen=True)
class Judged(Straight):
    """Images under some tilt, or none, judged by a calibrator that had no part of them.

    Attributes:
        trust: (n,), log-odds that the image came upright.
        right: (n,), whether the search's answer is the model's upright answer.
        bare_right: (n,), whether the bare answer is.
        upright: (n,), whether the image came upright, or nearly.
        exact: (n,), whether it was not resampled.
    """

    trust: Tensor
    right: Tensor
    bare_right: Tensor
    upright: Tensor
    exact: Tensor

    def gated(self, margin: float) -> Tensor:
        """Return whether the gated answer (n,) is the model's upright answer."""
        return torch.where(self.kept(margin), self.bare_right, self.right)

    def kept(self, margin: float) -> Tensor:
        """Return which bare answers (n,) stay."""
        return self.score < margin

    def harm(self, margin: float) -> Tensor:
        """Return (n,) 1 where leaving early would lose what the gated search has, −1 where it would save it."""
        return self.gated(margin).long() - self.bare_right.long()


Cases = TypeVar("Cases", bound=Straight)


def joined(cases: Sequence[Cases]) -> Cases:
    """Return several sets of cases as one."""
    names = [part.name for part in fields(cases[0])]
    return type(cases[0])(*(torch.cat([getattr(case, name) for case in cases]) for name in names))


def rows_of(cases: Cases, rows: Tensor) -> Cases:
    """Return the cases at `rows`."""
    return type(cases)(*(getattr(cases, part.name)[rows] for part in fields(cases)))


def verdict(gate: Gate, straight: Straight, cases: Judged) -> dict[str, Any]:
    """Return what a gate and the calibrators behind it are worth on images that had no part in the fit, in per cent.

    Agreement is with what the model itself says of the image upright.
    """
    kept = cases.kept(gate.margin) | (cases.trust >= gate.exit_at)
    gated = torch.where(kept, cases.bare_right, cases.right)

    def share(truths: Tensor) -> float | None:
        return 100 * float(truths.double().mean()) if len(truths) else None

    def agreement(rows: Tensor) -> dict[str, float | None]:
        return {"bare": share(cases.bare_right[rows]), "fitted": share(gated[rows]), "images": int(rows.sum())}

    tilted = ~cases.upright
    return {
        "tilted": agreement(tilted & ~cases.exact),
        "turned exactly": agreement(tilted & cases.exact),
        "upright answers replaced": share((straight.lead > 0) & (straight.score >= gate.margin)),
        "upright images turned": share((straight.for_turning > gate.turn_at) & (straight.turned > TURNED)),
        "tilted answers kept by the gate": share(kept[tilted]),
    }


def answer_of_views(seen: Evidence, weights: Tensor, readout: str) -> Tensor:
    """Return the logits (n, Y) that views (n, V, …) which count by `weights` (n, V) are answered with; see `ITS`."""
    if readout == "marginal":
        return (seen.logits + weights[..., None]).logsumexp(1)
    return seen.logits[torch.arange(len(seen.logits), device=seen.logits.device), (-seen.energy).argmax(1)]


def hint(report: dict[str, Any]) -> str | None:
    """Return what to do about a fit that changes next to nothing, or None where it does its work."""
    kept = report.get("verdict", {}).get("tilted answers kept by the gate")
    if kept is None or kept < KEPT_NEARLY_ALL:
        if report.get("gate", {}).get("turn_at") == math.inf:
            return "No image will be turned: of so few images none tells when that is safe. Fit on a hundred or more."
        return None
    return (
        f"The gate keeps {kept:.0f} % of the bare answers to tilted images, so that this fit changes next to nothing. "
        "Fit on more images, allow a larger promise, or check that the fit images are upright and prepared as the "
        "model wants them."
    )
