"""What a fit is given: images or a stream of them, which of them judge it, and where randomness comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headtilt.errors import DataError, HeadtiltError, ShapeError
from headtilt.geometry.warp import all_finite, check_images

FEWEST = 8
FOLDS = 4
ENOUGH = 2500  # images of which a fifth is enough for the gate; fewer take turns
HELD_OUT_IMAGES = 2000
MOST_IMAGES = 50_000  # of a loader, and no more than `MOST_PIXELS`: a random part of a longer one
MOST_PIXELS = 2**30


@dataclass(frozen=True)
class Fold:
    """Images to fit on, and those on which that fit is judged, as indices."""

    train: Tensor
    held_out: Tensor


class Seeds:
    """Independent streams of randomness, by name, from one seed.

    Args:
        seed: Any whole number of at most 64 bits.
    """

    NAMES = ("images", "held out", "folds", "padding", "tilts", "head", "proposals")

    def __init__(self, seed: int) -> None:
        self.entropy = seed % 2**64

    def sequence(self, name: str, number: int = 0) -> np.random.SeedSequence:
        """Return the seed of a stream."""
        return np.random.SeedSequence(self.entropy, spawn_key=(self.NAMES.index(name), number))

    def numbers(self, name: str) -> np.random.Generator:
        """Return a stream."""
        return np.random.default_rng(self.sequence(name))


def gather(source: Tensor | Iterable[Any], generator: np.random.Generator) -> Tensor:
    """Return the images of a tensor or a loader as one checked tensor; a batch may be a tuple with images first.

    Of a loader that gives more than memory should hold, a random part is kept while it streams by.
    """
    images = source if isinstance(source, Tensor) else _streamed(source, generator)
    check_images(images, "fit images")
    if not all_finite(images):
        raise ShapeError("fit images must be finite; some pixels are NaN or infinite. Nothing was fitted.")
    if len(images) < FEWEST:
        raise DataError(f"fit images must be at least {FEWEST}, better some hundreds; got {len(images)}.")
    return images


def _streamed(source: Iterable[Any], generator: np.random.Generator) -> Tensor:
    """Return a random part of a stream of batches, each image as likely as any other (reservoir sampling)."""
    kept: list[Tensor] = []
    seen, most = 0, MOST_IMAGES
    try:
        for batch in source:
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            check_images(images, "fit images")
            if kept and images.shape[1:] != kept[0].shape:
                sizes = f"{tuple(kept[0].shape)} and {tuple(images.shape[1:])}"
                raise ShapeError(f"fit images must all be of one size; got {sizes}. Resize them. Nothing was fitted.")
            most = max(min(MOST_IMAGES, MOST_PIXELS // images[0].numel()), FEWEST)
            for image in images:
                place = seen if seen < most else int(generator.integers(0, seen + 1))
                seen += 1
                if place < len(kept):
                    kept[place] = image.clone()
                elif place < most:
                    kept.append(image.clone())
    except HeadtiltError:
        raise
    except Exception as error:
        raise DataError(f"the loader of fit images raised: {error}. Nothing was fitted.") from error
    if not kept:
        raise DataError("the loader of fit images gave no batch. Nothing was fitted.")
    return torch.stack(kept)


def split(count: int, given: int | None, generator: np.random.Generator) -> list[Fold]:
    """Return which images to fit on and which tell the gate; in random order, since images often come sorted by class.

    Args:
        count: How many images there are.
        given: How many of them, the last, were given to be held out; None has few images take turns, and sets a fifth
            of many aside.
        generator: Where randomness comes from.
    """
    if given is not None:
        order = torch.from_numpy(generator.permutation(count - given))
        return [Fold(order, torch.arange(count - given, count))]
    order = torch.from_numpy(generator.permutation(count))
    if count >= ENOUGH:
        fewer = min(count // 5, HELD_OUT_IMAGES)
        return [Fold(order[fewer:], order[:fewer])]
    parts = order.tensor_split(min(FOLDS, count // 2))
    return [Fold(torch.cat([*parts[:number], *parts[number + 1 :]]), part) for number, part in enumerate(parts)]
