"""The equivariant transformer (Tai et al. 2019): in canonical coordinates a transformation is a shift, easy to find.

Log-polar coordinates turn rotation and scale into shifts of angle and log-radius; the coordinates x/y and y turn a
horizontal shear into a shift of x/y. A convolutional network marks a place on such a map, and the place moves along
with the image: its position is the pose.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.geometry.warp import invert, resample
from headtilt.paper.baselines.stn import Transformer, check_square

_ANGLES = 64
_INNER_RADIUS = 0.1
_RADII = 32
_SHEARS = 32
_ROWS = 28
_SHEAR_REACH = 1.0
# Lifts even an untrained network's marks from the uniform distribution, whose mean direction is rounding noise.
_SHARPNESS = 10.0


class ETN(Transformer):
    """A backbone behind two equivariant transformers: rotation and scale first, then horizontal shear.

    Args:
        backbone: Any classifier of (B, C, H, W) images.
        channels: Channels of the images.
        size: Height and width of the images.
        wraps: Whether the map's angle goes on from 360° to 0°. Cut open there, its border tells the network where 0°
            is: trained on upright images it learns their angle by heart, and is equivariant no more.

    Convention:
        `pose` moves the content. Turning an image by α turns its pose by −α, so that its canonical form stays the same:
        exactly for quarter turns, up to interpolation for other multiples of 360°/64. Which way is up is left to
        training: the pose of an upright image is not the identity.
    """

    polar: Tensor
    directions: Tensor
    log_radii: Tensor
    sheared: Tensor
    slopes: Tensor

    def __init__(self, backbone: nn.Module, *, channels: int = 1, size: int = 28, wraps: bool = True) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        points = shear_points()
        constants = {
            "polar": log_polar_points(),
            "directions": _directions(),
            "log_radii": _log_radii(),
            "sheared": torch.cat([points, torch.ones_like(points[..., :1])], dim=-1),
            "slopes": _slopes(),
        }
        for name, value in constants.items():  # they move to a GPU with the network, once; no weights, never saved
            self.register_buffer(name, value, persistent=False)
        self.mark_polar = Marker(channels, 2, circular=wraps)
        self.mark_shear = Marker(channels, 1, circular=False)
        # Where the mark of an image of scale 1 and of no shear lies; the angle needs none, the network sees all of it.
        self.log_radius = nn.Parameter(_log_radii().mean())
        self.slope = nn.Parameter(torch.zeros(()))
        self.backbone = backbone

    def pose(self, images: Tensor) -> Tensor:
        """Return the matrices (B, 3, 3) that bring the images into canonical form."""
        check_square(images, self.channels, self.size)
        similar = self._undo_rotation_and_scale(images)
        return self._undo_shear(images, similar) @ similar

    def _undo_rotation_and_scale(self, images: Tensor) -> Tensor:
        maps = read(images, self.polar.expand(len(images), -1, -1, -1))
        for_angle, for_radius = self.mark_polar(maps).unbind(1)
        direction = (for_angle.sum(1, keepdim=True) @ self.directions)[:, 0]
        cos, sin = F.normalize(direction, dim=1, eps=1e-12).unbind(1)
        factor = (self.log_radius - for_radius.sum(2) @ self.log_radii).exp()
        return _linear(factor * cos, factor * sin, -factor * sin, factor * cos)

    def _undo_shear(self, images: Tensor, pose: Tensor) -> Tensor:
        # Read the original where the canonical coordinates of the moved image point: one interpolation, not two.
        source = torch.einsum("bij,vuj->bvui", invert(pose)[:, :2], self.sheared)
        mark = self.mark_shear(read(images, source))[:, 0]
        slope = mark.sum(1) @ self.slopes - self.slope
        one, zero = torch.ones_like(slope), torch.zeros_like(slope)
        return _linear(one, -slope, zero, one)


class Marker(nn.Module):
    """A network without stride or pooling whose outputs are distributions over the places of a map.

    Args:
        channels: Channels of the map.
        marks: Count of distributions.
        circular: Whether the last axis of the map wraps.
        width: Channels in between.
    """

    def __init__(self, channels: int, marks: int, *, circular: bool, width: int = 12) -> None:
        super().__init__()
        self.wrap = "circular" if circular else "constant"
        sizes = [(channels, width), (width, width), (width, marks)]
        self.layers = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 5, dilation=2**depth) for depth, (inputs, outputs) in enumerate(sizes)
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Return the distributions (B, marks, H, W), each of sum 1, over the places of maps (B, C, H, W)."""
        for depth, layer in enumerate(self.layers):
            reach = 2 * 2**depth
            padded = F.pad(F.pad(maps, (reach, reach, 0, 0), mode=self.wrap), (0, 0, reach, reach))
            maps = layer(F.gelu(padded) if depth else padded)
        return (_SHARPNESS * maps).flatten(2).softmax(dim=2).unflatten(2, maps.shape[2:])


def log_polar_points() -> Tensor:
    """Return the points (R, A, 2) of the log-polar map: log-radius along its rows, the angle along its columns."""
    return _log_radii().exp()[:, None, None] * _directions()


def shear_points() -> Tensor:
    """Return the points (V, U, 2) of the shear map: y along its rows, x/y along its columns."""
    rows = (2 * torch.arange(_ROWS) + 1) / _ROWS - 1
    return torch.stack(torch.broadcast_tensors(rows[:, None] * _slopes(), rows[:, None]), dim=-1)


def read(images: Tensor, points: Tensor) -> Tensor:
    """Return the values (B, C, H', W') of square images at points (B, H', W', 2); zero outside."""
    return resample(images, points, "zeros", "bilinear")


def _log_radii() -> Tensor:
    return torch.linspace(math.log(_INNER_RADIUS), 0, _RADII)


def _directions() -> Tensor:
    """Return the unit vectors (A, 2) of the angles, clockwise from x."""
    angles = torch.arange(_ANGLES) * (2 * math.pi / _ANGLES)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def _slopes() -> Tensor:
    return torch.linspace(-_SHEAR_REACH, _SHEAR_REACH, _SHEARS)


def _linear(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return the matrices (B, 3, 3) with the linear part [[a, b], [c, d]]."""
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    return torch.stack([a, b, zero, c, d, zero, zero, zero, one], dim=-1).reshape(-1, 3, 3)
