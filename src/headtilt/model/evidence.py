"""Evidence: what a classifier says of views, as values; who asks it is the business of `predictor`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_Value = TypeVar("_Value")


class Once(Generic[_Value]):
    """A property of a frozen value that is worked out once.

    `functools.cached_property` takes a lock before Python 3.12, and a child that is forked meanwhile would wait for it
    for ever.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, value: Any, owner: type) -> _Value:
        if value is None:
            return self  # type: ignore[return-value]
        found: _Value = value.__dict__.setdefault(self.name, self.compute(value))
        return found


@dataclass(frozen=True)
class Evidence:
    """What a classifier says of views of any leading shape.

    Attributes:
        logits: (…, Y). Their softmax is the mean softmax over the dropout passes, their logsumexp the mean logsumexp;
            with one deterministic pass they are the model's own logits.
        features: (…, D), what the taps read, or None where nobody asked for it.
        upright: (…, 1), log-odds that a view shows the image upright, or None where no head tells.
        poses: (…, P), log-probabilities that each pose of a lattice turns the view upright, or None.
        pose_prior: (…, P), by how much each of these counts before it is seen, as a logarithm, or None.
    """

    logits: Tensor
    features: Tensor | None = None
    upright: Tensor | None = None
    poses: Tensor | None = None
    pose_prior: Tensor | None = None

    def at(self, *index: Any) -> Evidence:
        """Return the evidence of the views at an index into the leading axes."""
        return self._each(lambda part: part[index])

    def reshape(self, *leading: int) -> Evidence:
        """Return the same views under other leading axes."""
        return self._each(lambda part: part.reshape(*leading, part.shape[-1]))

    def as_orbit(self) -> Evidence:
        """Return views (B, V, …) as those of one hypothesis per image (B, 1, V, …), which is how measures see them."""
        return self._each(lambda part: part[:, None])

    def transpose(self) -> Evidence:
        """Return the same views with their first two axes swapped."""
        return self._each(lambda part: part.transpose(0, 1))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Evidence:
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: None if part is None else change(part) for name, part in parts.items()}
        evidence = Evidence(**changed)
        # What was worked out already, one number per view, goes along. A list: another thread may be adding to it.
        known = [(name, part) for name, part in list(vars(self).items()) if name not in parts]
        vars(evidence).update({name: change(part[..., None])[..., 0] for name, part in known})
        return evidence

    @property
    def log_probs(self) -> Tensor:
        """Log of the mean prediction (…, Y)."""
        return self.logits.log_softmax(dim=-1)

    @Once
    def energy(self) -> Tensor:
        """Mean energy E = −logsumexp (…); low where the model is familiar with the view."""
        return -self.logits.logsumexp(dim=-1)

    @Once
    def labels(self) -> Tensor:
        """Most probable class (…)."""
        return self.logits.argmax(dim=-1)


def floored(logits: Tensor) -> Tensor:
    """Return logits that a network can read: classes ruled out by −∞ are merely hopeless."""
    return logits.clamp_min(-1e3)


def concatenate(parts: Sequence[Evidence], dim: int = 0) -> Evidence:
    """Return the evidence of all parts along one of the leading axes; what not all parts have is left out."""
    joined: dict[str, Any] = {}
    for field in fields(Evidence):
        values = [getattr(part, field.name) for part in parts]
        known = [value for value in values if value is not None]
        joined[field.name] = torch.cat(known, dim) if len(known) == len(parts) else None
    return Evidence(**joined)


def mean_prediction(passes: Tensor) -> Tensor:
    """Return logits (V, Y) that stand for those of several passes (M, V, Y): see `Evidence.logits`."""
    familiar = passes.logsumexp(-1)
    log_probs = (passes - familiar[..., None]).logsumexp(0) - math.log(len(passes))
    return log_probs + familiar.mean(0)[:, None]


Evaluate = Callable[[Tensor, Tensor], Evidence]
"""``(index (V,), poses (V, 3, 3)) -> Evidence (V, …)``: what the classifier says of those views of a batch."""

Calibrator = Callable[[Evidence], Evidence]
"""From what the classifier says to evidence that compares across poses."""
