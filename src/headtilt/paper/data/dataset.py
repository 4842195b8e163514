"""Images with labels held in memory, and the seeded splits and samples taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headtilt.errors import DataError, OptionError, at_least


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images of one size, as bytes.

    Attributes:
        name: What tables and file names call it.
        images: (N, C, H, W), uint8.
        labels: (N,), int64, each an index into `classes`.
        classes: The name of each class.
        tracks: (N,), int64, or None. Images of one class and one track show one object; a split keeps them together.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    tracks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(
                f"images of {self.name} must be uint8 (N, C, H, W); "
                f"got {self.images.dtype} {tuple(self.images.shape)}. Scale to 0…255 and add the missing axes."
            )
        for what, values in (("labels", self.labels), ("tracks", self.tracks)):
            if values is not None and (values.shape != self.images.shape[:1] or values.dtype != torch.int64):
                raise DataError(
                    f"{what} of {self.name} must be int64 ({len(self.images)},), one for each image; "
                    f"got {values.dtype} {tuple(values.shape)}."
                )
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(
                f"labels of {self.name} must lie in 0…{len(self.classes) - 1}, one number for each of its classes; "
                f"got {int(self.labels.min())}…{int(self.labels.max())}."
            )

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Tensor | Sequence[int] | slice) -> Dataset:
        """Return the images at the indices, in their order, with the same classes."""
        chosen = _index(indices)
        tracks = None if self.tracks is None else self.tracks[chosen]
        return replace(self, images=self.images[chosen], labels=self.labels[chosen], tracks=tracks)

    def floats(self, indices: Tensor | Sequence[int] | slice | None = None) -> Tensor:
        """Return the images (of the indices, if given) as float32 (n, C, H, W) in [0, 1]."""
        chosen = self.images if indices is None else self.images[_index(indices)]
        return chosen.to(torch.float32) / 255


def split(dataset: Dataset, fraction: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Return (rest, held_out): about `fraction` of every class held out, chosen by the seed alone.

    Where the data set has tracks, whole (class, track) pairs are held out, so that no object is on both sides.
    """
    rest, held_out = split_indices(dataset.labels, fraction, seed, tracks=dataset.tracks)
    if not len(held_out):
        raise DataError(
            f"{dataset.name} is too small to split: no class has two images (or two tracks). "
            "Hold out images of your own, or use the whole set."
        )
    return dataset.subset(rest), dataset.subset(held_out)


def split_indices(
    labels: Tensor, fraction: float = 0.1, seed: int = 0, *, tracks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ascending indices (rest, held_out) of labels (N,): `fraction` of the units of every class held out.

    A unit is a track, or an image where there are no tracks. A class of two units or more gives and keeps at least
    one; a class with one unit keeps it.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise OptionError(f"fraction must lie between 0 and 1; got {fraction!r}.")
    _check_seed(seed)
    kinds = labels.numpy()
    units = np.arange(len(kinds)) if tracks is None else tracks.numpy()
    held = np.zeros(len(kinds), dtype=bool)
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        present = np.unique(units[members])
        count = min(max(round(fraction * len(present)), 1), len(present) - 1)
        # RandomState's stream is frozen by numpy's policy: the split is the same on every machine and version.
        chosen = np.random.RandomState([seed, int(kind)]).permutation(present)[:count]
        held[members] = np.isin(units[members], chosen)
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def sample_indices(count: int, limit: int | None, seed: int = 0) -> Tensor:
    """Return `limit` ascending indices out of `count`, chosen by the seed; all of them where there is no limit."""
    _check_seed(seed)
    if limit is not None:
        at_least("limit", limit, 1)
    if limit is None or limit >= count:
        return torch.arange(count)
    return torch.from_numpy(np.sort(np.random.RandomState(seed).permutation(count)[:limit]))


def drop_class(dataset: Dataset, label: int) -> Dataset:
    """Return the data set without its last class, which must be `label`: the other labels stay what they are."""
    if label != len(dataset.classes) - 1:
        raise OptionError(f"label must be the last class ({len(dataset.classes) - 1}) to be dropped; got {label}.")
    kept = dataset.subset(torch.nonzero(dataset.labels != label).flatten())
    return replace(kept, classes=dataset.classes[:-1])


def _index(indices: Tensor | Sequence[int] | slice) -> Tensor | slice:
    if isinstance(indices, (slice, Tensor)):
        return indices
    return torch.as_tensor(indices, dtype=torch.int64)


def _check_seed(seed: object) -> None:
    at_least("seed", seed, 0)
    if isinstance(seed, int) and seed >= 2**32:
        raise OptionError(f"seed must be below 2³²; got {seed}.")
