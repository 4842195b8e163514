"""MNIST and Fashion-MNIST from idx files, read strictly."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headtilt.errors import DataError, one_of
from headtilt.paper.data.dataset import Dataset, drop_class

UNSIGNED_BYTE = 0x08
CHUNK = 1 << 20
FASHION = "T-shirt/top|Trouser|Pullover|Dress|Coat|Sandal|Shirt|Sneaker|Bag|Ankle boot"


@dataclass(frozen=True)
class IdxSet:
    """A data set of four idx files under their standard names.

    Attributes:
        name: Its name in `headtilt.paper.data.NAMES`.
        folders: Where its files lie inside a data folder, best first.
        classes: The name of each class.
        sha256: Of each file's unpacked bytes; the gzip wrapping differs from mirror to mirror.
    """

    name: str
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    sha256: dict[str, str]


MNIST = IdxSet(
    "mnist",
    ("MNIST/raw", "mnist/raw", "MNIST", "mnist", "."),
    tuple("0123456789"),
    {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION_MNIST = IdxSet(
    "fashion-mnist",
    ("FashionMNIST/raw", "fashion-mnist/raw", "FashionMNIST", "fashion-mnist", "."),
    tuple(FASHION.split("|")),
    {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
SETS = {MNIST.name: MNIST, FASHION_MNIST.name: FASHION_MNIST}


def file_names(split: Literal["train", "test"]) -> tuple[str, str]:
    """Return the standard names of the images' and the labels' file, unpacked."""
    part = "train" if split == "train" else "t10k"
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def spellings(name: str) -> tuple[str, ...]:
    """Return the names a standard file is found under: plain, gzipped, and with the dot some mirrors use."""
    dotted = name.replace("-idx", ".idx")
    return name, f"{name}.gz", dotted, f"{dotted}.gz"


def read(
    images: str | Path,
    labels: str | Path,
    *,
    kind: Literal["mnist", "fashion-mnist"] = "mnist",
    split: Literal["train", "test"] = "train",
    drop_nines: bool = True,
) -> Dataset:
    """Return the data set in an images' file and a labels' file, gzipped or not.

    Args:
        images: An idx3 file of 28×28 bytes.
        labels: An idx1 file with one byte from 0 to 9 for each image.
        kind: Which classes the labels mean.
        split: Only for the name of the data set.
        drop_nines: Leave out MNIST's nines, which are turned sixes; Fashion-MNIST keeps all of its classes.
    """
    one_of("kind", kind, SETS)
    one_of("split", split, ("train", "test"))
    images, labels, known = Path(images), Path(labels), SETS[kind]
    pixels, values = read_array(images, 3), read_array(labels, 1)
    if pixels.shape[1:] != (28, 28):
        raise DataError(f"{images} must hold 28×28 images; got {pixels.shape[1]}×{pixels.shape[2]}. {_again(images)}")
    if len(pixels) != len(values):
        raise DataError(
            f"{labels} must hold one label for each image; got {len(values)} labels for the {len(pixels)} images in "
            f"{images}. Take both files from the same split."
        )
    if values.max() >= len(known.classes):
        raise DataError(f"{labels} must hold labels from 0 to 9; got {values.max()}. {_again(labels)}")
    _check_not_the_other(labels, values, known)
    dataset = Dataset(
        f"{kind}-{split}", torch.from_numpy(pixels)[:, None], torch.from_numpy(values).long(), known.classes
    )
    return drop_class(dataset, 9) if drop_nines and known is MNIST else dataset


def read_array(path: str | Path, ndim: int) -> NDArray[np.uint8]:
    """Return the bytes of an idx file as an array of `ndim` dimensions; the file may be gzipped, whatever its name."""
    path = Path(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            return _parse(stream, path, ndim)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a broken or cut-off gzip file ({error}). {_again(path)}") from error
    except OSError as error:
        raise DataError(f"{path} could not be read ({error.strerror or error}).") from error


def _parse(stream: BinaryIO, path: Path, ndim: int) -> NDArray[np.uint8]:
    magic = _read_up_to(stream, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        got = magic.hex(" ") or "nothing"
        raise DataError(f"{path} must begin with the idx magic 00 00; got {got}. {_again(path)}")
    if magic[2] != UNSIGNED_BYTE:
        raise DataError(
            f"{path} must hold unsigned bytes (idx type 0x08); got type 0x{magic[2]:02x}. Store its values as bytes."
        )
    if magic[3] != ndim:
        advice = "Were images and labels swapped?" if magic[3] in (1, 3) else _again(path)
        raise DataError(f"{path} must have {ndim} dimension(s) (images have 3, labels 1); got {magic[3]}. {advice}")
    header = _read_up_to(stream, 4 * ndim)
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(0, len(header), 4))
    if len(header) < 4 * ndim or 0 in shape:
        raise DataError(f"{path} must give {ndim} sizes above 0 in its header; got {shape}. {_again(path)}")
    expected = math.prod(shape)
    body = _read_up_to(stream, expected + 1)
    if len(body) != expected:
        got = f"only {len(body)}" if len(body) < expected else "more"
        raise DataError(f"{path} must hold {expected} bytes after its header for {shape}; got {got}. {_again(path)}")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _read_up_to(stream: BinaryIO, count: int) -> bytearray:
    # In chunks: a header may promise more bytes than there is memory, and read(count) would set them aside first.
    content = bytearray()
    while len(content) < count and (chunk := stream.read(min(CHUNK, count - len(content)))):
        content += chunk
    return content


def _check_not_the_other(path: Path, labels: NDArray[np.uint8], known: IdxSet) -> None:
    # MNIST and Fashion-MNIST have the same file names and sizes; only what is in them tells them apart.
    header = bytes([0, 0, UNSIGNED_BYTE, 1]) + len(labels).to_bytes(4, "big")
    digest = hashlib.sha256(header + labels.tobytes()).hexdigest()
    for other in SETS.values():
        if other is not known and digest in other.sha256.values():
            raise DataError(
                f"{path} holds the labels of {other.name}, not of {known.name}. "
                f"Put the files of {known.name} in {known.folders[0]} of the data folder."
            )


def _again(path: Path) -> str:
    return f"Remove {path.name} and fetch it again."
