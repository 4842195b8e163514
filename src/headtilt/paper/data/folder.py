"""Any tree of images with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from headtilt.errors import DataError, one_of
from headtilt.paper.data.cache import cached
from headtilt.paper.data.dataset import Dataset, sample_indices, split_indices
from headtilt.sources.decode import SUFFIXES, decode

SPLITS = ("train", "validation", "test", "fit")
# Which sub-folders of a tree hold a split, best first.
PARTS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",), "fit": ("fit",)}
FRACTION, SEED = 0.1, 0


@dataclass(frozen=True)
class Listing:
    """The image files of a tree, undecoded.

    Attributes:
        paths: The files, by class and then by name.
        labels: (N,), int64, indices into `classes`.
        classes: Sorted names of the class folders.
    """

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]

    def subset(self, indices: Tensor) -> Listing:
        """Return the files at the indices."""
        return Listing(tuple(self.paths[index] for index in indices.tolist()), self.labels[indices], self.classes)


def read(
    root: str | Path,
    split: Literal["train", "validation", "test", "fit"] = "train",
    *,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Return the images of a tree with a folder for each class.

    The classes are the sorted names of the class folders, over all splits. All images beneath a class folder, however
    deep, belong to it; other files, and names that begin with a dot, are passed over.

    A tree may have the splits as its first level: ``train``, ``validation`` (or ``val``), ``test`` and ``fit``. Without
    ``validation`` a tenth of ``train``, the same each time, is split off; without ``fit`` it is ``train``, and the
    other way round. A tree without any of these folders is one set, and every split but validation is all of it.

    Args:
        root: The tree.
        split: Which images.
        size: Side of the squares that come back: the shorter side is resized to it and the middle cut out. None takes
            the images as they are, which must then all have one size.
        channels: 3 for RGB, 1 for greyscale.
        limit: How many images at most, chosen by `seed` before anything is decoded.
        seed: Of that choice.
        cache: Where decoded sets are kept; None decodes each time. A limited read is not kept.
    """
    root = Path(root)
    chosen = list_images(root, split)
    if limit is not None:
        chosen = chosen.subset(sample_indices(len(chosen.paths), limit, seed))

    def build() -> Dataset:
        images = decode(chosen.paths, size=size, channels=channels)
        return Dataset(root.name, images, chosen.labels, chosen.classes)

    options = {"size": size, "channels": channels, "classes": chosen.classes}
    keep = cache if limit is None else None
    found = cached(keep, root.name, chosen.paths, build, options=options)
    return replace(found, name=f"{root.name}-{split}")


def list_images(root: Path, split: str = "train") -> Listing:
    """Return the files of a split of the tree; see `read` for what a split is."""
    one_of("split", split, SPLITS)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Give a folder that holds a folder of images for each class.")
    parts = {folder.name: folder for folder in _folders(root)}
    known = {name for names in PARTS.values() for name in names}
    if not parts or not parts.keys() <= known:
        if split == "validation":
            raise DataError(
                f"{root} has no train folder to split a validation set off. Use headtilt.paper.data.split on it."
            )
        return _list(root, [root])
    every = list(parts.values())
    found, train = _part(parts, split), _part(parts, "train")
    if split == "fit" and found is None and train is not None:
        return list_images(root, "train")
    if split == "train" and found is None:
        found = _part(parts, "fit")
    if train is not None and split in ("train", "validation") and _part(parts, "validation") is None:
        return _split_off(root, _list(train, every), split == "validation")
    if found is None:
        held = ", ".join(sorted(parts))
        raise DataError(f"{root} has no {split} folder; it has {held}. Add one, or ask for one of these.")
    return _list(found, every)


def _part(parts: dict[str, Path], split: str) -> Path | None:
    return next((parts[name] for name in PARTS[split] if name in parts), None)


def _split_off(root: Path, train: Listing, validation: bool) -> Listing:
    rest, held_out = split_indices(train.labels, FRACTION, SEED)
    if validation and not len(held_out):
        raise DataError(f"{root} is too small to split off a validation set: no class has two images in train.")
    return train.subset(held_out if validation else rest)


def _list(part: Path, every: Sequence[Path]) -> Listing:
    # Over all splits: a class that one split lacks must not shift the labels of the classes behind it.
    classes = tuple(sorted({folder.name for place in every for folder in _folders(place)}))
    if not classes:
        raise DataError(f"{part} has no class folders. Put the images of each class in a folder named after it.")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(_images(part / name))
        paths += files
        labels += [label] * len(files)
    if not paths:
        kinds = ", ".join(sorted(SUFFIXES))
        raise DataError(f"{part} has no images in its class folders. Put files there that end in one of {kinds}.")
    return Listing(tuple(paths), torch.tensor(labels, dtype=torch.int64), classes)


def _folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> Iterator[Path]:
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(place, name)
