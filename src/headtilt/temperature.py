"""One number that makes probabilities honest: of the images called 80 % sure, four in five should be right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headtilt.errors import ShapeError
from headtilt.evidence import floored

COLDEST, HOTTEST = 0.02, 50.0


def fit_temperature(logits: Tensor, labels: Tensor, *, steps: int = 60) -> float:
    """Return the temperature T under which softmax(logits / T) gives the labels the highest likelihood.

    The likelihood has a single maximum along log T, which golden sections close in on. Labels do not change. A weak
    prior around T = 1 keeps few images without a mistake from making every answer certain.

    Args:
        logits: (n, Y), as they will be answered: after the search and the gate, of upright and of tilted images.
        labels: (n,), the classifier's own labels of the same images upright.
        steps: Golden sections; each takes off a third of what is left.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(logits):
        raise ShapeError(f"logits must be (n, Y) and labels (n,); got {tuple(logits.shape)} and {tuple(labels.shape)}.")
    exact = floored(logits.double())
    ratio = (5**0.5 - 1) / 2

    def loss(log_temperature: Tensor) -> float:
        prior = log_temperature.square() / (2 * len(labels))
        return float(F.cross_entropy(exact / log_temperature.exp(), labels) + prior)

    low, high = torch.tensor([COLDEST, HOTTEST], dtype=torch.float64).log()
    for _ in range(steps):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, second) if loss(first) <= loss(second) else (first, high)
    return float(((low + high) / 2).exp())
