"""The inverse compositional spatial transformer (Lin and Lucey 2017): refines the warp step by step, not the pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headtilt.errors import at_least
from headtilt.geometry.warp import invert, warp
from headtilt.paper.baselines.stn import Localisation, Transformer, affine


class ICSTN(Transformer):
    """A backbone behind `steps` recurrent affine transformers that share one localisation network.

    Args:
        backbone: Any classifier of (B, C, H, W) images.
        channels: Channels of the images.
        size: Height and width of the images.
        steps: How often the warp is refined; the paper's STN³ has three.

    Convention:
        Each step looks at the image under the pose so far and regresses a further sampling matrix; the new pose is the
        old one, then its inverse. Every look resamples the original, so that no detail is lost to interpolation or to
        the border. `pose` moves the content and starts at the identity.
    """

    def __init__(self, backbone: nn.Module, *, channels: int = 1, size: int = 28, steps: int = 3) -> None:
        super().__init__()
        at_least("steps", steps, 1)
        self.localise = Localisation(6, channels=channels, size=size)
        self.backbone = backbone
        self.steps = steps

    def pose(self, images: Tensor) -> Tensor:
        """Return the matrices (B, 3, 3) that bring the images into canonical form."""
        pose = torch.eye(3, dtype=images.dtype, device=images.device).expand(len(images), 3, 3)
        for _ in range(self.steps):
            pose = invert(affine(self.localise(warp(images, pose)))) @ pose
        return pose
