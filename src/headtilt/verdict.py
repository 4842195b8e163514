"""What a fit is worth, told without labels: by images that had no part in it, upright and tilted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headtilt.evidence import Evidence
from headtilt.gate import Gate, rival
from headtilt.groups import decompose
from headtilt.result import Found
from headtilt.search.joint import log_weights

TURNED = 10.0  # degrees by which an upright image must not be turned
KEPT_NEARLY_ALL = 90.0  # per cent of tilted answers: a gate that keeps more has next to no effect


@dataclass(frozen=True)
class Straight:
    """Upright images after a search without a gate.

    Attributes:
        lead: (n,), log-odds of the best rival against the bare answer.
        cost: (n,), what that rival in place of the bare answer is expected to cost.
        tilted: (n,), log-odds that the image came tilted; −∞ where no head tells.
        turned: (n,), by how many degrees it would be turned.
    """

    lead: Tensor
    cost: Tensor
    tilted: Tensor
    turned: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        """Return all of them."""
        return self.lead, self.cost, self.tilted, self.turned


def straight(bare: Evidence, found: Found, belief: Tensor, readout: str) -> Straight:
    """Return what a search made of upright images.

    Args:
        bare: What the bare model says of them.
        found: What the search found.
        belief: (n, Y), how probable each class is by another look.
        readout: See `ITS`.
    """
    answer = found.marginal if readout == "marginal" else found.beam.evidence.logits[:, 0]
    lead, other_label = rival(bare, answer)
    own, other = (belief.gather(1, labels[:, None])[:, 0] for labels in (bare.labels, other_label))
    none = torch.full_like(own, -math.inf)
    lying = none if found.posture is None else found.posture.tilted
    angle = none if found.posture is None else decompose(found.posture.pose.double()).rotation.abs().rad2deg().to(own)
    return Straight(lead, own - other, lying, angle)


@dataclass(frozen=True)
class Tilted:
    """Images under some tilt, judged by a calibrator that had no part of them.

    Attributes:
        against: (n,), log-odds of the search's answer against the bare one.
        trust: (n,), log-odds that the image came upright.
        right: (n,), whether the search's answer is the model's upright answer.
        bare_right: (n,), whether the bare answer is.
        upright: (n,), whether the image came upright, or nearly.
        exact: (n,), whether it was not resampled.
    """

    against: Tensor
    trust: Tensor
    right: Tensor
    bare_right: Tensor
    upright: Tensor
    exact: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        """Return all of them."""
        return self.against, self.trust, self.right, self.bare_right, self.upright, self.exact

    def harm(self, margin: float) -> Tensor:
        """Return (n,) 1 where leaving early would lose what the gated search has, −1 where it would save it."""
        gated = torch.where(self.against < margin, self.bare_right, self.right)
        return gated.long() - self.bare_right.long()


def verdict(gate: Gate, straight: list[Straight], cases: Tilted) -> dict[str, Any]:
    """Return what a gate and the calibrators behind it are worth on images that had no part in the fit, in per cent.

    Agreement is with what the model itself says of the image upright.
    """
    kept = (cases.against < gate.margin) | (cases.trust >= gate.exit_at)
    gated = torch.where(kept, cases.bare_right, cases.right)

    def share(truths: Tensor) -> float | None:
        return 100 * float(truths.double().mean()) if len(truths) else None

    def agreement(rows: Tensor) -> dict[str, float | None]:
        return {"bare": share(cases.bare_right[rows]), "fitted": share(gated[rows]), "images": int(rows.sum())}

    replaced = torch.cat([(case.lead > 0) & (case.lead >= gate.margin) for case in straight])
    turned = torch.cat([(case.tilted > gate.turn_at) & (case.turned > TURNED) for case in straight])
    tilted = ~cases.upright
    return {
        "tilted": agreement(tilted & ~cases.exact),
        "turned exactly": agreement(tilted & cases.exact),
        "upright answers replaced": share(replaced),
        "upright images turned": share(turned),
        "tilted answers kept by the gate": share(kept[tilted]),
    }


def read(seen: Evidence, poses: Tensor, readout: str) -> Tensor:
    """Return the logits (n, Y) that views (n, V, …) under poses (n, V, 3, 3) are answered with; see `ITS`."""
    if readout == "marginal":
        return (seen.logits + log_weights(poses)[..., None]).logsumexp(1)
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
