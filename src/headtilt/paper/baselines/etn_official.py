"""The equivariant transformer with the architecture of its authors' code (Tai et al. 2019), written anew.

Two strided convolutions with batch normalisation look at a map in canonical coordinates; the maximum over the other
axis leaves a row for each pose parameter, a convolution and a softmax make it a distribution, and its centroid is the
parameter. The map is halved twice: what moves it by less than four samples is not followed exactly.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.geometry.warp import invert
from headtilt.paper.baselines.etn import read
from headtilt.paper.baselines.stn import Transformer, check_square

WIDTH = 20  # channels of the pose networks
KERNEL = 5
STRIDE = 2
LOG_RADII = (-math.log(10), math.log(2) / 2)
SHEARS = (-5.0, 5.0)


class OfficialETN(Transformer):
    """A backbone behind two equivariant transformers: rotation and scale first, then horizontal shear.

    Args:
        backbone: Any classifier of (B, C, H, W) images.
        channels: Channels of the images.
        size: Height and width of the images, and of the maps.

    Convention:
        `pose` moves the content. The official code finds the matrix by which the image is read, which is its inverse.
    """

    polar: Tensor
    sheared: Tensor

    def __init__(self, backbone: nn.Module, *, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        angles, radii = torch.linspace(-math.pi, math.pi, size), torch.linspace(*LOG_RADII, size).exp()
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
        slopes, heights = torch.linspace(*SHEARS, size), torch.linspace(-1, 1, size)
        points = torch.stack([slopes[:, None] * heights, heights.expand(size, size), torch.ones(size, size)], dim=-1)
        self.register_buffer("polar", directions[:, None] * radii[:, None], persistent=False)
        self.register_buffer("sheared", points, persistent=False)
        self.find_similarity = PoseNetwork(channels, across=True, down=True, circular=True)
        self.find_shear = PoseNetwork(channels, across=False, down=True, circular=False)
        self.backbone = backbone

    def pose(self, images: Tensor) -> Tensor:
        """Return the matrices (B, 3, 3) that bring the images into canonical form."""
        check_square(images, self.channels, self.size)
        radius, angle = self.find_similarity(read(images, self.polar.expand(len(images), -1, -1, -1)))
        factor = (radius * (LOG_RADII[1] - LOG_RADII[0]) / 2).exp()
        cos, sin = (factor * (angle * math.pi).cos(), factor * (angle * math.pi).sin())
        similar = _matrix(cos, -sin, sin, cos)
        places = torch.einsum("bij,vuj->bvui", similar[:, :2], self.sheared)
        (slope,) = self.find_shear(read(images, places))
        one, zero = torch.ones_like(slope), torch.zeros_like(slope)
        return invert(similar @ _matrix(one, slope * SHEARS[1], zero, one))


class PoseNetwork(nn.Module):
    """Where a pattern lies on a map, in [−1, 1] along each axis that is asked for, give or take a learned origin.

    Args:
        channels: Of the map.
        across: Whether to find the place along the columns.
        down: Whether to find the place along the rows.
        circular: Whether the rows wrap.
    """

    def __init__(self, channels: int, *, across: bool, down: bool, circular: bool) -> None:
        super().__init__()
        self.circular = circular
        self.first = nn.Conv2d(channels, WIDTH, KERNEL, stride=STRIDE, bias=False)
        self.first_norm = nn.BatchNorm2d(WIDTH)
        self.second = nn.Conv2d(WIDTH, WIDTH, KERNEL, stride=STRIDE, bias=False)
        self.second_norm = nn.BatchNorm2d(WIDTH)
        self.across = nn.Conv1d(WIDTH, 1, KERNEL, bias=False) if across else None
        self.down = nn.Conv1d(WIDTH, 1, KERNEL, bias=False) if down else None
        self.origins = nn.Parameter(torch.zeros(2))

    def forward(self, maps: Tensor) -> list[Tensor]:
        """Return the places (B,) on maps (B, C, H, W), across first."""
        steps = [2 / (length - 1) * STRIDE**2 for length in maps.shape[-2:]]
        for convolution, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            maps = F.leaky_relu(norm(convolution(self._padded(maps))), 0.1)
        found = []
        if self.across is not None:
            marks = self.across(F.pad(maps.amax(2), (KERNEL // 2, KERNEL // 2)))
            found.append(centroid(marks[:, 0].softmax(1), steps[1]) + self.origins[0].tanh())
        if self.down is not None:
            mode = "circular" if self.circular else "constant"
            marks = self.down(F.pad(maps.amax(3), (KERNEL // 2, KERNEL // 2), mode=mode))
            found.append(centroid(marks[:, 0].softmax(1), steps[0], circular=self.circular) + self.origins[1].tanh())
        return found

    def _padded(self, maps: Tensor) -> Tensor:
        reach = KERNEL // 2
        rows = F.pad(maps, (0, 0, reach, reach), mode="circular" if self.circular else "constant")
        return F.pad(rows, (reach, reach, 0, 0))


def centroid(weights: Tensor, step: float, *, circular: bool = False) -> Tensor:
    """Return the mean place (B,) of distributions (B, N) over places that are `step` apart and centred at 0.

    On a circle, whose half turn is 1, the mean is that of directions.
    """
    places = torch.arange(weights.shape[1], dtype=weights.dtype, device=weights.device) * step
    places = places - places[-1] / 2
    if not circular:
        return weights @ places
    return torch.atan2(weights @ (places * math.pi).sin(), weights @ (places * math.pi).cos()) / math.pi


def _matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return the matrices (B, 3, 3) with the linear part [[a, b], [c, d]]."""
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    return torch.stack([a, b, zero, c, d, zero, zero, zero, one], dim=-1).reshape(-1, 3, 3)
