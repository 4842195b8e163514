"""The gate: the bare model's own answer stays unless the search clearly beats it, so that upright images lose nothing.

Stage one, the *exit*, looks at the image as it came and lets it go where the bare answer can be trusted: one view. In a
search over a lattice a *glance* at six views may let it go next. Stage two, the *margin*, looks at what the search has
found and keeps the bare answer unless the evidence against it is strong. All thresholds are set without labels, from a
promise in points of accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.errors import OptionError, is_number
from headtilt.evidence import Evidence, floored
from headtilt.result import Found

STATISTICS = 7


@dataclass(frozen=True)
class Promise:
    """What the gate must keep.

    Attributes:
        upright: Points of upright accuracy that the search may cost at most.
        tilted: Points of tilted accuracy that leaving early may cost at most.
    """

    upright: float = 0.5
    tilted: float = 0.4

    def __post_init__(self) -> None:
        for name in ("upright", "tilted"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= float(value) <= 100:
                raise OptionError(f"{name} must be points of accuracy between 0 and 100; got {value!r}.")
            object.__setattr__(self, name, float(value))


def statistics(bare: Evidence, root: Tensor, found: Found, detector: Detector | None = None) -> Tensor:
    """Return what speaks against the bare answer (B, 7): the larger, the less it should be kept.

    Log-odds of the winner against the bare answer b over all views; the winner's against b's views near the identity;
    against b in the image as it came; the bare model's own doubt about b; the detector's doubt, where there is one; and
    the winner's log-odds against b where both are seen as the image came: by the bare model, and near the identity. On
    an upright image a false winner comes from afar, and looks near it find it absurd.

    Args:
        bare: What the bare model says of the images as they came, (B, …).
        root: (B, Y), their calibrated logits.
        found: What the search found.
        detector: Tells from the image as it came whether the bare answer can be trusted.
    """
    answer = bare.labels[:, None]
    best, winner = found.marginal.max(1, keepdim=True)
    doubt = -bare.log_probs.gather(1, answer)
    against = [best - scores.gather(1, answer) for scores in (found.marginal, found.near, root)]
    distrust = torch.zeros_like(doubt) if detector is None else -detector(bare)[:, None]
    here = (floored(bare.logits), floored(found.near))
    at_home = [scores.gather(1, winner) - scores.gather(1, answer) for scores in here]
    return torch.cat([*against, doubt, distrust, *at_home], dim=1)


class Gate(nn.Module):
    """A fitted or hand-set gate.

    Args:
        margin: Evidence against the bare answer that the search must show; by hand: log-odds over all views.
        weights: How the `statistics` are weighed, the first of them where there are fewer weights (gates of old have
            five); by default the first alone, as plain log-odds.
        exit_at: Score at which an image leaves before the search; None for never.
        detector: What gives that score from the evidence of the image as it came.
        glance_at: Evidence against the bare answer, over a few views, below which an image leaves; None for no glance.
    """

    weights: Tensor

    def __init__(
        self,
        margin: float,
        weights: Tensor | None = None,
        exit_at: float | None = None,
        detector: Detector | None = None,
        glance_at: float | None = None,
    ) -> None:
        super().__init__()
        if not is_number(margin) or margin != margin:
            raise OptionError(f"margin must be a number of log-odds; got {margin!r}.")
        for name, value in (("exit_at", exit_at), ("glance_at", glance_at)):
            if value is not None and not is_number(value):
                raise OptionError(f"{name} must be a number or None; got {value!r}.")
        if weights is not None and (weights.ndim != 1 or not 1 <= len(weights) <= STATISTICS):
            raise OptionError(f"weights must be (n,) with n at most {STATISTICS}; got {tuple(weights.shape)}.")
        self.margin, self.exit_at, self.detector, self.glance_at = float(margin), exit_at, detector, glance_at
        self.register_buffer("weights", plain_weights() if weights is None else weights.clone())

    def leaves_early(self, root: Evidence) -> Tensor:
        """Return which images (B,) need no search."""
        if self.detector is None or self.exit_at is None:
            return torch.zeros_like(root.labels, dtype=torch.bool)
        return self.detector(root) >= self.exit_at

    def leaves_at_a_glance(self, bare: Evidence, root: Tensor, found: Found) -> Tensor:
        """Return which images (B,) need no more than the few views that were found."""
        if self.glance_at is None:
            return torch.zeros_like(bare.labels, dtype=torch.bool)
        return self._against(bare, root, found) < self.glance_at

    def keeps(self, bare: Evidence, root: Tensor, found: Found) -> Tensor:
        """Return for which images (B,) the bare answer stays after the search."""
        return self._against(bare, root, found) < self.margin

    def _against(self, bare: Evidence, root: Tensor, found: Found) -> Tensor:
        against = statistics(bare, root, found, self.detector)
        return against[:, : len(self.weights)] @ self.weights.to(against)


class CautiousGate(nn.Module):
    """The gate of a search that was never fitted: the bare answer stays unless a far more familiar view contradicts it.

    Scale and shift of a model's logits are its own, so the winner's lead over the bare answer in the image as it came
    is counted in standard deviations of that image's logits; a bare answer that the model itself doubts falls sooner.
    The two numbers were chosen on validation images of four small sets and of ImageNet, turned and upright: no more
    than a point of upright accuracy lost on any of them.

    Args:
        margin: Score that the winner must reach.
        doubt: What a factor of e in the model's own doubt is worth.
    """

    def __init__(self, margin: float = 2.5, doubt: float = 0.4) -> None:
        super().__init__()
        self.margin, self.doubt = margin, doubt

    def leaves_early(self, root: Evidence) -> Tensor:
        """Return that no image (B,) goes without a search: a sure answer may still be a tilted image's."""
        return torch.zeros_like(root.labels, dtype=torch.bool)

    def keeps(self, bare: Evidence, root: Tensor, found: Found) -> Tensor:
        """Return for which images (B,) the bare answer stays after the search."""
        against = statistics(bare, root, found)
        spread = floored(root).std(1, correction=0).clamp_min(1e-6)
        score = against[:, 1] / spread + self.doubt * against[:, 3].clamp_min(1e-7).log()
        # Logits that are all alike know nothing of any pose.
        return (score < self.margin) | (spread <= 1e-6)


def checked_gate(gate: object) -> Gate | CautiousGate | None:
    """Return a gate for plain log-odds, or the gate itself: all that says who leaves early and which answers stay."""
    if gate == "cautious":
        return CautiousGate()
    if is_number(gate):
        return Gate(float(gate))
    if gate is not None and not (hasattr(gate, "leaves_early") and hasattr(gate, "keeps")):
        raise OptionError(f'gate must be a number of log-odds, "cautious", a Gate or None; got {gate!r}.')
    return cast(Gate | None, gate)


class Detector(nn.Module):
    """A small network that tells from the image as it came whether the bare answer can be trusted.

    Args:
        mean: (D,), mean of the inputs.
        deviation: (D,), their standard deviation.
        hidden: Width of the hidden layers.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, hidden: int = 128) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("deviation", deviation.detach().clone())
        self.network = nn.Sequential(
            nn.Linear(len(mean), hidden),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 1),
        ).to(mean)

    def forward(self, root: Evidence) -> Tensor:
        """Return the log-odds (B,) that the bare answer is what the model would say of the upright image."""
        scores: Tensor = self.network((detector_inputs(root).to(self.mean) - self.mean) / self.deviation)[:, 0]
        return scores


def detector_inputs(root: Evidence) -> Tensor:
    """Return what the detector reads (B, D): the logits, and the features where there are any."""
    logits = floored(root.logits)
    return logits if root.features is None else torch.cat([logits, root.features.to(logits)], dim=1)


def fit_detector(root: Evidence, right: Tensor, *, seed: int = 0, steps: int = 600) -> Detector:
    """Return a detector trained on the evidence of images as they come, upright and tilted.

    Args:
        root: Bare evidence (n, …).
        right: (n,), whether the bare answer is the model's own upright answer.
        seed: Seeds initial weights and batches.
        steps: Optimiser steps of 512 images.
    """
    inputs = detector_inputs(root)
    with torch.random.fork_rng(devices=[inputs.device] if inputs.device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        detector = Detector(inputs.mean(0), inputs.std(0, correction=0).clamp_min(1e-3))
        optimiser = torch.optim.AdamW(detector.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            batch = torch.randint(len(right), (min(512, len(right)),)).to(right.device)
            loss = F.binary_cross_entropy_with_logits(detector(root.at(batch)), right[batch].to(inputs))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return detector.eval().requires_grad_(False)


def plain_weights() -> Tensor:
    """Return the weights under which a gate is plain log-odds over all views."""
    return F.one_hot(torch.tensor(0), STATISTICS).float()


def fit_weights(against: Tensor, search_right: Tensor) -> Tensor:
    """Return non-negative weights (7,) under which the statistics best tell a wrong bare answer from a right one.

    Logistic regression on images whose bare answer and winner differ.

    Args:
        against: (n, 7).
        search_right: (n,), whether the winner (rather than the bare answer) is the model's upright answer.
    """
    if len(against) < 20 or bool(search_right.all()) or not bool(search_right.any()):
        return plain_weights().to(against)
    rows = against.double().clamp(-50, 50)
    deviation = rows.std(0, correction=0).clamp_min(1e-3)
    target = search_right.double()
    # Upright and tilted images should count alike, however many of each disagree.
    importance = torch.where(search_right, 0.5 / target.mean(), 0.5 / (1 - target.mean()))
    free = torch.zeros(rows.shape[1] + 1, dtype=torch.float64, device=rows.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        score = rows / deviation @ F.softplus(free[:-1]) + free[-1]
        loss = (F.binary_cross_entropy_with_logits(score, target, reduction="none") * importance).mean()
        loss = loss + 1e-3 * F.softplus(free[:-1]).square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    weights = F.softplus(free[:-1].detach()) / deviation
    return (weights / weights.sum()).to(against.dtype)


def margin_for(evidence_against: Tensor, cost: Tensor, points: float) -> float:
    """Return the smallest margin under which switching costs at most `points` of accuracy on upright images.

    Args:
        evidence_against: (n,), weighed evidence against the bare answer of upright images.
        cost: (n,), expected loss of switching, negative where it is a gain: 0 where the winner is the bare answer.
        points: The promise.
    """
    order = evidence_against.argsort(descending=True)
    spent = cost[order].cumsum(0).cummax(0).values
    within = int((spent <= points / 100 * len(cost)).sum())
    if within == len(cost):
        return float("-inf")
    return _above(float(evidence_against[order[within]]))


def tail_for(evidence_against: Tensor, share: float) -> float:
    """Return the evidence against the bare answer that a share of upright images exceeds, also beyond those seen.

    The upper fifth of them is taken for an exponential tail, which goes on where few images end.

    Args:
        evidence_against: (n,), weighed evidence against the bare answer of upright images.
        share: At least 0; a fifth or more is no tail, and asks for nothing.
    """
    count = len(evidence_against)
    over = max(count // 5, 1)
    if share * count >= over:
        return float("-inf")
    ordered = evidence_against.double().sort(descending=True).values
    start = ordered[min(over, count - 1)]
    scale = (ordered[:over] - start).mean()
    return float(start + scale * math.log(over / count / share)) if share > 0 else float("inf")


def exit_for(scores: Tensor, harm: Tensor, points: float) -> float:
    """Return the lowest score at which leaving early costs at most `points` of accuracy on tilted images.

    Args:
        scores: (n,), the detector's scores of tilted images.
        harm: (n,), 1 where leaving would lose a right answer, −1 where it would keep one from being lost, else 0.
        points: The promise.
    """
    order = scores.argsort(descending=True)
    spent = harm[order].clamp_min(0).double().cumsum(0)
    within = int((spent <= points / 100 * len(scores)).sum())
    return _above(float(scores[order[within]])) if within < len(scores) else float("-inf")


def _above(value: float) -> float:
    """Return a threshold that the value misses, also in single precision and after rounding in another batch."""
    return value + 2e-6 * max(1.0, abs(value))
