"""The German Traffic Sign Recognition Benchmark: the official folders, torchvision's, and mosaics of 32×32 tiles.

Every image is resized to a square with antialiased bilinear interpolation, its whole frame, proportions not kept.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from typing import Literal

import torch

from headtilt.errors import DataError, OptionError, one_of
from headtilt.paper.data import mosaic
from headtilt.paper.data.cache import cached
from headtilt.paper.data.dataset import Dataset
from headtilt.sources.decode import decode

SIZE = mosaic.SIZE
SIGNS = (
    "speed limit 20|speed limit 30|speed limit 50|speed limit 60|speed limit 70|speed limit 80|"
    "end of speed limit 80|speed limit 100|speed limit 120|no passing|no passing for trucks|"
    "right of way at the next crossing|priority road|yield|stop|no vehicles|no trucks|no entry|general caution|"
    "dangerous curve left|dangerous curve right|double curve|bumpy road|slippery road|road narrows on the right|"
    "road work|traffic signals|pedestrians|children crossing|bicycles crossing|beware of ice and snow|"
    "wild animals crossing|end of all limits|turn right ahead|turn left ahead|ahead only|ahead or right|"
    "ahead or left|keep right|keep left|roundabout|end of no passing|end of no passing for trucks"
)
CLASSES = tuple(SIGNS.split("|"))
# Where the images of a split lie inside a data folder, best first; a folder with labels.npz holds mosaics.
PLACES = {
    "train": (
        "GTSRB/Final_Training/Images",
        "gtsrb/GTSRB/Final_Training/Images",
        "Final_Training/Images",
        "gtsrb/GTSRB/Training",
        "GTSRB/Training",
        "gtsrb32/labels.npz",
    ),
    "test": ("GTSRB/Final_Test/Images", "gtsrb/GTSRB/Final_Test/Images", "Final_Test/Images", "gtsrb32/labels.npz"),
}
Split = Literal["train", "test"]


def read(place: str | Path, split: Split = "train", *, size: int = SIZE, cache: Path | None = None) -> Dataset:
    """Return a split of GTSRB; training images carry their track, which repeats from class to class.

    Args:
        place: The folder of the images of that split (one of `PLACES`), or a folder of mosaics with its labels.npz.
        split: Which images.
        size: Side of the squares that come back; mosaics have 32 and no other.
        cache: Where decoded sets are kept; None decodes each time.
    """
    one_of("split", split, ("train", "test"))
    place = Path(place)
    place = place.parent if place.name == mosaic.LABELS else place
    if (place / mosaic.LABELS).is_file():
        if size != SIZE:
            raise OptionError(f"size must be {SIZE} for the mosaics in {place}; got {size}. Use the official images.")
        tracks = "track_train" if split == "train" else None
        return mosaic.read(place, split, "gtsrb", CLASSES, tracks=tracks, cache=cache)
    paths, labels = _list_training(place) if split == "train" else _list_test(place)
    numbers = torch.tensor([_track(path) for path in paths]) if split == "train" else None

    def build() -> Dataset:
        images = decode(paths, size=size, stretch=True)
        return Dataset(f"gtsrb-{split}", images, torch.tensor(labels), CLASSES, numbers)

    return cached(cache, f"gtsrb-{split}", paths, build, options={"size": size, "labels": labels})


def _list_training(place: Path) -> tuple[list[Path], list[int]]:
    paths: list[Path] = []
    labels: list[int] = []
    folders = sorted(entry for entry in place.glob("*") if entry.is_dir() and re.fullmatch(r"\d{5}", entry.name))
    for folder in folders:
        table = folder / f"GT-{folder.name}.csv"
        if table.is_file():
            rows = _read_table(table)
        else:
            rows = [(path.name, int(folder.name)) for path in sorted(folder.glob("*.ppm"))]
        for name, label in rows:
            if label != int(folder.name):
                raise DataError(f"{table} must hold class {int(folder.name)} only; got {label} for {name}.")
            paths.append(folder / name)
            labels.append(label)
    if not paths:
        raise DataError(f"{place} holds no class folders 00000, 00001, … with ppm files. Unpack the archive again.")
    return _checked(place, paths, labels)


def _list_test(place: Path) -> tuple[list[Path], list[int]]:
    name = "GT-final_test.csv"
    tables = [folder / name for folder in (place.parent.parent.parent, place.parent.parent, place.parent, place)]
    table = next((table for table in tables if table.is_file()), None)
    if table is None:
        raise DataError(f"{name} is missing. Unpack GTSRB_Final_Test_GT.zip beside the folder {place.parent.parent}.")
    rows = _read_table(table)
    return _checked(place, [place / name for name, _ in rows], [label for _, label in rows])


def _read_table(path: Path) -> list[tuple[str, int]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter=";", skipinitialspace=True))
        table = [(Path(row["Filename"]).name, int(row["ClassId"])) for row in rows]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path} must be a semicolon-separated table with the columns Filename and ClassId; got {error!r}. "
            "For the test set take it from GTSRB_Final_Test_GT.zip: the table among the test images has no classes."
        ) from error
    if not table:
        raise DataError(f"{path} lists no images. Unpack the archive again.")
    return table


def _checked(place: Path, paths: list[Path], labels: list[int]) -> tuple[list[Path], list[int]]:
    if wrong := [label for label in labels if not 0 <= label < len(CLASSES)]:
        raise DataError(f"{place} must hold classes 0…{len(CLASSES) - 1}; got {wrong[0]}.")
    if missing := [path for path in paths if not os.path.isfile(path)]:  # a name may be too long for `Path.is_file`
        raise DataError(f"{missing[0]} is listed but missing ({len(missing)} in all). Unpack the archive again.")
    return paths, labels


def _track(path: Path) -> int:
    match = re.fullmatch(r"(\d+)_\d+", path.stem)
    if match is None:
        raise DataError(
            f"{path} must be named <track>_<number>, as the official files are: without its track the image could "
            "be in the training and the validation set at once."
        )
    return int(match[1])
