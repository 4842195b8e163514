"""One image file written upright: by exact quarter turns, by its EXIF orientation, or in a frame that grows."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from headtilt.apps.orientation_tag import TAGGED, turned_tag, with_orientation
from headtilt.errors import DataError
from headtilt.geometry.groups import decompose
from headtilt.geometry.warp import invert
from headtilt.io.files import written_whole
from headtilt.sources.images import ORIENTATION, opened

if TYPE_CHECKING:
    from PIL.Image import Image

EXIF_IFD, WIDTH, HEIGHT = 0x8769, 0xA002, 0xA003  # tags of EXIF
MOST_PIXELS = 100_000_000  # of a turned picture: a ribbon on its diagonal would fill all memory with nothing
SUFFIX = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "TIFF": ".tif", "BMP": ".bmp", "PPM": ".ppm"}
# A search over all angles finds a photograph's to ten degrees or so: closer to a quarter turn, it is taken for one.
SNAP_DEGREES, SNAP_FACTOR = 12.0, 0.1
ORIENTED_TURNS = {6: 1, 8: 1, 5: 1, 7: 1}  # orientations of EXIF that swap the sides
# What Pillow cannot resample as it is, and what stands for it.
STAND_IN = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}


@dataclass(frozen=True)
class Written:
    """A copy.

    Attributes:
        path: Where it is.
        how: "copied" as it is, "turned" by quarters to the pixel, "tagged" with an orientation, or "resampled".
        degrees: By how much the image had been turned clockwise, as far as it was undone.
    """

    path: Path
    how: Literal["copied", "turned", "tagged", "resampled"]
    degrees: float = 0.0


def write_upright(source: Path, target: Path, pose: Tensor, *, force: bool = False, tag_only: bool = False) -> Written:
    """Write a copy of an image file with its tilt undone, whole or not at all, and return where.

    Upright files are copied as they are. Quarter turns move pixels, resample none and swap the sides. Under other tilts
    the frame grows around the whole picture; what lies outside is transparent, or black where a format has no
    transparency. Colour profile, resolution and EXIF are kept; of the latter the orientation is reset, and the
    thumbnail, which would show the old picture, goes.

    Args:
        source: The file.
        target: Where the copy goes; its suffix is changed where the format of the file needs another.
        pose: (3, 3), what turns the square that the model saw upright.
        force: Whether a file that is there already may be replaced. The source itself never is.
        tag_only: Whether to leave all pixels as they are and write the nearest quarter turn as EXIF orientation;
            formats that have none are turned by it.
    """
    image = opened(source)
    kind = {"MPO": "JPEG"}.get(image.format or "", image.format or "")
    turns = nearest_quarter(pose) if tag_only else quarter_turns(pose)
    orientation = _orientation(image)
    # As it is, with all of its frames, even where no other picture could be written in its format.
    untouched = turns == 0 and orientation == 1
    if not untouched:
        kind = kind if kind in SUFFIX else "PNG"
    target = _named(target, kind) if kind in SUFFIX else target
    if target.exists() and target.samefile(source):
        raise DataError(f"{target} is the original itself. Give another folder for the copies.")
    if target.exists() and not force:
        raise DataError(f"{target} exists already. Add --force to replace it.")
    tags = tag_only and kind in TAGGED and image.format in ("JPEG", "MPO", "PNG")
    if untouched or (turns == 0 and tags):
        return Written(_whole(target, lambda place: shutil.copyfile(source, place)), "copied")
    if tags and turns is not None:
        data = with_orientation(source.read_bytes(), turned_tag(orientation, turns))
        return Written(_whole(target, lambda place: place.write_bytes(data)), "tagged", _clockwise(-90 * turns))
    options = _metadata(image, kind, turns)
    result = undone(_oriented(image), pose) if turns is None else turned(_oriented(image), turns)
    if "exif" in options:
        options["exif"] = _exif(image, result.size)
    path = _whole(target, lambda place: result.save(place, format=kind, **options))
    if turns == 0:  # only its EXIF was applied, or its format changed
        return Written(path, "copied")
    if turns is not None:
        return Written(path, "turned", _clockwise(-90 * turns))
    return Written(path, "resampled", _clockwise(-math.degrees(float(decompose(pose.double()).rotation))))


def turned(image: Image, turns: int) -> Image:
    """Return an image turned clockwise by quarters, to the pixel."""
    from PIL import Image as Pillow

    by = (None, Pillow.Transpose.ROTATE_270, Pillow.Transpose.ROTATE_180, Pillow.Transpose.ROTATE_90)[turns]
    return image if by is None else image.transpose(by)


def undone(image: Image, pose: Tensor) -> Image:
    """Return a whole image with the tilt undone that was found on the square from its middle; the frame grows."""
    from PIL import Image as Pillow

    turns = quarter_turns(pose)
    if turns is not None:
        return turned(image, turns)
    mode = image.mode
    if mode in STAND_IN:
        image = image.convert("RGBA" if image.has_transparency_data and mode == "P" else STAND_IN[mode])
    elif mode.startswith("I"):
        image = image.convert("I").convert("F")  # whole numbers of more than 8 bits, which Pillow does not interpolate
    done = _resampled(image, pose)
    if mode.startswith("I"):
        import numpy as np

        most, whole = (65535, np.uint16) if mode.startswith("I;16") else (2**31 - 1, np.int32)
        return Pillow.fromarray(np.asarray(done).round().clip(0, most).astype(whole))
    return done


def quarter_turns(pose: Tensor) -> int | None:
    """Return how many quarter turns clockwise a pose is, within what a search can tell; None where it is another."""
    parts = decompose(pose.double())
    off = math.degrees(float(parts.rotation)) - 90 * round(math.degrees(float(parts.rotation)) / 90)
    others = (math.log(float(parts.scale)), math.log(float(parts.stretch)), float(parts.shear))
    if abs(off) > SNAP_DEGREES or max(map(abs, others)) > SNAP_FACTOR or bool(parts.reflection):
        return None
    return nearest_quarter(pose)


def _clockwise(degrees: float) -> float:
    """Return an angle in (−180, 180]."""
    return -((180 - degrees) % 360 - 180) + 0.0


def nearest_quarter(pose: Tensor) -> int:
    """Return how many quarter turns clockwise come closest to a pose."""
    return round(math.degrees(float(decompose(pose.double()).rotation)) / 90) % 4


def _resampled(image: Image, pose: Tensor) -> Image:
    """Return the whole picture under a pose, in a frame that just holds it; its shift would only move the frame."""
    from PIL import Image as Pillow

    width, height = image.size
    matrix = pose.double()
    corners = [[x * width / 2, y * height / 2] for x in (-1, 1) for y in (-1, 1)]
    reach = (matrix[:2, :2] @ matrix.new_tensor(corners).T).abs().amax(1).tolist()
    size = max(math.ceil(2 * reach[0] - 1e-6), 1), max(math.ceil(2 * reach[1] - 1e-6), 1)
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(
            f"turned, a picture of {width} × {height} pixels would take {size[0]:,} × {size[1]:,}: too many."
        )
    (a, b), (c, d) = invert(matrix[None])[0, :2, :2].tolist()

    def source(x: float, y: float) -> tuple[float, float]:
        u, v = x - size[0] / 2, y - size[1] / 2
        return a * u + b * v + width / 2, c * u + d * v + height / 2

    x, y = source(0, 0)
    black = (0, 0, 0, 255) if image.mode == "CMYK" else None
    rows = (a, b, x, c, d, y)
    return image.transform(size, Pillow.Transform.AFFINE, rows, Pillow.Resampling.BICUBIC, fillcolor=black)


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


def _metadata(image: Image, kind: str, turns: int | None) -> dict[str, Any]:
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
    if image.format == kind == "JPEG" and turns is not None:
        return options | _as_encoded(image, turns + ORIENTED_TURNS.get(_orientation(image), 0))
    return options | {"JPEG": {"quality": 95}, "WEBP": {"quality": 95, "exact": True}}.get(kind, {})


def _as_encoded(image: Image, turns: int) -> dict[str, Any]:
    """Return how a JPEG was quantised, turned with it: its turned pixels then fall on the same steps again."""
    from PIL.JpegImagePlugin import get_sampling

    tables: dict[int, list[int]] = getattr(image, "quantization", {})
    sampling = get_sampling(image)
    if turns % 2:
        tables = {key: [table[8 * (place % 8) + place // 8] for place in range(64)] for key, table in tables.items()}
        sampling = sampling if sampling == 2 else 0  # half the columns would become half the rows
    return {"qtables": tables, "subsampling": max(sampling, 0)} if tables else {"quality": 95}


def _named(target: Path, kind: str) -> Path:
    from PIL import Image as Pillow

    fits = Pillow.registered_extensions().get(target.suffix.lower()) == kind
    return target if fits else target.with_suffix(SUFFIX[kind])


def _whole(target: Path, write: Callable[[Path], object]) -> Path:
    """Write a file whole or not at all."""
    with written_whole(target) as unfinished:
        write(unfinished)
    return target
