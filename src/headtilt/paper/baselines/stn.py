"""The spatial transformer (Jaderberg et al. 2015): a small network looks at the image and regresses an affine warp.

Also what the other transformers share with it: what they are, the localisation network and the check of the images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headtilt.errors import ShapeError
from headtilt.geometry.warp import check_images, invert, warp
from headtilt.sources.zoo.cnn import flat_size


class Transformer(nn.Module):
    """A backbone behind what moves images into canonical form."""

    backbone: nn.Module

    def pose(self, images: Tensor) -> Tensor:
        """Return the matrices (B, 3, 3) that bring the images into canonical form."""
        raise NotImplementedError

    def canonical(self, images: Tensor) -> Tensor:
        """Return the images (B, C, H, W) moved by their poses."""
        return warp(images, self.pose(images))

    def forward(self, images: Tensor) -> Tensor:
        """Return the backbone's logits (B, Y) on the canonical images."""
        logits: Tensor = self.backbone(self.canonical(images))
        return logits


class STN(Transformer):
    """A backbone behind one affine spatial transformer.

    Args:
        backbone: Any classifier of (B, C, H, W) images.
        channels: Channels of the images.
        size: Height and width of the images.

    Convention:
        The network regresses where to sample, output to source, as in the paper; `pose` is the inverse of that and
        moves the content, so it estimates what undoes the perturbation. It starts at the identity.
    """

    def __init__(self, backbone: nn.Module, *, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        self.localise = Localisation(6, channels=channels, size=size)
        self.backbone = backbone

    def pose(self, images: Tensor) -> Tensor:
        """Return the matrices (B, 3, 3) that bring the images into canonical form."""
        return invert(affine(self.localise(images)))


class Localisation(nn.Module):
    """A small network of two convolutions and two linear layers that regresses `outputs` numbers, at first all zero."""

    def __init__(self, outputs: int, *, channels: int = 1, size: int = 28, hidden: int = 32) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        self.features = nn.Sequential(
            nn.Conv2d(channels, 8, 5),
            nn.MaxPool2d(2),
            nn.GELU(),
            nn.Conv2d(8, 10, 5),
            nn.MaxPool2d(2),
            nn.GELU(),
            nn.Flatten(),
        )
        self.hidden = nn.Sequential(nn.Linear(flat_size(self.features, channels, size), hidden), nn.GELU())
        self.regress = nn.Linear(hidden, outputs)
        nn.init.zeros_(self.regress.weight)
        nn.init.zeros_(self.regress.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the regressed numbers (B, outputs)."""
        check_square(images, self.channels, self.size)
        numbers: Tensor = self.regress(self.hidden(self.features(images)))
        return numbers


def affine(offsets: Tensor) -> Tensor:
    """Return the matrices (B, 3, 3) that differ from the identity by `offsets` (B, 6) in their first two rows."""
    identity = torch.eye(3, dtype=offsets.dtype, device=offsets.device)
    upper = identity[:2] + offsets.reshape(-1, 2, 3)
    return torch.cat([upper, identity[2:].expand(len(offsets), 1, 3)], dim=1)


def check_square(images: object, channels: int, size: int) -> None:
    """Raise `ShapeError` unless `images` is a floating-point (B, channels, size, size) tensor."""
    check_images(images)
    if isinstance(images, Tensor) and images.shape[1:] != (channels, size, size):
        raise ShapeError(
            f"images must be (B, {channels}, {size}, {size}), as the network was made; got {tuple(images.shape)}. "
            "Make it with the channels and size of your images."
        )
