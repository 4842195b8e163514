"""Layers of what is fitted: they draw nothing from the global random stream."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer of zeros: `nn.Linear` would draw its weights from the global random stream."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SeededDropout(nn.Module):
    """Dropout whose masks come from a generator of its own: training leaves the global random stream alone.

    All views (n, V, D) of an image lose the same inputs: they are compared with one another, and random numbers take
    time.

    Args:
        p: Share of the inputs that are dropped in training.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs; in training some are dropped and the others grow for them."""
        if not self.training or self.generator is None or not self.p:
            return inputs
        kept = torch.empty_like(inputs[:, :1]).bernoulli_(1 - self.p, generator=self.generator)
        return inputs * (kept / (1 - self.p))


def seed_layers(network: nn.Sequential, generator: torch.Generator) -> None:
    """Give a network fresh weights and dropout from a generator; its last layer says nothing yet."""
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in layers:
            bound = 1 / math.sqrt(layer.in_features)
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.zero_()
        layers[-1].weight.zero_()
    for part in network:
        if isinstance(part, SeededDropout):
            part.generator = generator
