"""Back to the original: what was found on a canonical image, as it lies on the image as it came.

Convention:
    Pixel coordinates have x to the right and y down, and the image covers [0, W] × [0, H]: the centre of the first
    pixel is (0.5, 0.5). Boxes are (left, top, right, bottom) along pixel edges. A pose is what was done to the original
    to get the canonical image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtilt.errors import ShapeError
from headtilt.geometry.warp import invert, warp


def points_back(points: Tensor, poses: Tensor, height: int, width: int) -> Tensor:
    """Return points (B, N, 2) of canonical images as points of the originals.

    Args:
        points: (B, N, 2), pixels.
        poses: (B, 3, 3).
        height: Of the images.
        width: Of the images.
    """
    _check("points", points, poses, (2,))
    back = invert(poses.double()).to(points.device)
    centre = torch.tensor([width / 2, height / 2], dtype=torch.float64, device=points.device)
    half = max(height, width) / 2
    centred = (points.double() - centre) / half
    moved = centred @ back[:, :2, :2].mT + back[:, None, :2, 2]
    return (moved * half + centre).to(points.dtype if points.is_floating_point() else torch.get_default_dtype())


def boxes_back(boxes: Tensor, poses: Tensor, height: int, width: int, *, corners: bool = False) -> Tensor:
    """Return boxes (B, N, 4) as the upright boxes around them on the originals, or as their four corners (B, N, 4, 2).

    Args:
        boxes: (B, N, 4), left, top, right, bottom.
        poses: (B, 3, 3).
        height: Of the images.
        width: Of the images.
        corners: Return the tilted box itself, clockwise from what was its left upper corner.
    """
    _check("boxes", boxes, poses, (4,))
    around = boxes[..., [0, 1, 2, 1, 2, 3, 0, 3]].reshape(len(boxes), 4 * boxes.shape[1], 2)
    moved = points_back(around, poses, height, width).reshape(*boxes.shape[:2], 4, 2)
    return moved if corners else torch.cat([moved.amin(2), moved.amax(2)], dim=-1)


def masks_back(masks: Tensor, poses: Tensor) -> Tensor:
    """Return masks (B, N, H, W) of canonical images as masks of the originals, in their dtype; nothing lies outside."""
    _check("masks", masks, poses, masks.shape[2:] if masks.ndim == 4 else (0, 0))
    if not masks.numel():
        return masks
    values = masks if masks.is_floating_point() else masks.to(torch.float64)
    return warp(values, invert(poses.double()).to(masks.device), interpolation="nearest").to(masks.dtype)


def _check(name: str, value: object, poses: Tensor, last: tuple[int, ...]) -> None:
    form = {"points": "(B, N, 2)", "boxes": "(B, N, 4)", "masks": "(B, N, H, W)"}[name]
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor {form}; got {type(value).__name__}. Use torch.as_tensor.")
    if value.ndim != 2 + len(last) or value.shape[0] != len(poses) or tuple(value.shape[2:]) != tuple(last):
        raise ShapeError(f"{name} must be {form} with B = {len(poses)} images; got {tuple(value.shape)}.")
