"""The gate: the bare model's own answer stays unless the search clearly beats it, so that upright images lose nothing.

A fitted gate is three numbers, all read from the same head and set without labels from a promise: how sure the head
must be that an image came upright to let it go after one view (*exit*), by how much what another answer is expected to
gain must outweigh what it is expected to lose (*margin*), and how sure the head must be of a pose to turn an image
(*turn*). Labels and poses are judged each by itself: an image may keep its label and be turned, or get another label
and stay as it is. How the image seems to lie is part of the answer that is judged (see `search.run.with_bare`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from headtilt.errors import OptionError, is_number
from headtilt.model.evidence import Evidence, floored
from headtilt.search.found import Found, Posture

LEAST_COST = 0.1  # of a change: a model may think less of its answers than they are worth
TILT_COUNTS = 0.5  # as a power, in what a change gains: answers in which the bare one is mixed count it once already
MOST_MARGIN = 2.3  # either way; −log(LEAST_COST): no answer gains more than all, and none costs less
# What upright images lose was much alike on networks and images of several kinds: at a margin of 0, so many answers of
# each; at a margin lower by so much, e times as many. That counts as if it had been seen on so many images more.
COST_WHERE_EVEN, COST_FALLS_IN, USUAL_COUNTS = 0.001, 0.3, 100
LABEL_FOR_TILT = 0.5  # how much of the log-odds of another label counts for a tilt


@dataclass(frozen=True)
class Promise:
    """What the gate must keep.

    Attributes:
        upright: Points of upright accuracy that the search may cost at most.
        tilted: Points of tilted accuracy that leaving early may cost at most.
        turned: Upright images in a hundred that may be turned by more than 10° at most.
    """

    upright: float = 0.5
    tilted: float = 0.1
    turned: float = 1.5

    def __post_init__(self) -> None:
        for name in ("upright", "tilted", "turned"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= float(value) <= 100:
                raise OptionError(
                    f"promise: {name} must be points between 0 and 100; got {value!r}. For no gate use promise=None."
                )
            object.__setattr__(self, name, float(value))


class Gate(nn.Module):
    """A fitted or hand-set gate.

    Args:
        margin: How many times what the search's answer is expected to gain must outweigh what it is expected to lose,
            as a logarithm: at 0 they must be even. No change outweighs its loss by more than 2.3; see `for_replacing`.
        exit_at: Log-odds of being upright at which an image leaves after one view; infinite for never.
        turn_at: Log-odds of being tilted above which an image is turned; see `for_turning`.
    """

    def __init__(self, margin: float, exit_at: float = math.inf, turn_at: float = 0.0) -> None:
        super().__init__()
        self.margin, self.exit_at, self.turn_at = (
            _threshold(name, value) for name, value in (("margin", margin), ("exit_at", exit_at), ("turn_at", turn_at))
        )

    def get_extra_state(self) -> Tensor:
        """Return the three numbers, in double precision whatever the module is cast to."""
        return torch.tensor([self.margin, self.exit_at, self.turn_at], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over three numbers."""
        self.margin, self.exit_at, self.turn_at = _numbers(state, 3)

    def leaves_early(self, root: Evidence) -> Tensor:
        """Return which images (B,) need no search: the head is sure that they came upright."""
        if root.upright is None:
            return torch.zeros_like(root.labels, dtype=torch.bool)
        return root.upright[..., 0] >= self.exit_at

    def keeps(self, bare: Evidence, found: Found, answer: Tensor) -> Tensor:
        """Return for which images (B,) the bare answer stays.

        Args:
            bare: What the bare model says of the images as they came.
            found: What the search found.
            answer: (B, Y), the logits that would be answered with.
        """
        return for_replacing(bare, found.root, answer, found.posture) < self.margin

    def turns(self, bare: Evidence, found: Found, answer: Tensor) -> Tensor:
        """Return which images (B,) are turned, of the same arguments, where the head tells how they lie."""
        if found.posture is None:
            return torch.zeros_like(bare.labels, dtype=torch.bool)
        return for_turning(lead_of_rival(bare, answer), found.posture.tilted) > self.turn_at

    def extra_repr(self) -> str:
        """Return the three numbers."""
        return f"margin={self.margin:.3g}, exit_at={self.exit_at:.3g}, turn_at={self.turn_at:.3g}"


def _threshold(name: str, value: object) -> float:
    """Return a number that is read from JSON or numpy as a float; raise `OptionError` for anything else."""
    if not is_number(value) or math.isnan(value):
        raise OptionError(f"{name} must be a number; got {value!r}.")
    return float(value)


def _numbers(state: Tensor, count: int) -> list[float]:
    """Return the numbers of a gate's state; raise `OptionError` where they are those of a gate of another kind."""
    if state.shape != (count,):
        raise OptionError(
            f"this gate has {count} numbers, and the state has {state.numel()}: it is of a gate of another kind. "
            "Load a fitted wrapper with ITS.load, or give this one a gate of the same kind first."
        )
    found: list[float] = state.tolist()
    return found


def lead_of_rival(bare: Evidence, answer: Tensor) -> Tensor:
    """Return the log-odds (B,) of the best other class against that of the bare model."""
    own = bare.labels[:, None]
    return answer.scatter(1, own, -math.inf).amax(1) - answer.gather(1, own)[:, 0]


def expected_cost(bare: Evidence, root: Tensor, answer: Tensor) -> Tensor:
    """Return what it is expected to cost (B,), in answers, to replace the bare answer if the image came upright.

    That is by how much the bare answer is more probable than the new one. The model and the head, asked of the image as
    it came, both say something of that, and their geometric mean is nearer the truth than either.

    Args:
        bare: What the bare model says of the images as they came.
        root: (B, Y), what the head says of the same.
        answer: (B, Y), what the search answers; of the classes that the bare model does not say, the best counts.
    """
    both = floored(root.log_softmax(1)) + floored(bare.log_probs).to(root)
    return -_gain((both / 2).softmax(1), bare.labels, answer)


def for_replacing(bare: Evidence, root: Tensor, answer: Tensor, posture: Posture | None) -> Tensor:
    """Return what speaks for replacing bare answers (B,): what is expected to be gained over what it may cost.

    It is a logarithm, and −∞ where the search's answer is the bare one. What counts as gained is by how much the new
    answer is more probable after all views, for as far as the image seems to be tilted; what it may cost is told by the
    image as it came. Among all rules that lose the same on upright images, this ratio lets through what gains most.

    Args:
        bare: What the bare model says of the images as they came.
        root: (B, Y), what the head says of the same.
        answer: (B, Y), what the search answers.
        posture: How it thinks that they lie; None where no head tells.
    """
    cost = expected_cost(bare, root, answer).clamp_min(LEAST_COST).log()
    gain = _gain(answer.softmax(1), bare.labels, answer).clamp_min(0).log()
    tilt = 0.0 if posture is None else TILT_COUNTS * nn.functional.logsigmoid(posture.tilted).to(gain)
    return gain + tilt - cost.to(gain)


def _gain(probabilities: Tensor, labels: Tensor, answer: Tensor) -> Tensor:
    """Return by how much the best other class in an answer (B, Y) is more probable (B,) than the bare labels (B,)."""
    own = labels[:, None]
    other = answer.scatter(1, own, -math.inf).argmax(1, keepdim=True)
    return (probabilities.gather(1, other) - probabilities.gather(1, own))[:, 0]


def for_turning(lead: Tensor, tilted: Tensor) -> Tensor:
    """Return what speaks for turning images (n,): that they seem to have come tilted, and another label that leads.

    Args:
        lead: (n,), log-odds of the best other class against that of the bare model.
        tilted: (n,), log-odds that the image came tilted.
    """
    return tilted + LABEL_FOR_TILT * lead.clamp_min(0)


class CautiousGate(nn.Module):
    """The gate of a search that was never fitted: the bare answer stays unless a far more familiar view contradicts it.

    Scale and shift of a model's logits are its own, so the winner's lead over the bare answer in the image as it came
    is counted in standard deviations of that image's logits; a bare answer that the model itself doubts falls sooner.
    The two numbers were chosen on validation images of four small sets and of ImageNet, turned and upright. On the
    networks that were measured, it costs up to two points of upright accuracy.

    Args:
        margin: Score that the winner must reach.
        doubt: What a factor of e in the model's own doubt is worth.
    """

    def __init__(self, margin: float = 2.5, doubt: float = 0.4) -> None:
        super().__init__()
        self.margin, self.doubt = _threshold("margin", margin), _threshold("doubt", doubt)

    def get_extra_state(self) -> Tensor:
        """Return the two numbers, in double precision whatever the module is cast to."""
        return torch.tensor([self.margin, self.doubt], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over two numbers."""
        self.margin, self.doubt = _numbers(state, 2)

    def leaves_early(self, root: Evidence) -> Tensor:
        """Return that no image (B,) goes without a search: a sure answer may still be a tilted image's."""
        return torch.zeros_like(root.labels, dtype=torch.bool)

    def keeps(self, bare: Evidence, found: Found, answer: Tensor) -> Tensor:  # noqa: ARG002
        """Return for which images (B,) the bare answer stays after the search."""
        own = bare.labels[:, None]
        lead = found.marginal.amax(1) - found.near.gather(1, own)[:, 0]
        doubt = -bare.log_probs.gather(1, own)[:, 0]
        spread = floored(found.root).std(1, correction=0).clamp_min(1e-6)
        score = lead / spread + self.doubt * doubt.clamp_min(1e-7).log()
        # Logits that are all alike know nothing of any pose.
        return (score < self.margin) | (spread <= 1e-6)

    def turns(self, bare: Evidence, found: Found, answer: Tensor) -> Tensor:  # noqa: ARG002
        """Return that images (B,) are turned where their answer is replaced, and not by a pose of their own."""
        return torch.ones_like(bare.labels, dtype=torch.bool)


def checked_gate(gate: object) -> Gate | CautiousGate | None:
    """Return the gate of a plain margin, or the gate itself: all that says who leaves early and which answers stay."""
    if gate == "cautious":
        return CautiousGate()
    if is_number(gate):
        if MOST_MARGIN < float(gate) < math.inf:
            raise OptionError(
                f"gate must be a number up to {MOST_MARGIN:g}: how many times, as a logarithm, an answer must gain "
                f"what it may cost; got {gate!r}, which none reaches. 0 lets an answer through where both are even; "
                "math.inf keeps all bare answers."
            )
        return Gate(float(gate))
    if gate is not None and not (hasattr(gate, "leaves_early") and hasattr(gate, "keeps")):
        raise OptionError(f'gate must be a number, "cautious", a Gate or None; got {gate!r}. For no gate use None.')
    return cast(Gate | None, gate)


def margin_for(scores: Tensor, costs: Tensor, points: float, images: int | None = None) -> float:
    """Return the smallest margin under which replacing answers should cost at most `points` of upright accuracy.

    What a margin loses is the cost of the changes that it lets through. Half a point is about few images in a thousand,
    and there may be a hundred: what these say is chance. But networks and images of many kinds lose much the same at
    one margin, for a score is what is gained over what is lost. So that counts as if it had been seen on so many images
    more, and the fewer images, the nearer the margin stays to the one that usually keeps the promise: −0.5 for half a
    point.

    Args:
        scores: (n,), what speaks for changing the answers of upright images that had no part in the fit; −∞ where
            nothing does. See `for_replacing`.
        costs: (n,), what changing them is expected to cost; see `expected_cost`.
        points: The promise.
        images: How many images these are looks at, where they are fewer than `n`.
    """
    images = min(images or len(scores), len(scores))
    order = scores.double().argsort(descending=True)
    spent = torch.where(scores > -math.inf, costs.double(), 0.0)[order].clamp_min(0).cumsum(0)
    spent = torch.cat([spent.new_zeros(1), spent]) * images / len(scores)
    margins = torch.linspace(-MOST_MARGIN, MOST_MARGIN, 1 + 2 * round(100 * MOST_MARGIN), dtype=torch.float64).flip(0)
    let_through = torch.searchsorted(-scores.double()[order], -margins.to(scores.device), right=True).cpu()
    usual = (COST_WHERE_EVEN * torch.exp(-margins / COST_FALLS_IN)).clamp_max(1)
    lost = (spent.cpu()[let_through] + USUAL_COUNTS * usual) / (images + USUAL_COUNTS)
    within = margins[lost <= points / 100].tolist()
    return math.inf if not within else -math.inf if len(within) == len(margins) else round(within[-1], 2)


def quantile_for(scores: Tensor, points: float) -> float:
    """Return the score that at most `points` in a hundred of images to come should exceed, given those of some."""
    allowed = math.floor(points / 100 * (len(scores) + 1))
    if allowed < 1:
        return math.inf
    return _above(float(scores.sort(descending=True).values[min(allowed - 1, len(scores) - 1)]))


def exit_for(scores: Tensor, harm: Tensor, points: float) -> float:
    """Return the lowest score at which leaving early costs at most `points` of accuracy on tilted images.

    Args:
        scores: (n,), log-odds of being upright of tilted images.
        harm: (n,), 1 where leaving would lose a right answer, −1 where it would keep one from being lost, else 0.
        points: The promise.
    """
    order = scores.argsort(descending=True)
    spent = (harm[order].clamp_min(0).double().cumsum(0) + 1) / (len(scores) + 1)
    within = int((spent <= points / 100).sum())
    if not within or not bool(scores.isfinite().all()):  # too few to tell, or nothing tells
        return math.inf
    return _above(float(scores[order[within]])) if within < len(scores) else -math.inf


def _above(value: float) -> float:
    """Return a threshold that the value misses, also in single precision and after rounding in another batch."""
    return value + 2e-6 * max(1.0, abs(value)) if math.isfinite(value) else value
