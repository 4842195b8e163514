"""One door to every data set: `load`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from headtilt.errors import DataError, OptionError, one_of
from headtilt.io.files import cache_folder
from headtilt.paper.data import cifar, digits, folder, gtsrb, idx
from headtilt.paper.data import dataset as parts
from headtilt.paper.data.dataset import Dataset, sample_indices
from headtilt.paper.data.fetch import Folders, data_folders, download_gtsrb, download_idx, find, missing

NAMES = ("mnist", "fashion-mnist", "gtsrb", "cifar10", "digits", "imagenet-mini")
VALIDATION_FRACTION, VALIDATION_SEED = 0.1, 0
# Of the training images that are left, a share that the zoo's networks never see. A deep network knows its training
# images by heart and is sure of all of them, so that few of them alone say nothing about the images that users have.
FIT_FRACTION = {"cifar10": 1 / 8}


def load(
    name: str | Path,
    split: Literal["train", "validation", "test", "fit"] = "train",
    *,
    folders: Folders = None,
    seed: int = 0,
    drop_nines: bool = True,
    size: int | None = None,
    download: bool = True,
    limit: int | None = None,
) -> Dataset:
    """Return a split of a data set.

    Args:
        name: One of `NAMES`, or a folder that holds a folder of images for each class (see `folder.read`).
        split: ``validation`` is always the same tenth of the training images, and ``train`` the rest of them. ``fit``
            is what may be fitted to: the folder of that name where a set has one, 3,600 images of cifar10 that are
            not in ``train``, otherwise ``train``.
        folders: Where to look; by default the folders of HEADTILT_DATA. Then the cache folder.
        seed: Of the choice that `limit` makes, and of nothing else.
        drop_nines: Leave out the nines of mnist and digits, which are turned sixes.
        size: Side of the images, for gtsrb (32 by default) and image folders (by default as they are).
        download: Whether to fetch mnist, fashion-mnist and gtsrb where they are not found.
        limit: How many images at most, chosen at random.
    """
    one_of("split", split, folder.SPLITS)
    sample_indices(0, limit, seed)
    name = str(name)
    if name == "imagenet-mini" or name not in NAMES:
        root = _find_tree(name, folders)
        return folder.read(root, split, size=size, limit=limit, seed=seed, cache=cache_folder())
    if size is not None and name != "gtsrb":
        side = cifar.SIZE if name == "cifar10" else 28
        raise OptionError(f"size must be left out for {name}, whose images are all {side}×{side}; got {size!r}.")
    half: Literal["train", "test"] = "test" if split == "test" else "train"
    if name == "digits":
        whole = digits.read(half, drop_nines=drop_nines)
    elif name == "gtsrb":
        whole = _load_gtsrb(half, folders, size, download)
    elif name == "cifar10":
        whole = _load_cifar(half, folders)
    else:
        whole = _load_idx(idx.SETS[name], half, folders, drop_nines, download)
    if split != "test":
        rest, held_out = parts.split(whole, VALIDATION_FRACTION, VALIDATION_SEED)
        whole = held_out if split == "validation" else rest
        if split != "validation" and name in FIT_FRACTION:
            rest, apart = parts.split(whole, FIT_FRACTION[name], VALIDATION_SEED)
            whole = apart if split == "fit" else rest
    if limit is not None:
        whole = whole.subset(sample_indices(len(whole), limit, seed))
    return replace(whole, name=f"{name}-{split}")


def _load_idx(
    known: idx.IdxSet, half: Literal["train", "test"], folders: Folders, drop_nines: bool, download: bool
) -> Dataset:
    names = idx.file_names(half)
    places = data_folders(folders)

    def locate() -> list[Path | None]:
        # Both from one folder: images and labels of two copies need not belong together.
        near: list[Path | None] = [None, None]
        for place in (place / inner for place in places for inner in known.folders):
            found = [find(idx.spellings(name), [place]) for name in names]
            if all(found):
                return found
            near = near if any(near) else found
        return near

    images, labels = _located(
        locate,
        lambda: download_idx(known.name, known.folders[0], known.sha256, names),
        known.name,
        f"{names[0]}.gz and {names[1]}.gz (or the same without .gz) in {known.folders[0]}",
        places,
        download,
    )
    kind: Literal["mnist", "fashion-mnist"] = "mnist" if known is idx.MNIST else "fashion-mnist"
    return idx.read(images, labels, kind=kind, split=half, drop_nines=drop_nines)


def _load_gtsrb(half: Literal["train", "test"], folders: Folders, size: int | None, download: bool) -> Dataset:
    places = data_folders(folders)
    what = f"the official folder {gtsrb.PLACES[half][0]}"
    if half == "test":
        what += " and, beside the folder GTSRB, GT-final_test.csv"
    (place,) = _located(
        lambda: [find(gtsrb.PLACES[half], places)], lambda: download_gtsrb(half), "gtsrb", what, places, download
    )
    return gtsrb.read(place, half, size=gtsrb.SIZE if size is None else size, cache=cache_folder())


def _load_cifar(half: Literal["train", "test"], folders: Folders) -> Dataset:
    places = data_folders(folders)
    place = find(cifar.PLACES[half], places)
    if place is None:
        why = "It is not downloaded. The Python version is pickled, so it is not read."
        raise missing("cifar10", f"the folder {cifar.FOLDER} of the official cifar-10-binary.tar.gz", places, why)
    return cifar.read(place, half, cache=cache_folder())


def _located(
    locate: Callable[[], list[Path | None]],
    fetch: Callable[[], None],
    name: str,
    what: str,
    places: tuple[Path, ...],
    download: bool,
) -> list[Path]:
    """Return the files that `locate` finds, after `fetch` if need be."""
    why = "Downloading was switched off."
    found = locate()
    if not all(found) and download:
        try:
            fetch()
            found = locate()
        except DataError as error:
            why = str(error)
    paths = [path for path in found if path is not None]
    if len(paths) < len(found):
        only = f"Only {paths[0]} is there. " if paths else ""
        raise missing(name, what, places, only + why)
    return paths


def _find_tree(name: str, folders: Folders) -> Path:
    if name != "imagenet-mini":
        if Path(name).expanduser().is_dir():
            return Path(name).expanduser()
        raise OptionError(f"name must be one of {', '.join(map(repr, NAMES))}, or a folder of images; got {name!r}.")
    places = data_folders(folders)
    root = find([name], places)
    if root is None:
        raise missing(name, "the folder imagenet-mini, with fit/<wnid>/*.jpg and test/<wnid>/*.jpg,", places)
    return root
