"""Image files decoded to bytes of one size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headtilt.errors import DataError, MissingExtraError, at_least

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_SIDE = 100_000  # pixels; of run-length encoded lines Pillow may make 255 too many
MOST_SCANS = 100  # of a JPEG, as in libtiff; a progressive one has about ten, and each walks the whole picture
MOST_FRAMES = 10_000
STRIP = 1_000_000  # pixels that are converted at a time
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # what ends the data of a scan
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


class TooLargeError(DataError):
    """An image asks for more than it may, by what its header says."""


def check_bounds(image: Image, name: str, most_pixels: int) -> None:
    """Raise `TooLargeError` for an opened file that would cost too much to decode."""
    if image.width * image.height > most_pixels:
        raise TooLargeError(f"{name} has {image.width}×{image.height} pixels, more than {most_pixels:,}.")
    if image.format is None:  # in memory already, and nothing is left to decode
        return
    if max(image.width, image.height) > MOST_SIDE:
        raise TooLargeError(
            f"{name} has {image.width}×{image.height} pixels; no side may have more than {MOST_SIDE:,}."
        )
    # What is known of the frames without walking through the file; of the others only the first is ever looked at.
    frames = vars(image).get("n_frames", vars(image).get("_n_frames")) or 1
    if frames > MOST_FRAMES:
        raise TooLargeError(f"{name} has {frames:,} frames, more than {MOST_FRAMES:,}.")
    file = getattr(image, "fp", None)
    if image.format in ("JPEG", "MPO") and file is not None and scans(file) > MOST_SCANS:
        raise TooLargeError(f"{name} has more than {MOST_SCANS} scans, more than any camera or program writes.")


def scans(file: IO[bytes]) -> int:
    """Return how many scans the first picture of a JPEG file has, counted no further than one beyond `MOST_SCANS`."""
    place = file.tell()
    try:
        file.seek(0)
        content = file.read()
    finally:
        file.seek(place)
    at, count = 2, 0
    while count <= MOST_SCANS and (found := MARKER.search(content, at)):
        kind, at = content[found.start() + 1], found.end()
        if kind == 0xD9:
            break
        # Behind all others stands their length; the data of a scan, in which no marker can be, follows its header.
        at += int.from_bytes(content[at : at + 2], "big")
        count += kind == 0xDA
    return count


def flattened(image: Image, mode: str) -> Image:
    """Return the image in RGB or L, deeper pixels scaled to bytes and transparency laid over black."""
    from PIL import Image as Pillow

    if image.mode.startswith(("I", "F")):
        image = _in_bytes(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Pillow.new("RGBA", layer.size, (0, 0, 0, 255))
        image.alpha_composite(layer)
    return image if image.mode == mode else image.convert(mode)


def _in_bytes(image: Image) -> Image:
    """Return an image of 16-bit numbers or floats as bytes, strip by strip: Pillow itself clips at 255.

    Floats of 0 … 1, of 0 … 255 and of 0 … 65535 are told apart by the largest.
    """
    from PIL import Image as Pillow

    rows = max(1, STRIP // image.width)

    def strip(top: int) -> NDArray[np.float64]:
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        return np.nan_to_num(np.asarray(part).astype(np.float64))

    starts = range(0, image.height, rows)
    largest = max(strip(top).max(initial=0) for top in starts) if image.mode == "F" else 65535.0
    whole = next((limit for limit in (1.0, 255.0) if largest <= limit), 65535.0)
    pixels = np.empty((image.height, image.width), dtype=np.uint8)
    for top in starts:
        pixels[top : top + rows] = (strip(top).clip(0, whole) / whole * 255).round()
    return Pillow.fromarray(pixels)


def _centre_square(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
