"""Images in, from wherever they come: EXIF orientation applied, as RGB, cut to the square that a model sees."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headtilt.errors import DataError, MissingExtraError
from headtilt.sources import Adapted, Square
from headtilt.sources.decode import SUFFIXES, TooLargeError, check_bounds, flattened, refuse_programs

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 100_000_000
NAMED_AS_IMAGES = SUFFIXES | {".gif", ".jfif", ".jpe", ".pgm", ".pbm", ".tga", ".avif", ".jp2", ".mpo"}
ORIENTATION = 0x0112  # tag of EXIF
MOST_EXIF = 0xFFFF  # bytes, as much as a segment of a JPEG holds; Pillow reads every tag to find one
LONGEST = 8  # times the shorter side: of longer images the middle is taken before they are resized


@dataclass(frozen=True)
class Survey:
    """What files, folders and globs name.

    Attributes:
        paths: The files to read, each once.
        roots: The folder in which each was found, by path; a file that was named itself has none.
        passed_over: Files of those folders that are not named as images.
    """

    paths: tuple[Path, ...]
    roots: dict[Path, Path]
    passed_over: tuple[Path, ...]


def find(sources: Iterable[str | Path]) -> list[Path]:
    """Return the image files that files, folders (with all folders inside) and globs name, each once, folders sorted.

    A file that is named itself is taken whatever it is called. In folders those count that are named as images; names
    that begin with a dot are left out. What does not exist is returned as well, so that whoever reads it can say so.
    """
    return list(survey(sources).paths)


def survey(sources: Iterable[str | Path]) -> Survey:
    """Return what `find` does, and which files it left out."""
    paths: dict[Path, None] = {}
    roots: dict[Path, Path] = {}
    other: dict[Path, None] = {}
    for source in sources:
        if "\0" in str(source):
            raise DataError(f"no file can be named {str(source)!r}, with a null byte in it.")
        path = Path(source).expanduser()
        matches = [] if os.path.exists(path) else sorted(map(Path, glob(str(path), recursive=True)))
        for match in matches or [path]:
            if not os.path.isdir(match):
                paths[match] = None
                continue
            for file in _files(match):
                # A folder that may not be opened has no name for an image, but must not go unmentioned.
                if file.suffix.lower() in NAMED_AS_IMAGES or file.is_dir():
                    paths[file] = None
                    roots.setdefault(file, match)
                else:
                    other[file] = None
    return Survey(tuple(paths), roots, tuple(path for path in other if path not in paths))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files beneath a folder, sorted, and the folders that could not be opened."""
    closed: list[Path] = []
    for place, inner, files in os.walk(folder, onerror=lambda error: closed.append(Path(error.filename))):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))
    yield from closed


def read(source: Any, *, most_pixels: int = MOST_PIXELS) -> Tensor:
    """Return an image as RGB (3, H, W) in [0, 1], turned upright by its EXIF orientation.

    Args:
        source: See `upright`.
        most_pixels: Larger images are refused before they are decoded.
    """
    return _tensor(upright(source, most_pixels=most_pixels))


def prepare(image: Tensor | Image, adapted: Adapted) -> Tensor:
    """Return the centre square (C, size, size) that the model sees of an image, nothing stretched.

    Args:
        image: (3, H, W) in [0, 1], or a PIL image such as `upright` returns: resized in bytes, as most sources do it.
        adapted: Whose resize, size and channels count.
    """
    square = adapted.square
    return in_channels(
        _centre_square_of(image, square) if isinstance(image, Tensor) else _tensor(_centre_square_of(image, square)),
        square,
    )


def square_of(source: Any, adapted: Adapted, *, most_pixels: int = MOST_PIXELS) -> Tensor:
    """Return what the model sees (C, size, size) of a source, read in bytes: a fraction of the memory of `read`."""
    return as_seen(cut(source, adapted.square, most_pixels=most_pixels), adapted.square)


def cut(
    source: Any,
    square: Square,
    *,
    most_pixels: int = MOST_PIXELS,
    formats: tuple[str, ...] | None = None,
    name: str | None = None,
) -> NDArray[np.uint8]:
    """Return a square of bytes (size, size, 3), all that is ever needed of a source: no model takes part in this.

    Args:
        source: See `upright`.
        square: What to cut.
        most_pixels: Larger images are refused before they are decoded.
        formats: Names of Pillow's formats that are read; None reads all of them.
        name: What to call the source in errors.
    """
    name = name or name_of(source)
    image = _turned_by_exif(opened(source, most_pixels=most_pixels, formats=formats, name=name))
    # In its own depth until it is small: grey in colour takes four times the memory.
    grey = image.mode[0] in "1LIF" and not image.has_transparency_data
    try:
        return np.array(_centre_square_of(flattened(_middle(image), "L" if grey else "RGB"), square).convert("RGB"))
    except Exception as error:
        raise DataError(f"{name} has pixels of mode {image.mode} that cannot be made RGB ({error}).") from error


def as_seen(pixels: NDArray[np.uint8], square: Square) -> Tensor:
    """Return bytes (size, size, 3) as the model sees them, (C, size, size) in [0, 1]."""
    return in_channels(torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, square)


def in_channels(pixels: Tensor, square: Square) -> Tensor:
    """Return colours (3, H, W) in as many channels as a model takes, by the weights of luma as PIL has them."""
    luma = pixels.new_tensor([0.299, 0.587, 0.114])[:, None, None]
    return (pixels * luma).sum(0, keepdim=True) if square.channels == 1 else pixels


def _centre_square_of(image: Any, square: Square) -> Any:
    """Return the centre square of a tensor or a PIL image."""
    image = _middle(image)
    height, width = _sides(image)
    # As all the sources do it: the longer side is rounded down.
    sides = [max(int(square.resize * side / min(height, width)), square.size) for side in (height, width)]
    return _centre(_resized(image, sides[0], sides[1], square.resample), square.size, square.size)


def _middle(image: Any) -> Any:
    """Return an image that is not too long for its width: the middle of one that is."""
    height, width = _sides(image)
    longest = LONGEST * min(height, width)
    return image if max(height, width) <= longest else _centre(image, min(height, longest), min(width, longest))


def _sides(image: Any) -> tuple[int, int]:
    height, width = image.shape[-2:] if isinstance(image, Tensor) else (image.height, image.width)
    return height, width


def size_of(path: Path) -> tuple[int, int]:
    """Return width and height of an image file as its header says, without decoding it; zeros where it says nothing."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(path) as image:
            return image.size
    except (OSError, ValueError, Pillow.DecompressionBombError):
        return 0, 0


def upright(source: Any, *, most_pixels: int = MOST_PIXELS) -> Image:
    """Return an image in RGB, turned upright by its EXIF orientation.

    Args:
        source: A path, the bytes of a file or an open one, a PIL image, or an array or tensor: (H, W), (H, W, C) or
            (C, H, W) with up to four channels; bytes, 16-bit numbers, or floats and truth values in 0 … 1.
        most_pixels: Larger images are refused before they are decoded. Pillow itself refuses at about 179 million.
    """
    name = name_of(source)
    image = opened(source, most_pixels=most_pixels)
    try:
        return flattened(_turned_by_exif(image), "RGB")
    except Exception as error:
        raise DataError(f"{name} has pixels of mode {image.mode} that cannot be made RGB ({error}).") from error


def opened(
    source: Any, *, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] | None = None, name: str | None = None
) -> Image:
    """Return a source as a decoded PIL image in its own mode, first frame, EXIF orientation not yet applied.

    Args:
        source: See `upright`.
        most_pixels: Larger images are refused before they are decoded, as are those of too many scans and frames.
        formats: Names of Pillow's formats that are read; None reads all of them.
        name: What to call the source in errors.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", "data") from error
    name = name or name_of(source)
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            # Pillow warns where a file might be a bomb, and of metadata that it passes over; the limit is ours.
            warnings.simplefilter("ignore")
            if isinstance(source, (str, Path)):
                _check_file(Path(source), name)
                image: Image.Image = Image.open(stack.enter_context(Path(source).open("rb")), formats=formats)
            elif isinstance(source, Image.Image):
                image = source
            elif isinstance(source, (np.ndarray, Tensor)):
                image = Image.fromarray(_bytes(source))
            else:
                held = isinstance(source, (bytes, bytearray, memoryview))
                image = Image.open(io.BytesIO(source) if held else source, formats=formats)
            refuse_programs(image, name)
            check_bounds(image, name, most_pixels)
            image.load()
            if image is not source and len(image.info.get("exif", b"")) > MOST_EXIF:
                del image.info["exif"]
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise TooLargeError(f"{name} has more pixels than {most_pixels:,}; it may be a decompression bomb.") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{name} is not an image, or has a format that Pillow does not know.") from error
    except PermissionError as error:
        raise DataError(f"{name} may not be read: permission denied.") from error
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(f"{name} could not be decoded as an image ({str(error) or type(error).__name__}).") from error
    return image


def name_of(source: Any) -> str:
    """Return what to call a source: its path, or just "image"."""
    return str(source) if isinstance(source, (str, Path)) else "image"


def _check_file(path: Path, name: str) -> None:
    if os.path.isdir(path):  # and not `Path.is_dir`, which raises where a name is too long for any file
        try:
            next(path.iterdir(), None)
        except PermissionError as error:
            raise DataError(f"{name} is a folder that may not be opened: permission denied.") from error
        raise DataError(f"{name} is a folder, not an image.")
    if not os.path.exists(path):
        raise DataError(f"{name} does not exist.")
    if not path.is_file():
        raise DataError(f"{name} is no regular file.")
    if path.stat().st_size == 0:
        raise DataError(f"{name} is empty.")


def _turned_by_exif(image: Image) -> Image:
    from PIL import ImageOps

    try:
        # Pillow would copy an image that lies as it should.
        return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except Exception:  # broken metadata, of which Pillow raises as many kinds as of broken files; the pixels are fine
        return image


def _bytes(array: Any) -> Any:
    """Return an array or tensor as bytes (H, W) or (H, W, C)."""
    pixels = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
    if pixels.ndim == 3 and pixels.shape[0] in (1, 2, 3, 4) and pixels.shape[2] not in (1, 2, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or 0 in pixels.shape:
        raise DataError(f"an array must be (H, W), (H, W, C) or (C, H, W); got {array.shape}.")
    if pixels.dtype == np.uint16:
        pixels = (pixels / 257).round()
    elif pixels.dtype.kind in "fb":
        if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
            raise DataError("an array of floats must lie in 0 … 1. Divide by its largest value, or give bytes.")
        pixels = (pixels.astype(np.float64) * 255).round()
    elif pixels.dtype != np.uint8:
        raise DataError(f"an array must hold bytes, 16-bit numbers or floats in 0 … 1; got {pixels.dtype}.")
    return np.ascontiguousarray(pixels.astype(np.uint8))


def _resized(image: Any, height: int, width: int, resample: str) -> Any:
    if isinstance(image, Tensor):
        mode = resample if resample in ("bilinear", "bicubic") else "bicubic" if resample == "lanczos" else "bilinear"
        if resample == "nearest":
            return torch.nn.functional.interpolate(image[None], (height, width), mode="nearest-exact")[0]
        return torch.nn.functional.interpolate(image[None], (height, width), mode=mode, antialias=True)[0].clamp(0, 1)
    from PIL import Image as Pillow

    return image.resize((width, height), Pillow.Resampling[resample.upper()])


def _centre(image: Any, height: int, width: int) -> Any:
    """Return the middle of an image, of that size."""
    if isinstance(image, Tensor):
        top, left = (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2
        return image[..., top : top + height, left : left + width]
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _tensor(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 255
