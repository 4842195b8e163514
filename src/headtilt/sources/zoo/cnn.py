"""The two convolutional networks of the paper's appendix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headtilt.errors import OptionError


class PaperCNN(nn.Module):
    """A convolutional backbone, then two linear layers with GELU and 50 % dropout between them.

    Args:
        backbone: From images to flat vectors.
        classes: Number of classes Y.
        channels: Channels of the images.
        size: Side of the images.
        hidden: Width of the first linear layer.
    """

    def __init__(self, backbone: nn.Module, classes: int, channels: int, size: int, hidden: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.hidden = nn.Sequential(nn.Linear(flat_size(backbone, channels, size), hidden), nn.GELU())
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y) for images (B, C, H, W) with pixels in [0, 1]."""
        logits: Tensor = self.classifier(self.dropout(self.hidden(self.backbone(images))))
        return logits


class SmallCNN(PaperCNN):
    """The paper's small network (MNIST, Fashion-MNIST): three 5×5 convolutions of 8, 16 and 16 channels.

    GELU after each convolution, 2×2 max-pooling after the second and third. The paper is silent on padding (none here)
    and on the hidden width (32 here).
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28, hidden: int = 32) -> None:
        backbone = nn.Sequential(
            nn.Conv2d(channels, 8, 5),
            nn.GELU(),
            nn.Conv2d(8, 16, 5),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 5),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        super().__init__(backbone, classes, channels, size, hidden)


class LargeCNN(PaperCNN):
    """The paper's large network (GTSRB): convolutions of 100, 150 and 250 channels with kernels 5, 3 and 1.

    After each: GELU, 2×2 max-pooling, batch normalisation and dropout (25 % here, the paper gives no rate); the hidden
    width is 350 here.
    """

    def __init__(self, classes: int = 43, channels: int = 3, size: int = 32, hidden: int = 350) -> None:
        blocks = [*_block(channels, 100, 5), *_block(100, 150, 3), *_block(150, 250, 1)]
        super().__init__(nn.Sequential(*blocks, nn.Flatten()), classes, channels, size, hidden)


def _block(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(outputs),
        nn.Dropout(0.25),
    ]


def flat_size(backbone: nn.Module, channels: int, size: int) -> int:
    """Return how many numbers the backbone makes of one (channels, size, size) image."""
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        with torch.no_grad():
            return int(backbone(torch.zeros(1, channels, size, size)).numel())
    except RuntimeError as error:
        raise OptionError(f"size must be large enough for the network's kernels and pooling; got {size}.") from error
    finally:
        for module, mode in modes:
            module.training = mode
