"""Evidence: what a classifier says of views, as values; who asks it is the business of `predictor`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    """What a classifier says of views of any leading shape.

    Attributes:
        logits: (…, Y). Their softmax is the mean softmax over the dropout passes, their logsumexp the mean logsumexp;
            with one deterministic pass they are the model's own logits.
        features: (…, D), the penultimate features, or None where nobody asked for them.
    """

    logits: Tensor
    features: Tensor | None = None

    def at(self, *index: Any) -> Evidence:
        """Return the evidence of the views at an index into the leading axes."""
        return Evidence(self.logits[index], None if self.features is None else self.features[index])

    def reshape(self, *leading: int) -> Evidence:
        """Return the same views under other leading axes."""
        features = self.features
        return Evidence(
            self.logits.reshape(*leading, self.logits.shape[-1]),
            None if features is None else features.reshape(*leading, features.shape[-1]),
        )

    @property
    def log_probs(self) -> Tensor:
        """Log of the mean prediction (…, Y)."""
        return self.logits.log_softmax(dim=-1)

    @property
    def energy(self) -> Tensor:
        """Mean energy E = −logsumexp (…); low where the model is familiar with the view."""
        return -self.logits.logsumexp(dim=-1)

    @property
    def labels(self) -> Tensor:
        """Most probable class (…)."""
        return self.logits.argmax(dim=-1)


def floored(logits: Tensor) -> Tensor:
    """Return logits that a network can read: classes ruled out by −∞ are merely hopeless."""
    return logits.clamp_min(-1e3)


def concatenate(parts: Sequence[Evidence], dim: int = 0) -> Evidence:
    """Return the evidence of all parts along one of the leading axes; features only where all parts have them."""
    features = [part.features for part in parts if part.features is not None]
    joined = torch.cat(features, dim) if len(features) == len(parts) else None
    return Evidence(torch.cat([part.logits for part in parts], dim), joined)


def mean_prediction(passes: Tensor) -> Tensor:
    """Return logits (V, Y) that stand for those of several passes (M, V, Y): see `Evidence.logits`."""
    familiar = passes.logsumexp(-1)
    log_probs = (passes - familiar[..., None]).logsumexp(0) - math.log(len(passes))
    return log_probs + familiar.mean(0)[:, None]


Evaluate = Callable[[Tensor, Tensor], Evidence]
"""``(index (V,), poses (V, 3, 3)) -> Evidence (V, …)``: what the classifier says of those views of a batch."""
