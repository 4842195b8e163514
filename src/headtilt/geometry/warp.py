"""Resampling of images under affine poses: aspect-correct, batched, always from the original image."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from headtilt.errors import OptionError, ShapeError, is_number, one_of

Padding = Literal["auto", "zeros", "border", "reflection"] | float | tuple[float, ...]
Interpolation = Literal["bilinear", "nearest", "bicubic"]

Rows = Tensor | slice  # which images of a batch
PADDING_WORDS: tuple[Literal["auto", "zeros", "border", "reflection"], ...] = ("auto", "zeros", "border", "reflection")
FLAT_TOLERANCE = 0.04  # of the range [0, 1]: ten steps of a byte, more than JPEG adds to a plain background
FLAT_SHARE = 0.75  # of the frame: an object may touch it
BYTES_ABOVE, NORMALISED_BELOW = 10.0, -0.5  # pixels: no resampling takes those of 0 … 1 so far
SHORTEST_SIDE = 8  # pixels of what is taken for a side rather than for channels


def warp(
    images: Tensor, poses: Tensor, *, padding: Padding = "zeros", interpolation: Interpolation = "bilinear"
) -> Tensor:
    """Return the images with their content moved by the poses, in the same shape and dtype.

    Args:
        images: (B, C, H, W) raw pixels, floating point. Normalise afterwards: padding is in pixel values.
        poses: (B, 3, 3), or (N, 3, 3) for a single image, which then gives (N, C, H, W).
        padding: What lies outside: "zeros", "border", "reflection", one number, or one number per channel; "auto" goes
            by each image's own frame: its colour where it has but one (see `frame_colour`), else reflection.
        interpolation: "bilinear", "nearest" or "bicubic".

    Convention:
        Poses act on centred isotropic coordinates (x right, y down, the longer side spans [−1, 1]), so a rotation stays
        a rotation on any aspect ratio. ``warp(warp(x, a), b) ≈ warp(x, b @ a)``. `align_corners` is False.
    """
    check_images(images)
    one_of("interpolation", interpolation, ("bilinear", "nearest", "bicubic"))
    if not isinstance(poses, Tensor):
        raise ShapeError(f"poses must be a tensor (B, 3, 3); got {type(poses).__name__}. Use torch.as_tensor.")
    if poses.ndim != 3 or poses.shape[-2:] != (3, 3):
        raise ShapeError(f"poses must be (B, 3, 3); got {tuple(poses.shape)}.")
    count, views = images.shape[0], poses.shape[0]  # `len` would fix the batch of an exported graph
    if count != views and count != 1:
        raise ShapeError(f"poses must be as many as images; got {views} poses for {count} images.")
    checked_padding(padding)
    return _warped(images, poses, padding, interpolation)


def _warped(images: Tensor, poses: Tensor, padding: Padding, interpolation: Interpolation) -> Tensor:
    """Return what `warp` does of arguments that were checked."""
    height, width = images.shape[-2:]
    exact = images.dtype if images.dtype == torch.float64 else torch.float32
    grid = sampling_grid(poses.to(images.device), height, width).to(exact)
    return resample(images.to(exact), grid, padding, interpolation).to(images.dtype)


def warp_all(
    images: Tensor, poses: Tensor, *, padding: Padding = "zeros", interpolation: Interpolation = "bilinear"
) -> Tensor:
    """Return every image under every pose, (P, B, C, H, W): what `warp` gives, at a fraction of its cost on a CPU.

    Nothing is checked here: `warp` says what is wrong with its arguments.

    Args:
        images: (B, C, H, W).
        poses: (P, 3, 3).
        padding: See `warp`.
        interpolation: See `warp`.
    """
    shape = (len(poses), *images.shape)
    exact = interpolation == "nearest"  # no pixel may be computed with
    if images.device.type != "cpu" or not isinstance(padding, str) or (padding == "auto" and (exact or is_compiling())):
        views = images.expand(shape).flatten(0, 1)
        each = poses.repeat_interleave(len(images), dim=0)
        return _warped(views, each, padding, interpolation).reshape(shape)
    if padding == "auto":
        return _all_by_frame(images, poses, interpolation)
    # All images as channels of one: where a pixel comes from, and with which weights, is computed once for them all. A
    # GPU, whose threads share out the pixels and not the channels, would idle.
    stack = images.reshape(1, -1, *images.shape[-2:])
    return _warped(stack, poses, padding, interpolation).reshape(shape)


def sampling_grid(poses: Tensor, height: int, width: int) -> Tensor:
    """Return where each output pixel comes from, (B, H, W, 2), in the [−1, 1] coordinates of `grid_sample`."""
    inverse = invert(poses if poses.dtype == torch.float64 else poses.float())
    longer = max(height, width)
    # The grid is a sum of what depends on x alone and what depends on y alone: one pass over memory. Isotropic
    # coordinates in, those of `grid_sample` out; the factors are filled in on the device, which need not be waited for.
    x = _pixel_centres(width, inverse)[:, None] * (width / longer)
    y = _pixel_centres(height, inverse)[:, None] * (height / longer)
    rows = inverse[:, :2] / torch.stack([inverse.new_full((1,), side / longer) for side in (width, height)])
    over_x = rows[:, None, :, 0] * x + rows[:, None, :, 2]
    over_y = rows[:, None, :, 1] * y
    return over_x[:, None] + over_y[:, :, None]


def invert(matrix: Tensor) -> Tensor:
    """Return the inverses of affine matrices (…, 3, 3), in closed form: no device synchronisation, last row exact."""
    a, b, c, d = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 0], matrix[..., 1, 1]
    x, y = matrix[..., 0, 2], matrix[..., 1, 2]
    determinant = a * d - b * c
    entries = [d, -b, b * y - d * x, -c, a, c * x - a * y]
    upper = torch.stack(entries, dim=-1) / determinant[..., None]
    # From `eye`, which a device fills by itself: numbers copied to it would make the host wait for all it has to do.
    bottom = torch.eye(3, dtype=matrix.dtype, device=matrix.device)[2].expand(*upper.shape[:-1], 3)
    return torch.cat([upper, bottom], dim=-1).reshape(matrix.shape)


def resample(images: Tensor, grid: Tensor, padding: Padding, interpolation: Interpolation) -> Tensor:
    """Return `images` (B or 1, C, H, W) read at `grid` (B, H, W, 2), with any padding that `warp` takes."""
    if not isinstance(padding, str):
        return _on_colour(images, grid, padding_colour(padding, images), interpolation)
    if padding == "auto":
        return _by_frame(images.expand(grid.shape[0], -1, -1, -1), grid, interpolation)
    return _sampled(images, grid, padding, interpolation)


def _sampled(images: Tensor, grid: Tensor, padding: str, interpolation: Interpolation) -> Tensor:
    """Return what `grid_sample` does; cubic curves overshoot at edges, and no pixel leaves the range of its channel."""
    whole = images.expand(grid.shape[0], -1, -1, -1)
    read = F.grid_sample(whole, grid, mode=interpolation, padding_mode=padding, align_corners=False)
    if interpolation != "bicubic":
        return read
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    if padding == "zeros":
        low, high = low.clamp_max(0), high.clamp_min(0)
    return read.clamp_(low, high)


def frame_colour(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour of each image's frame, and whether the frame is flat: of that one colour.

    The frame is the outermost pixels on all four sides, its colour their median in each channel. It is flat where at
    least `FLAT_SHARE` of them lie within `FLAT_TOLERANCE` of that colour in every channel.

    Args:
        images: (B, C, H, W), pixels in [0, 1].

    Returns:
        Colour (B, C) in the images' dtype, flat (B,).
    """
    inner = images[..., 1:-1, :]
    frame = torch.cat([images[..., 0, :], images[..., -1, :], inner[..., 0], inner[..., -1]], dim=-1)
    count = frame.shape[-1]
    # The lower median. `median` itself is unknown to ONNX, and refuses a GPU that was told to be deterministic.
    colour = frame.topk(count // 2 + 1, dim=-1, sorted=False).values.amin(dim=-1)
    near = ((frame - colour[..., None]).abs() <= FLAT_TOLERANCE).all(dim=1)
    return colour, near.sum(dim=-1) >= math.ceil(FLAT_SHARE * count)


def padding_colour(padding: float | tuple[float, ...], images: Tensor) -> Tensor:
    """Return a constant padding as (1, C, 1, 1) or (1, 1, 1, 1)."""
    colour = padding_values(padding)
    if isinstance(colour, tuple) and len(colour) != images.shape[1]:
        raise OptionError(f"padding must be one number or {images.shape[1]} numbers, one per channel; got {padding!r}.")
    return torch.tensor(colour, dtype=images.dtype).to(images.device, non_blocking=True).reshape(1, -1, 1, 1)


def padding_values(padding: object) -> float | tuple[float, ...]:
    """Return a constant padding as plain numbers, whatever holds them; raise `OptionError` unless they are finite."""
    given: Any = padding.tolist() if isinstance(padding, (Tensor, np.ndarray)) else padding
    numbers = given if isinstance(given, (list, tuple)) else [given]
    if not all(is_number(value) for value in numbers):
        raise OptionError(f"padding must be a word, a number or a number per channel; got {padding!r}.")
    if not all(math.isfinite(value) for value in numbers):
        raise OptionError(f"padding must be finite; got {padding!r}.")
    return tuple(map(float, numbers)) if numbers is given else float(given)


def checked_padding(padding: Any) -> Padding:
    """Return a padding, numbers as plain ones; raise `OptionError` unless it is a word that is known, or finite."""
    if isinstance(padding, str):
        one_of("padding", padding, PADDING_WORDS)
        return cast(Padding, padding)
    return padding_values(padding)


def check_images(images: object, name: str = "images") -> None:
    """Raise `ShapeError` unless `images` is a non-empty floating-point (B, C, H, W) tensor."""
    if not isinstance(images, Tensor):
        kind = type(images).__name__
        raise ShapeError(f"{name} must be a tensor (B, C, H, W); got {kind}. {_as_tensor(images)}")
    if images.ndim != 4:
        last = images.ndim == 3 and _channels_last(images)
        one = "images.permute(2, 0, 1)[None]" if last else "images[None]"
        fixes = {2: " Add batch and channel axes: images[None, None].", 3: f" Add a batch axis: {one}."}
        fix = fixes.get(images.ndim, "")
        raise ShapeError(f"{name} must be (B, C, H, W); got {tuple(images.shape)}.{fix}")
    if _channels_last(images):
        raise ShapeError(
            f"{name} must be (B, C, H, W); got {tuple(images.shape)}, which looks like (B, H, W, C). "
            "Move the channels: images.permute(0, 3, 1, 2)."
        )
    if 0 in images.shape:
        raise ShapeError(f"{name} must hold at least one image and pixel; got {tuple(images.shape)}.")
    if not images.is_floating_point():
        raise ShapeError(f"{name} must be floating point; got {images.dtype}. For bytes use images.float() / 255.")


def _channels_last(images: Tensor) -> bool:
    """Return whether images look like (…, H, W, C): few channels at the end, and a whole side where they belong."""
    return images.shape[-1] in (1, 3, 4) and min(images.shape[-3:-1]) >= SHORTEST_SIDE


def _as_tensor(images: object) -> str:
    """Return how to make a tensor of what is none."""
    if isinstance(images, (list, tuple)):
        return "Use torch.stack(images) for tensors; for files and PIL images from_pretrained(…).read(*images)."
    if hasattr(images, "__array__") and hasattr(images, "dtype"):
        return "Use torch.as_tensor(images)."
    return "For files and PIL images use from_pretrained(…).read(image), or torchvision's transforms."


def warn_of_range(images: Tensor) -> None:
    """Warn where pixels are not what 0 … 1 looks like: bytes as floats, or images that are normalised already."""
    low, high = (float(end) for end in images.aminmax())
    if high > BYTES_ABOVE:
        said = f"images have pixels up to {high:.0f}: they look like bytes. Divide by 255: pixels are 0 … 1"
    elif low < NORMALISED_BELOW:
        said = (
            f"images have pixels down to {low:.2f}: they look normalised already. Give raw pixels in 0 … 1 and put the "
            "normalisation into the model, since views are padded before it"
        )
    else:
        return
    warnings.warn(f"{said}. If the model wants them so, ignore this.", stacklevel=4)


def all_finite(images: Tensor) -> bool:
    """Return whether no pixel is NaN or infinite; `isfinite` would take the memory of the images once more."""
    low, high = images.aminmax()  # where there is a NaN, both are
    return bool(low.isfinite() & high.isfinite())


def _pixel_centres(size: int, like: Tensor) -> Tensor:
    """Return the centres of `size` pixels on [−1, 1]."""
    return (2 * torch.arange(size, dtype=like.dtype, device=like.device) + 1) / size - 1


def _on_colour(images: Tensor, grid: Tensor, colour: Tensor, interpolation: Interpolation) -> Tensor:
    """Return images read at a grid, on a ground of a colour (B or 1, C or 1, 1, 1)."""
    if interpolation == "nearest":  # pixels are moved and not computed with: each stays what it is, to the last bit
        inside = _sampled(torch.ones_like(images[:, :1]), grid, "zeros", interpolation)
        return torch.where(inside > 0, _sampled(images, grid, "zeros", interpolation), colour)
    return _sampled(images - colour, grid, "zeros", interpolation).add_(colour)


def _by_frame(images: Tensor, grid: Tensor, interpolation: Interpolation) -> Tensor:
    """Return images read at a grid, each on the colour of its frame where that is flat, else mirrored."""
    colour, flat = frame_colour(images)
    ground = colour[..., None, None]

    def coloured(rows: Rows) -> Tensor:
        return _on_colour(images[rows], grid[rows], ground[rows], interpolation)

    def mirrored(rows: Rows) -> Tensor:
        return resample(images[rows], grid[rows], "reflection", interpolation)

    if is_compiling() or images.device.type != "cpu":
        # A graph cannot branch on what it sees, and a GPU would have to be waited for: resampling twice is less.
        return torch.where(flat[:, None, None, None], coloured(slice(None)), mirrored(slice(None)))
    return _by_flatness(flat, coloured, mirrored, 0)


def _all_by_frame(images: Tensor, poses: Tensor, interpolation: Interpolation) -> Tensor:
    """Return what `warp_all` gives with padding "auto" on a CPU: the images of each kind in one call."""
    exact = images if images.dtype == torch.float64 else images.float()
    colour, flat = frame_colour(exact)
    ground = colour[..., None, None]

    def coloured(rows: Rows) -> Tensor:
        shifted = warp_all(exact[rows] - ground[rows], poses, padding="zeros", interpolation=interpolation)
        return shifted.add_(ground[rows]).to(images.dtype)

    def mirrored(rows: Rows) -> Tensor:
        return warp_all(images[rows], poses, padding="reflection", interpolation=interpolation)

    return _by_flatness(flat, coloured, mirrored, 1)


def _by_flatness(
    flat: Tensor, coloured: Callable[[Rows], Tensor], mirrored: Callable[[Rows], Tensor], axis: int
) -> Tensor:
    """Return what one function makes of the flat rows and another of the rest, put together in order along an axis.

    Args:
        flat: (B,), which rows are flat.
        coloured: Given rows, returns a tensor with as many along the axis.
        mirrored: The same for the others. A function for which there are no rows is not called.
        axis: Where the rows lie in what the functions return.
    """
    some, others = flat.nonzero()[:, 0], (~flat).nonzero()[:, 0]
    if not len(some) or not len(others):
        return (coloured if len(some) else mirrored)(slice(None))
    first = coloured(some)
    shape = (*first.shape[:axis], len(flat), *first.shape[axis + 1 :])
    return first.new_empty(shape).index_copy_(axis, some, first).index_copy_(axis, others, mirrored(others))


def centre_crop(images: Tensor, side: int | None) -> Tensor:
    """Return the centre square (B, C, side, side), or the images themselves where side is None."""
    if side is None:
        return images
    height, width = images.shape[-2:]
    if side > min(height, width):
        raise OptionError(f"crop must fit into the images; got {side} for {height}×{width}.")
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


def around(transforms: Tensor, share: float) -> Tensor:
    """Return transforms (…, 3, 3) of a centre square in coordinates of the image of whose longer side it is a share."""
    factors = torch.ones(3, 3, dtype=transforms.dtype, device=transforms.device)
    factors[:2, 2] = share
    return transforms * factors
