"""Images in, from wherever they come: EXIF orientation applied, as RGB, cut to the square that a model sees."""

from __future__ import annotations

import io
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headtilt.adapters import Adapted
from headtilt.data.decode import SUFFIXES, flattened
from headtilt.errors import DataError, MissingExtraError

MOST_PIXELS = 100_000_000


def find(sources: Iterable[str | Path]) -> list[Path]:
    """Return the image files that files, folders (searched to the bottom) and globs name, each once, folders sorted."""
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
            found.update(dict.fromkeys(inside))
        elif path.exists() or not any(sign in str(source) for sign in "*?["):
            found[path] = None
        else:
            found.update(dict.fromkeys(map(Path, sorted(glob(str(path), recursive=True)))))
    return list(found)


def read(source: Any, *, most_pixels: int = MOST_PIXELS) -> Tensor:
    """Return an image as RGB (3, H, W) in [0, 1], turned upright by its EXIF orientation.

    Args:
        source: A path, the bytes of a file, a PIL image, or an array (H, W), (H, W, C) of bytes.
        most_pixels: Larger images are refused before they are decoded.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError("pillow", "data") from error
    name = str(source) if isinstance(source, (str, Path)) else "image"
    try:
        if isinstance(source, Image.Image):
            image = source
        elif isinstance(source, np.ndarray):
            image = Image.fromarray(source)
        else:
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if image.width * image.height > most_pixels:
            raise DataError(f"{name} has {image.width}×{image.height} pixels, more than {most_pixels:,}.")
        rgb = flattened(ImageOps.exif_transpose(image), "RGB")
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(f"{name} could not be decoded as an image ({error}).") from error
    return torch.from_numpy(np.array(rgb, dtype=np.uint8)).permute(2, 0, 1).float() / 255


def prepare(image: Tensor, adapted: Adapted) -> Tensor:
    """Return the centre square (C, size, size) that the model sees of an image (3, H, W), nothing stretched."""
    height, width = image.shape[-2:]
    factor = adapted.resize / min(height, width)
    sides = (max(round(height * factor), adapted.size), max(round(width * factor), adapted.size))
    resized = torch.nn.functional.interpolate(image[None], sides, mode="bilinear", antialias=True)[0].clamp(0, 1)
    top, left = (sides[0] - adapted.size) // 2, (sides[1] - adapted.size) // 2
    square = resized[:, top : top + adapted.size, left : left + adapted.size]
    return square.mean(0, keepdim=True) if adapted.channels == 1 else square
