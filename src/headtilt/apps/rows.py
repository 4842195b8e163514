"""Image files in, one row for each out: what ``classify``, ``predict`` and the service all answer with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headtilt.adapters import Adapted
from headtilt.adapters.images import prepare, read
from headtilt.errors import DataError
from headtilt.groups import decompose
from headtilt.result import SearchResult
from headtilt.wrapper import ITS


@dataclass(frozen=True)
class Row:
    """What is said of one image.

    Attributes:
        path: Where it came from.
        label: Name of its class, or the number where the model has no names; None where it could not be read.
        score: Probability of that class.
        rotation_deg: By how much the image was found turned, clockwise.
        scale: By what factor it was found scaled.
        shear: By how much it was found sheared.
        gated: Whether the gate kept the bare model's own answer.
        views: How many views the model was shown.
        error: Why there is no answer, in a sentence; None where there is one.
    """

    path: str
    label: str | None = None
    score: float | None = None
    rotation_deg: float | None = None
    scale: float | None = None
    shear: float | None = None
    gated: bool | None = None
    views: int | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary in the order of the columns."""
        return asdict(self)


def rows_of(result: SearchResult, paths: Sequence[str], labels: Sequence[str] | None) -> list[Row]:
    """Return one row per image of a result."""
    tilt = decompose(result.perturbation.double().cpu())
    found = []
    for index, path in enumerate(paths):
        label = int(result.labels[index])
        found.append(
            Row(
                path=path,
                label=str(label) if labels is None else labels[label],
                score=float(result.probabilities[index, label]),
                rotation_deg=math.degrees(float(tilt.rotation[index])),
                scale=float(tilt.scale[index]),
                shear=float(tilt.shear[index]),
                gated=bool(result.gated[index]),
                views=int(result.views[index]),
            )
        )
    return found


def classify(robust: ITS, adapted: Adapted, sources: Iterable[Any], *, batch: int = 32) -> Iterator[Row]:
    """Yield a row for each source in order; one that cannot be read gets its error and the others go on."""
    waiting: list[tuple[str, Tensor | str]] = []
    for source in sources:
        path = source if isinstance(source, str) else str(source)
        try:
            waiting.append((path, prepare(read(source), adapted)))
        except DataError as error:
            waiting.append((path, str(error)))
        if len(waiting) == batch:
            yield from _answers(robust, adapted, waiting)
            waiting = []
    yield from _answers(robust, adapted, waiting)


def _answers(robust: ITS, adapted: Adapted, waiting: list[tuple[str, Tensor | str]]) -> Iterator[Row]:
    images = [image for _, image in waiting if isinstance(image, Tensor)]
    paths = [path for path, image in waiting if isinstance(image, Tensor)]
    answers = iter(rows_of(robust.search(torch.stack(images)), paths, adapted.labels) if images else ())
    for path, image in waiting:
        yield next(answers) if isinstance(image, Tensor) else Row(path, error=image)
