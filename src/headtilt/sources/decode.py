"""Image files decoded to bytes of one size."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headtilt.errors import DataError, MissingExtraError, at_least

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"})


def decode(
    paths: Sequence[Path], *, size: int | None = None, channels: Literal[1, 3] = 3, stretch: bool = False
) -> Tensor:
    """Return the images as uint8 (N, channels, H, W), upright by their EXIF orientation.

    Args:
        paths: At least one image file.
        size: Side of the square that comes back, resized with antialiased bilinear interpolation; None keeps the
            images as they are, which must then all have one size.
        channels: 3 for RGB, 1 for greyscale. What is transparent becomes black.
        stretch: Whether the whole image is squeezed into the square; otherwise its centre square is taken.
    """
    if size is not None:
        at_least("size", size, 1)

    def one(path: Path) -> NDArray[np.uint8]:
        return _decode(path, size, channels, stretch)

    first = one(paths[0])

    # Refused here rather than below, so that the pool drops the files that are still waiting.
    def other(path: Path) -> NDArray[np.uint8]:
        image = one(path)
        if image.shape != first.shape:
            raise DataError(
                f"images must have one size; {path} is {image.shape[2]}×{image.shape[1]} and {paths[0]} is "
                f"{first.shape[2]}×{first.shape[1]}. Give size=, to which all of them are resized."
            )
        return image

    images = np.empty((len(paths), *first.shape), dtype=np.uint8)
    images[0] = first
    with ThreadPoolExecutor() as pool:
        for index, image in enumerate(pool.map(other, paths[1:]), start=1):
            images[index] = image
    return torch.from_numpy(images)


def _decode(path: Path, size: int | None, channels: int, stretch: bool) -> NDArray[np.uint8]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError("pillow", "data") from error
    try:
        with Image.open(path) as file:
            refuse_programs(file, str(path))
            image = flattened(ImageOps.exif_transpose(file), "RGB" if channels == 3 else "L")
    except DataError:
        raise
    except Exception as error:
        # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more for a broken file.
        raise DataError(
            f"{path} could not be decoded as an image ({error}). Replace it, or take it out of the folder."
        ) from error
    if size is not None:
        box = (0.0, 0.0, image.width, image.height) if stretch else _centre_square(image.width, image.height)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def refuse_programs(image: Image, name: str) -> None:
    """Raise `DataError` for PostScript, which is a program: Pillow would have Ghostscript run it."""
    if image.format == "EPS":
        raise DataError(f"{name} is PostScript, which is a program rather than an image. Convert it first.")


def flattened(image: Image, mode: str) -> Image:
    """Return the image in RGB or L, 16-bit values scaled to bytes and transparency laid over black."""
    from PIL import Image as Pillow

    if image.mode.startswith("I"):
        # Pillow's own conversion clips 16-bit values at 255, which turns most of the picture white.
        wide = np.asarray(image).astype(np.float64)
        image = Pillow.fromarray((wide.clip(0, 65535) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Pillow.new("RGBA", layer.size, (0, 0, 0, 255))
        image.alpha_composite(layer)
    return image.convert(mode)


def _centre_square(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
