"""A group convolutional network (Cohen and Welling 2016) over p4: the plane's shifts and its four quarter turns.

A feature map has one more axis than usual, the rotation: (B, O, R, H, W). When the image turns, so does the map, and
its values move on along that axis.

Convention:
    Index r of the rotation axis is a filter turned r times by 360°/R, anticlockwise on the screen as `torch.rot90` is.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.errors import OptionError
from headtilt.paper.baselines.stn import check_square


class Lift(nn.Module):
    """Convolution of images (B, C, H, W) with four turns of each filter: (B, O, 4, H', W')."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(uniform(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the lifted feature maps."""
        return lift(images, torch.stack([turned(self.weight, r) for r in range(4)]), self.bias)


class GroupConv(nn.Module):
    """Convolution of feature maps (B, I, 4, H, W) over space and rotation: (B, O, 4, H', W')."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(uniform(outputs, inputs, 4, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Return the next feature maps."""
        # A turn acts on a filter over the group by turning it in the plane and moving it along the rotation axis.
        filters = torch.stack([turned(self.weight.roll(r, dims=2), r) for r in range(4)])
        return group_convolve(features, filters, self.bias)


class EquivariantCNN(nn.Module):
    """The paper's small network over a group of rotations: its logits are the same for an image and its turns.

    Half the channels of `SmallCNN`, since each is seen in several turns: about as many weights. The last convolution
    covers the whole map, as the first linear layer of `SmallCNN` does; the maximum over rotations follows it.

    Args:
        convolutions: The first lifts images to 4 channels, the second gives 8, the third 8, the last `hidden`.
        pooling: "max" or "mean", over blocks of 2×2 pixels.
        classes: Count of classes.
        channels: Channels of the images.
        size: Height and width of the images; 2×2 pooling must halve the maps evenly, or a turn would shift the blocks.
        hidden: Width of the last hidden layer.
    """

    def __init__(
        self,
        convolutions: tuple[nn.Module, nn.Module, nn.Module, nn.Module],
        pooling: str,
        *,
        classes: int,
        channels: int,
        size: int,
        hidden: int,
    ) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        first, second, third, last = convolutions
        self.maps = nn.Sequential(first, nn.GELU(), second, nn.GELU(), Halve(pooling), third, nn.GELU(), Halve(pooling))
        self.hidden = last
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(hidden, classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the equivariant feature maps (B, O, R, h, w)."""
        check_square(images, self.channels, self.size)
        maps: Tensor = self.maps(images)
        return maps

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y) for images (B, C, H, W) with pixels in [0, 1]."""
        hidden = F.gelu(self.hidden(self.features(images))).flatten(2).amax(dim=2)
        logits: Tensor = self.classifier(self.dropout(hidden))
        return logits


class GCNN(EquivariantCNN):
    """The paper's small network with p4 convolutions; its logits are the same for an image and its quarter turns.

    Args:
        classes: Count of classes.
        channels: Channels of the images.
        size: Height and width of the images.
        hidden: Width of the last hidden layer.
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28, hidden: int = 16) -> None:
        last = final_size(size)
        layers = Lift(channels, 4, 5), GroupConv(4, 8, 5), GroupConv(8, 8, 5), GroupConv(8, hidden, last)
        super().__init__(layers, "max", classes=classes, channels=channels, size=size, hidden=hidden)


class Halve(nn.Module):
    """Pooling of feature maps (B, O, R, H, W) over blocks of 2×2 pixels, each rotation for itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2) if kind == "max" else nn.AvgPool2d(2)

    def forward(self, features: Tensor) -> Tensor:
        """Return the feature maps at half the size."""
        halved: Tensor = self.pool(features.flatten(1, 2))
        return halved.unflatten(1, features.shape[1:3])


def turned(filters: Tensor, quarters: int) -> Tensor:
    """Return filters (…, k, k) turned anticlockwise by quarters of 90°."""
    return torch.rot90(filters, quarters, dims=(-2, -1))


def lift(images: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
    """Return (B, O, R, H', W'): images (B, C, H, W) against filters (R, O, C, k, k), one for each rotation."""
    rotations, outputs = filters.shape[:2]
    maps = F.conv2d(images, filters.transpose(0, 1).flatten(0, 1), bias.repeat_interleave(rotations))
    return maps.unflatten(1, (outputs, rotations))


def group_convolve(features: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
    """Return (B, O, R, H', W'): features (B, I, R, H, W) against filters (R, O, I, R, k, k), one for each rotation."""
    return lift(features.flatten(1, 2), filters.flatten(2, 3), bias)


def uniform(outputs: int, *fan_in: int) -> Tensor:
    """Return random weights (outputs, *fan_in) of the spread that torch gives its own convolutions."""
    bound = 1 / math.sqrt(math.prod(fan_in))
    return torch.empty(outputs, *fan_in).uniform_(-bound, bound)


def final_size(size: int) -> int:
    """Return the size of the map after two 5×5 convolutions, a halving, a third convolution and a halving."""
    if size < 20 or size % 4:
        raise OptionError(f"size must be a multiple of 4 and at least 20, so that pooling halves evenly; got {size}.")
    return ((size - 8) // 2 - 4) // 2
