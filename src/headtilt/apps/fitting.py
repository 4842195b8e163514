"""A wrapper fitted on a folder of upright image files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headtilt.adapters import Adapted
from headtilt.adapters.images import square_of
from headtilt.data.dataset import sample_indices
from headtilt.errors import DataError
from headtilt.head import HeadRecipe

if TYPE_CHECKING:
    from headtilt.pretrained import Pretrained

FEWEST = 10
SLOW_PIXELS = 3 * 96 * 96
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Fitting:
    """How to fit.

    Attributes:
        method: "head", "balance", "prototypes" or "neighbours".
        promise: Points of upright accuracy that the search may cost; None fits no gate.
        images: Most images.
        rounds: Most rounds of training a head; None takes the recipe's.
        hidden: Width of a head; None takes the recipe's.
        draws: Looks at every image under new tilts; None chooses: two of photographs on a CPU, where a look takes
            minutes, else one for each round.
        pose: Weight of finding the right pose beside the right label.
        seed: Seeds everything random.
    """

    method: str = "head"
    promise: float | None = 0.5
    images: int = 1000
    rounds: int | None = None
    hidden: int | None = None
    draws: int | None = None
    pose: float = 0.0
    seed: int = 0

    def run(self, robust: Pretrained, paths: Sequence[Path], tell: Tell) -> list[str]:
        """Fit the wrapper on image files, and return what was wrong with those that could not be read.

        Args:
            robust: The wrapper, which is fitted in place.
            paths: Upright images.
            tell: Called with (stage, done, total).
        """
        chosen = [paths[index] for index in sample_indices(len(paths), self.images, self.seed).tolist()]
        larger = larger_square(robust.adapted)
        images, broken = _read(chosen, larger, tell)
        crop = robust.adapted.size if larger.size > robust.adapted.size else None
        tell("fitting", 0, 1)
        slow = images[0].numel() >= SLOW_PIXELS and robust.predictor.device_and_dtype(images)[0].type == "cpu"
        draws = self.draws or (2 if slow else None)
        given: dict[str, Any] = {"rounds": self.rounds, "hidden": self.hidden, "draws": draws, "pose": self.pose}
        robust.fit(
            images,
            method=self.method,  # type: ignore[arg-type]
            promise=self.promise,
            recipe=HeadRecipe(**{name: value for name, value in given.items() if value is not None}),
            crop=crop,
            seed=self.seed,
            progress=tell,
        )
        return broken


def larger_square(adapted: Adapted) -> Adapted:
    """Return how to read photographs for tilting: √2 times larger than the model sees them, and a bit.

    What does not look at photographs, whose views are padded by something else than reflections, is read as it is.
    """
    if adapted.padding != "reflection":
        return adapted
    side = -(-adapted.size * 10 // 7)
    return replace(adapted, size=side, resize=max(side, adapted.resize))


def _read(paths: Sequence[Path], adapted: Adapted, tell: Tell) -> tuple[Tensor, list[str]]:
    def one(path: Path) -> Tensor | str:
        try:
            return square_of(path, adapted)
        except DataError as error:
            return str(error)

    images: list[Tensor] = []
    broken: list[str] = []
    with ThreadPoolExecutor() as pool:
        for number, found in enumerate(pool.map(one, paths), start=1):
            if isinstance(found, Tensor):
                images.append(found)
            else:
                broken.append(found)
            tell("reading images", number, len(paths))
    if len(images) < FEWEST:
        why = f" {broken[0]}" if broken else ""
        raise DataError(f"fit needs at least {FEWEST} images that can be read; there are {len(images)}.{why}")
    return torch.stack(images), broken
