"""SI-Score: cut-out objects on backgrounds, turned, resized or moved (Djolonga et al., 2020), with ImageNet labels.

The published archives unpack to a folder for the variant, with a folder of ``<number>.jpg`` for each class; the pose of
each number stands in metadata.csv, not in the file's name.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import torch

from headtilt.errors import DataError, one_of
from headtilt.paper.data import folder
from headtilt.paper.data.cache import cached
from headtilt.paper.data.dataset import Dataset, sample_indices
from headtilt.paper.data.fetch import Folders, data_folders, find, missing
from headtilt.sources.decode import decode

# The names of the archives' folders first, then those of the bucket, then what people call them.
PLACES = {
    "rotation": ("rotation", "object_rotation", "si_rotation"),
    "area": ("area", "object_size", "size", "si_area", "si_size"),
    "location": ("location20_area02_min0pc", "location", "object_location", "si_location"),
}
# The 61 published classes and their index among ImageNet's thousand.
CLASSES = (
    "ambulance 407, artichoke 944, backpack 414, bagel 931, banana 954, beaker 438, binoculars 447, "
    "broccoli 937, burrito 965, candle 470, canoe 472, cello 486, cucumber 943, dumbbell 543, envelope 549, "
    "flowerpot 738, flute 558, goose 99, guacamole 924, hamster 333, hedgehog 334, hippopotamus 344, "
    "ipod 605, jeans 608, kite 21, koala 105, lemon 951, lighthouse 437, limousine 627, lipstick 629, "
    "magpie 18, miniskirt 655, missile 657, mushroom 947, orange 950, ostrich 9, otter 360, pig 341, "
    "pillow 721, pizza 963, pomegranate 957, pretzel 932, printer 742, racket 752, ruler 769, saxophone 776, "
    "screwdriver 784, skunk 361, snowmobile 802, sock 806, sombrero 808, starfish 327, strawberry 949, "
    "taxi 468, teapot 849, toaster 859, torch 862, vase 883, wok 909, zebra 340, zucchini 939"
)
LABELS = {name: int(index) for name, _, index in (entry.rpartition(" ") for entry in CLASSES.split(", "))}


def read(
    variant: Literal["rotation", "area", "location"] = "rotation",
    *,
    folders: Folders = None,
    size: int = 224,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Return a variant of SI-Score with ImageNet's 1,000 labels; a class SI-Score lacks is named by its index.

    Args:
        variant: What differs from image to image.
        folders: Where to look for the variant's folder; by default where all data is looked for.
        size: Side of the squares that come back.
        limit: How many images at most, chosen by `seed`. The whole rotation set takes 6 GB at 224 pixels.
        seed: Of that choice.
        cache: Where decoded sets are kept; None decodes each time. A limited read is not kept.
    """
    one_of("variant", variant, PLACES)
    root = _find(variant, folders)
    listing = folder.list_images(root, "test")
    listing = listing.subset(sample_indices(len(listing.paths), limit, seed))
    known = _known_labels(root, listing.classes)
    labels = torch.tensor([known[name] for name in listing.classes])[listing.labels]
    names = {index: name for name, index in known.items()}
    classes = tuple(names.get(index, str(index)) for index in range(1000))

    def build() -> Dataset:
        return Dataset(f"si-score-{variant}", decode(listing.paths, size=size), labels, classes)

    keep = cache if limit is None else None
    options = {"size": size, "classes": classes, "labels": known}
    return cached(keep, f"si-score-{variant}", listing.paths, build, options=options)


def _find(variant: str, folders: Folders) -> Path:
    places = data_folders(folders)
    root = find((f"{parent}{name}" for parent in ("", "si-score/", "siscore/") for name in PLACES[variant]), places)
    if root is None:
        what = f"the folder {PLACES[variant][0]!r}, with a folder of images for each class,"
        raise missing(f"SI-Score ({variant})", what, places)
    return root


def _known_labels(root: Path, classes: tuple[str, ...]) -> dict[str, int]:
    """Return ImageNet's index of each class; those in the table that SI-Score's generator writes come first."""
    table = root / "foreground_classes.csv"
    own: dict[str, int] = {}
    if table.is_file():
        try:
            with table.open(newline="", encoding="utf-8") as file:
                own = {row["label"]: int(row["int"]) for row in csv.DictReader(file)}
        except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
            raise DataError(
                f"{table} must have the columns int and label; got {error!r}. Remove or mend it."
            ) from error
    known = LABELS | own
    if unknown := [name for name in classes if not 0 <= known.get(name, -1) < 1000]:
        raise DataError(
            f"{root / unknown[0]} is not a class of SI-Score. Take it away, or give its ImageNet index in {table} "
            "under the columns int and label."
        )
    return known
