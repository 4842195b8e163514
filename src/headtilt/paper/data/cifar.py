"""CIFAR-10: the official binary version, and mosaics of 32×32 tiles.

The official Python version is a set of pickles, which are programs: it is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headtilt.errors import DataError, one_of
from headtilt.paper.data import mosaic
from headtilt.paper.data.dataset import Dataset

SIZE = 32
RECORD = 1 + 3 * SIZE * SIZE  # a label, then the red, the green and the blue plane, row by row
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-bin"
FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
# Where the images of a split lie inside a data folder, best first; a folder with labels.npz holds mosaics.
PLACES = {
    split: (f"{FOLDER}/{files[0]}", f"cifar10/{FOLDER}/{files[0]}", f"cifar10/{mosaic.LABELS}")
    for split, files in FILES.items()
}
Split = Literal["train", "test"]


def read(place: str | Path, split: Split = "train", *, cache: Path | None = None) -> Dataset:
    """Return a split of CIFAR-10.

    Args:
        place: The folder of the binary version or of the mosaics, or the file in it that one of `PLACES` names.
        split: Which images.
        cache: Where decoded mosaics are kept; None decodes each time.
    """
    one_of("split", split, FILES)
    place = Path(place)
    folder = place.parent if place.is_file() else place
    if (folder / mosaic.LABELS).is_file():
        return mosaic.read(folder, split, "cifar10", CLASSES, cache=cache)
    records = np.concatenate([_read_records(folder / name) for name in FILES[split]])
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, SIZE, SIZE).copy())
    return Dataset(f"cifar10-{split}", images, torch.from_numpy(records[:, 0].astype(np.int64)), CLASSES)


def _read_records(path: Path) -> NDArray[np.uint8]:
    """Return the records (N, 3073) of one file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} could not be read ({error}). Unpack cifar-10-binary.tar.gz again.") from error
    if not content or len(content) % RECORD:
        raise DataError(
            f"{path} must be records of {RECORD} bytes, a label and {RECORD - 1} pixels; got {len(content)} bytes. "
            "Unpack cifar-10-binary.tar.gz again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    if (largest := int(records[:, 0].max())) >= len(CLASSES):
        raise DataError(
            f"{path} must hold classes 0…{len(CLASSES) - 1}; got {largest}. Unpack cifar-10-binary.tar.gz again; "
            "the files of CIFAR-100 are others."
        )
    return records
