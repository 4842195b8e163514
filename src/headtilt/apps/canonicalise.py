"""Upright copies of image files, at their own resolution and in their own format."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headtilt.errors import DataError
from headtilt.geometry.groups import invert
from headtilt.sources import Adapted
from headtilt.sources.images import Survey, opened

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION, EXIF_IFD, WIDTH, HEIGHT = 0x0112, 0x8769, 0xA002, 0xA003
SUFFIX = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "TIFF": ".tif", "BMP": ".bmp", "PPM": ".ppm"}
TILE = 512  # pixels that are turned at a time
EXACT = 1e-4  # of a matrix entry: closer to a quarter turn than any search resolves
# What Pillow cannot resample as it is, and what stands for it.
STAND_IN = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}


def targets(found: Survey, out: Path) -> dict[Path, Path]:
    """Return where the copy of each file goes: beneath `out` as beneath its folder, or by name; never two to one place.

    Files that already lie beneath `out` are left out, so that copies are not copied again.
    """
    places: dict[Path, Path] = {}
    taken: set[Path] = set()
    for path in found.paths:
        if out.resolve() in path.resolve().parents and path in found.roots:
            continue
        root = found.roots.get(path)
        wanted = out / (path.name if root is None else path.relative_to(root))
        place, number = wanted, 2
        while place in taken:
            place, number = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}"), number + 1
        taken.add(place)
        places[path] = place
    return places


def write_upright(source: Path, target: Path, pose: Tensor, adapted: Adapted, *, force: bool = False) -> Path:
    """Write a copy of an image file with its tilt undone, whole or not at all, and return where.

    Upright files are copied as they are. Quarter turns are exact and swap the sides; other tilts keep the size, and
    what lies outside the picture is filled by reflection. Colour profile, resolution and EXIF are kept; of the latter
    the orientation is reset, and the thumbnail, which would show the old picture, goes.

    Args:
        source: The file.
        target: Where the copy goes; its suffix is changed where the format of the file needs another.
        pose: (3, 3), what turns the square that the model saw upright.
        adapted: How that square was cut.
        force: Whether a file that is there already may be replaced. The source itself never is.
    """
    image = opened(source)
    kind = {"MPO": "JPEG"}.get(image.format or "", image.format or "")
    kind = kind if kind in SUFFIX else "PNG"
    target = _named(target, kind)
    if target.exists() and target.samefile(source):
        raise DataError(f"{target} is the original itself. Give another folder for the copies.")
    if target.exists() and not force:
        raise DataError(f"{target} exists already; --force replaces it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    turned = quarter_turns(pose)
    if turned == 0 and _orientation(image) == 1 and kind == image.format:
        return _whole(target, lambda place: shutil.copyfile(source, place))
    options = _metadata(image, kind)
    result = undone(_oriented(image), pose, adapted)
    if "exif" in options:
        options["exif"] = _exif(image, result.size)
    return _whole(target, lambda place: result.save(place, format=kind, **options))


def undone(image: Image, pose: Tensor, adapted: Adapted) -> Image:
    """Return a whole image with the tilt undone that was found on the square from its middle."""
    from PIL import Image as Pillow

    turns = quarter_turns(pose)
    if turns is not None:
        by = (None, Pillow.Transpose.ROTATE_270, Pillow.Transpose.ROTATE_180, Pillow.Transpose.ROTATE_90)[turns]
        return image if by is None else image.transpose(by)
    mode = image.mode
    if mode in STAND_IN:
        image = image.convert("RGBA" if image.has_transparency_data and mode == "P" else STAND_IN[mode])
    elif mode.startswith("I"):
        image = image.convert("I").convert("F")  # whole numbers of more than 8 bits, which Pillow does not interpolate
    done = _resampled(image, pose, adapted)
    if mode.startswith("I"):
        import numpy as np

        most, whole = (65535, np.uint16) if mode.startswith("I;16") else (2**31 - 1, np.int32)
        return Pillow.fromarray(np.asarray(done).round().clip(0, most).astype(whole))
    return done


def quarter_turns(pose: Tensor) -> int | None:
    """Return how many quarter turns clockwise a pose is, or None where it is anything else."""
    matrix = pose.double()
    for turns in range(4):
        cos, sin = round(math.cos(turns * math.pi / 2)), round(math.sin(turns * math.pi / 2))
        exact = matrix.new_tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        if float((matrix - exact).abs().max()) < EXACT:
            return turns
    return None


def _resampled(image: Image, pose: Tensor, adapted: Adapted) -> Image:
    from PIL import Image as Pillow

    width, height = image.size
    back = invert(pose.double()[None])[0].tolist()
    # Poses count in half sides of the square that the model saw; here are pixels of the whole image.
    half = adapted.size / 2 * min(width, height) / adapted.resize

    def source(x: float, y: float) -> tuple[float, float]:
        u, v = x - width / 2, y - height / 2
        return (
            back[0][0] * u + back[0][1] * v + back[0][2] * half + width / 2,
            back[1][0] * u + back[1][1] * v + back[1][2] * half + height / 2,
        )

    (x, y), (right, low), (left, down) = source(0, 0), source(1, 0), source(0, 1)
    across, along = (right - x, low - y), (left - x, down - y)
    result = Pillow.new(image.mode, (width, height))
    # Tile by tile: the canvas with all the reflections that a long image needs would take gigabytes.
    for top in range(0, height, TILE):
        for start in range(0, width, TILE):
            size = (min(TILE, width - start), min(TILE, height - top))
            ends = [source(start + right, top + low) for right in (0, size[0]) for low in (0, size[1])]
            box = [math.floor(min(x for x, _ in ends)) - 3, math.floor(min(y for _, y in ends)) - 3]
            box += [math.ceil(max(x for x, _ in ends)) + 3, math.ceil(max(y for _, y in ends)) + 3]
            x, y = source(start, top)
            rows = (across[0], along[0], x - box[0], across[1], along[1], y - box[1])
            tile = _reflected(image, *box).transform(size, Pillow.Transform.AFFINE, rows, Pillow.Resampling.BICUBIC)
            result.paste(tile, (start, top))
    return result


def _reflected(image: Image, left: int, top: int, right: int, low: int) -> Image:
    """Return a box of the plane that an image and its reflections fill."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    width, height = image.size
    canvas = Pillow.new(image.mode, (right - left, low - top))
    for column in range(left // width, -(-right // width)):
        for row in range(top // height, -(-low // height)):
            # Of each reflection the part that lies in the box, cut before it is turned over.
            x0, x1 = max(left - column * width, 0), min(right - column * width, width)
            y0, y1 = max(top - row * height, 0), min(low - row * height, height)
            cut_x = (width - x1, width - x0) if column % 2 else (x0, x1)
            cut_y = (height - y1, height - y0) if row % 2 else (y0, y1)
            part = image.crop((cut_x[0], cut_y[0], cut_x[1], cut_y[1]))
            part = ImageOps.mirror(part) if column % 2 else part
            part = ImageOps.flip(part) if row % 2 else part
            canvas.paste(part, (column * width + x0 - left, row * height + y0 - top))
    return canvas


def _oriented(image: Image) -> Image:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken metadata; the pixels are fine
        return image


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # as above
        return 1


def _exif(image: Image, size: tuple[int, int]) -> bytes:
    """Return the EXIF block for a copy of another size that lies upright; nothing where there is none to read."""
    try:
        exif = image.getexif()
        if not exif:
            return b""
        exif[ORIENTATION] = 1
        inner = exif.get_ifd(EXIF_IFD)
        for tag, side in zip((WIDTH, HEIGHT), size, strict=True):
            if tag in inner:
                inner[tag] = side
        return exif.tobytes()
    except Exception:  # as above
        return b""


def _metadata(image: Image, kind: str) -> dict[str, Any]:
    """Return what to give Pillow so that a copy keeps what was known of the image, and as much of its quality."""
    options: dict[str, Any] = {key: image.info[key] for key in ("icc_profile", "dpi") if image.info.get(key)}
    if image.mode in STAND_IN and image.mode not in ("1", "P"):
        options.pop("icc_profile", None)  # it was for another kind of colours
    if kind in ("JPEG", "PNG", "WEBP"):
        options["exif"] = b""
    if kind == "WEBP":
        options.pop("dpi", None)
    if kind in ("BMP", "PPM"):
        options.pop("icc_profile", None)
    return options | {"JPEG": {"quality": 95}, "WEBP": {"quality": 95, "exact": True}}.get(kind, {})


def _named(target: Path, kind: str) -> Path:
    from PIL import Image as Pillow

    fits = Pillow.registered_extensions().get(target.suffix.lower()) == kind
    return target if fits else target.with_suffix(SUFFIX[kind])


def _whole(target: Path, write: Callable[[Path], object]) -> Path:
    """Write a file whole or not at all."""
    unfinished = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        write(unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target
