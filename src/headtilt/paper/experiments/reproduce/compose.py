"""Images composed the way SI-Score composes them: a cut-out object on a background, turned, resized or moved.

One factor changes at a time (Djolonga et al., 2020). Rotation: an object in the middle that covers a fifth of the
image, turned by 1°, 21°, …, 341°. Size: an upright object in the middle, from a hundredth of the image to all of it.
Location: an upright object that covers a fifth, its centre on a grid over the image.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headtilt.errors import DataError, MissingExtraError
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.fetch import data_folders, find, missing
from headtilt.paper.data.siscore import LABELS

if TYPE_CHECKING:
    from PIL.Image import Image

AREA = 0.2
ANGLES = tuple(range(1, 360, 20))
AREAS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEPS = (0.1, 0.3, 0.5, 0.7, 0.9)
CENTRES = tuple(product(STEPS, STEPS))


@dataclass(frozen=True)
class Placement:
    """Where an object goes: degrees clockwise, share of the image's area, centre in shares of its sides."""

    degrees: float = 0.0
    area: float = AREA
    centre: tuple[float, float] = (0.5, 0.5)


PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "rotation": tuple(Placement(degrees=float(angle)) for angle in ANGLES),
    "area": tuple(Placement(area=area) for area in AREAS),
    "location": tuple(Placement(centre=centre) for centre in CENTRES),
}


def compose(
    variant: str,
    *,
    folders: list[Path] | None = None,
    size: int = 224,
    limit: int | None = None,
    seed: int = 0,
    upright: bool = False,
) -> Dataset:
    """Return composed images with ImageNet's labels, from the folder si-score-mini.

    Args:
        variant: "rotation", "area" or "location".
        folders: Where to look for data.
        size: Side of the images.
        limit: How many at most, chosen by the seed.
        seed: Of that choice.
        upright: Whether the objects are pasted without their turn: what undoing it exactly would give.
    """
    objects, backgrounds = material(folders)
    chosen = choice(variant, len(objects), len(backgrounds), limit, seed)
    if upright:
        chosen = [(front, back, replace(placement, degrees=0.0)) for front, back, placement in chosen]
    images = [paste(objects[front][1], backgrounds[back], placement, size) for front, back, placement in chosen]
    labels = [LABELS[objects[front][0]] for front, _, _ in chosen]
    names = {index: name for name, index in LABELS.items()}
    classes = tuple(names.get(index, str(index)) for index in range(1000))
    return Dataset(f"si-score-mini-{variant}", torch.stack(images), torch.tensor(labels), classes)


def turns(variant: str, *, folders: list[Path] | None = None, limit: int | None = None, seed: int = 0) -> torch.Tensor:
    """Return by how many degrees (N,) clockwise the object of each image that `compose` returns was turned."""
    objects, backgrounds = material(folders)
    chosen = choice(variant, len(objects), len(backgrounds), limit, seed)
    return torch.tensor([placement.degrees for _, _, placement in chosen])


def choice(
    variant: str, objects: int, backgrounds: int, limit: int | None, seed: int
) -> list[tuple[int, int, Placement]]:
    """Return which object goes on which background, and where."""
    every = list(product(range(objects), range(backgrounds), PLACEMENTS[variant]))
    order = np.random.RandomState(seed).permutation(len(every))[:limit]
    return [every[place] for place in sorted(order)]


def material(folders: Sequence[Path] | None) -> tuple[list[tuple[str, Image]], list[Image]]:
    """Return the cut-out objects by name, and the backgrounds."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "data") from error
    places = data_folders(folders)
    root = find(["si-score-mini"], places)
    if root is None:
        raise missing(
            "si-score-mini", "the folder si-score-mini, with foregrounds/*.png and backgrounds/*.jpg,", places
        )
    objects = []
    for path in sorted((root / "foregrounds").glob("*.png")):
        name = re.sub(r"\d+$", "", path.stem)
        if name not in LABELS:
            raise DataError(f"{path} is named after no class of SI-Score. Name it after one, such as bagel1.png.")
        objects.append((name, Image.open(path).convert("RGBA")))
    backgrounds = [Image.open(path).convert("RGB") for path in sorted((root / "backgrounds").glob("*.jpg"))]
    if not objects or not backgrounds:
        raise DataError(f"{root} must hold foregrounds/*.png and backgrounds/*.jpg.")
    return objects, backgrounds


def paste(front: Image, back: Image, placement: Placement, size: int) -> torch.Tensor:
    """Return the object on the background as bytes (3, size, size).

    The background's centre square fills the image. The area is that of the object's own frame, before it is turned; a
    frame longer than the image is cut off at its edges.
    """
    from PIL import Image

    side = min(back.size)
    left, top = (back.width - side) // 2, (back.height - side) // 2
    canvas = back.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)).copy()
    frame = front.crop(front.getchannel("A").getbbox())
    factor = (placement.area * size * size / (frame.width * frame.height)) ** 0.5
    shape = max(round(frame.width * factor), 1), max(round(frame.height * factor), 1)
    # Pillow turns anticlockwise.
    turned = frame.resize(shape, Image.Resampling.BILINEAR).rotate(
        -placement.degrees, resample=Image.Resampling.BILINEAR, expand=True
    )
    x, y = (round(share * size - length / 2) for share, length in zip(placement.centre, turned.size, strict=True))
    canvas.paste(turned, (x, y), turned)
    return torch.from_numpy(np.array(canvas, dtype=np.uint8)).permute(2, 0, 1)
