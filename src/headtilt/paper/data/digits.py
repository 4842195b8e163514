"""The small handwritten digits that come with scikit-learn, in MNIST's frame: no download needed."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from headtilt.errors import MissingExtraError, one_of
from headtilt.paper.data.dataset import Dataset, drop_class

TRAIN = 1100
SPLIT_SEED = 0


def read(split: Literal["train", "test"] = "train", *, drop_nines: bool = True) -> Dataset:
    """Return 1,100 training digits or the rest, as 28×28 images: the 8×8 digit enlarged to 20×20 and framed in black.

    The split is always the same. Nines are left out unless asked for: they are turned sixes.
    """
    one_of("split", split, ("train", "test"))
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "data") from error
    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float()[:, None] / 16
    large = F.interpolate(small, size=(20, 20), mode="bicubic", align_corners=False, antialias=False)
    # Bicubic interpolation overshoots at edges.
    framed = F.pad(large.clamp(0, 1), (4, 4, 4, 4))
    images = (framed * 255).round().to(torch.uint8)
    labels = torch.from_numpy(bunch.target).long()
    whole = Dataset(f"digits-{split}", images, labels, tuple("0123456789"))
    if drop_nines:
        whole = drop_class(whole, 9)
    order = np.random.RandomState(SPLIT_SEED).permutation(len(whole))
    return whole.subset(torch.from_numpy(np.sort(order[:TRAIN] if split == "train" else order[TRAIN:])))
