"""A small residual network for 32×32 photographs: a ResNet-18 of half the width, with a stem that keeps the size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.errors import OptionError, at_least

WIDTHS = (32, 64, 128, 256)
# Of the red, green and blue of CIFAR-10's training images, as published.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DROPOUT = 0.1  # before the last layer


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch normalisation, added to their input.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Of the first convolution; 2 halves the image.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, outputs, 3, stride), nn.ReLU(), *_convolution(outputs, outputs, 3)
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps (B, outputs, H / stride, W / stride)."""
        return F.relu(self.body(maps) + self.shortcut(maps))


class ResNet(nn.Module):
    """A 3×3 stem, four stages of two basic blocks, the mean over the image, and a linear layer: 2.8 million weights.

    It takes pixels as they are and normalises them itself. The light dropout before the last layer is there for
    Monte-Carlo passes, which need one to sample.

    Args:
        classes: Number of classes Y.
        channels: Channels of the images, which must be 3.
        size: Side of the images, at least 8: the stages halve it three times.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        if channels != len(MEAN):
            raise OptionError(f"channels must be {len(MEAN)} for a resnet; got {channels}. Use 'small' or 'large'.")
        at_least("size", size, 8)
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None])
        self.register_buffer("deviation", torch.tensor(DEVIATION)[:, None, None])
        blocks: list[nn.Module] = []
        inputs = WIDTHS[0]
        for stage, width in enumerate(WIDTHS):
            blocks += [BasicBlock(inputs, width, 1 if stage == 0 else 2), BasicBlock(width, width)]
            inputs = width
        stem = [*_convolution(channels, WIDTHS[0], 3), nn.ReLU()]
        self.backbone = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(WIDTHS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y) for images (B, 3, H, W) with pixels in [0, 1]."""
        logits: Tensor = self.classifier(self.dropout(self.backbone((images - self.mean) / self.deviation)))
        return logits


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
