"""Sets kept as mosaics: train.jpg and test.jpg of 32×32 tiles, row by row, 160 to a row, with their labels.npz."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headtilt.errors import DataError
from headtilt.paper.data.cache import cached
from headtilt.paper.data.dataset import Dataset
from headtilt.sources.decode import decode

SIZE = 32
COLUMNS = 160
LABELS = "labels.npz"


def read(
    folder: Path,
    split: Literal["train", "test"],
    name: str,
    classes: tuple[str, ...],
    *,
    tracks: str | None = None,
    cache: Path | None = None,
) -> Dataset:
    """Return a split of a folder of mosaics.

    Args:
        folder: Holds <split>.jpg, and labels.npz with y_<split>.
        split: Which images.
        name: Of the set; the split is added.
        classes: What the labels mean.
        tracks: Name of the array with the tracks, where the split has some.
        cache: Where decoded sets are kept; None decodes each time.
    """
    sources = [folder / f"{split}.jpg", folder / LABELS]
    if missing := [path for path in sources if not path.is_file()]:
        raise DataError(f"{missing[0]} is missing beside {sources[1].name}. Put the whole folder there again.")

    def build() -> Dataset:
        labels = _read_column(sources[1], f"y_{split}")
        track = None if tracks is None else _read_column(sources[1], tracks)
        return Dataset(f"{name}-{split}", _tiles(sources[0], len(labels)), labels, classes, track)

    return cached(cache, f"{name}-mosaic-{split}", sources, build)


def _read_column(path: Path, name: str) -> Tensor:
    try:
        # Opened here: given a name, numpy leaves a broken file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            values: NDArray[np.int64] = arrays[name].astype(np.int64)
    except Exception as error:  # zipfile alone raises eight kinds for broken archives, NotImplementedError among them
        raise DataError(
            f"{path} must be an npz archive with whole numbers under {name!r}; got {error!r}. Put it there again."
        ) from error
    return torch.from_numpy(values)


def _tiles(path: Path, count: int) -> Tensor:
    mosaic = decode([path])[0]
    rows, rest = divmod(mosaic.shape[1], SIZE)
    if rest or mosaic.shape[2] != COLUMNS * SIZE or not 0 < count <= rows * COLUMNS:
        raise DataError(
            f"{path} must be {COLUMNS} tiles of {SIZE} pixels wide and hold {count} of them; "
            f"got {mosaic.shape[2]}×{mosaic.shape[1]} pixels. Put it there again."
        )
    grid = mosaic.reshape(3, rows, SIZE, COLUMNS, SIZE).permute(1, 3, 0, 2, 4)
    return grid.reshape(-1, 3, SIZE, SIZE)[:count].contiguous()
