"""Doors for classifiers from elsewhere: each gives raw pixels in, logits out, and what it takes to prepare an image."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from headtilt.warp import Padding


@dataclass(frozen=True)
class Adapted:
    """A classifier as headtilt wants it.

    Attributes:
        model: From raw pixels (B, C, size, size) in [0, 1] to logits; its own normalisation is inside.
        labels: Class names, or None where the source has none.
        size: Side of the square it sees.
        resize: Shorter side to which photographs are resized before the centre square is cut.
        padding: How views should be padded; photographs by reflection.
        name: What reports call it.
        channels: 3 for colour, 1 for greyscale.
    """

    model: nn.Module
    labels: tuple[str, ...] | None
    size: int
    resize: int
    padding: Padding
    name: str
    channels: int = 3
