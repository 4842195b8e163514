"""Doors for classifiers from elsewhere: each gives raw pixels in, logits out, and what it takes to prepare an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from headtilt.geometry.warp import Padding
from headtilt.model.state import SAMPLED_LAYERS

Resample = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]


@dataclass(frozen=True)
class Square:
    """What is cut from a photograph: all that one needs to know of a model to prepare images for it.

    Attributes:
        size: Side of the square.
        resize: Shorter side to which photographs are resized before the centre square is cut.
        channels: 3 for colour, 1 for greyscale.
        resample: How photographs are resized.
    """

    size: int
    resize: int
    channels: int = 3
    resample: Resample = "bilinear"


@dataclass(frozen=True)
class Adapted:
    """A classifier as headtilt wants it.

    What a source does to an image before its model is split in two. The geometric part (resize, centre square) comes
    before the search and is described here; the photometric part (normalisation) comes after each warp and is inside
    the model.

    Attributes:
        model: From raw pixels (B, C, size, size) in [0, 1] to logits; its own normalisation is inside.
        labels: Class names, or None where the source has none.
        size: Side of the square it sees.
        resize: Shorter side to which photographs are resized before the centre square is cut.
        padding: How views should be padded; photographs by reflection, "auto" where nobody knows.
        name: What reports call it.
        channels: 3 for colour, 1 for greyscale.
        resample: How photographs are resized.
        features: Modules whose inputs are features, for `ITS`; "auto" looks for them, None where there are none.
    """

    model: nn.Module
    labels: tuple[str, ...] | None
    size: int
    resize: int
    padding: Padding
    name: str
    channels: int = 3
    resample: Resample = "bilinear"
    features: str | tuple[str, ...] | None = "auto"

    @property
    def square(self) -> Square:
        """What it sees of a photograph."""
        return Square(self.size, self.resize, self.channels, self.resample)

    @property
    def sampled(self) -> tuple[str, ...]:
        """Names of the dropout layers that Monte-Carlo passes can sample; none for a black box."""
        named = self.model.named_modules()
        return tuple(name for name, layer in named if isinstance(layer, SAMPLED_LAYERS) and layer.p > 0)
