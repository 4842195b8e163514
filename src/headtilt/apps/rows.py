"""Image files in, one row for each out: what ``classify``, ``predict`` and the service all answer with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtilt.errors import DataError, ModelError
from headtilt.geometry.groups import decompose
from headtilt.its import ITS
from headtilt.result import SearchResult
from headtilt.sources import Adapted
from headtilt.sources.decoders import Decoders


@dataclass(frozen=True)
class Row:
    """What is said of one image.

    Attributes:
        path: Where it came from.
        label: Name of its class, or the number where the model has no names; None where it could not be read. Of a
            model for several labels, all that are there, divided by semicolons, the most probable first.
        score: Probability of that class, or of the most probable of several.
        rotation_deg: By how much the image was found turned, clockwise.
        scale: By what factor it was found scaled.
        shear: By how much it was found sheared.
        gated: Whether the gate kept the bare model's own answer.
        views: How many views the model was shown.
        error: Why there is no answer, in a sentence; None where there is one.
        top: The best labels with their scores, where more than one was asked for.
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
    top: tuple[tuple[str, float], ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary in the order of the columns; `top` only where it was asked for."""
        row = asdict(self)
        best = row.pop("top")
        return row if best is None else {**row, "top": [{"label": name, "score": score} for name, score in best]}


COLUMNS = tuple(Row("").as_dict())


def rows_of(result: SearchResult, paths: Sequence[str], labels: Sequence[str] | None, *, topk: int = 1) -> list[Row]:
    """Return one row per image of a result.

    Args:
        result: What `ITS.search` returned.
        paths: Where the images came from.
        labels: Class names, by label.
        topk: How many of the best labels each row should hold.
    """
    tilt = decompose(result.perturbation.double().cpu())
    answers, probabilities = result.labels.cpu(), result.probabilities.cpu()
    order = probabilities.argsort(dim=1, descending=True)
    best, scores = (part.cpu().tolist() for part in result.topk(topk))

    def name(label: int) -> str:
        return str(label) if labels is None else labels[label]

    found = []
    for index, path in enumerate(paths):
        first = int(order[index, 0]) if result.multilabel else int(answers[index])
        there = [one for one in order[index].tolist() if answers[index, one]] if result.multilabel else [first]
        top = tuple((name(one), score) for one, score in zip(best[index], scores[index], strict=True))
        found.append(
            Row(
                path=path,
                label="; ".join(map(name, there)),
                score=float(probabilities[index, first]),
                rotation_deg=math.degrees(float(tilt.rotation[index])) + 0.0,  # no −0.0
                scale=float(tilt.scale[index]),
                shear=float(tilt.shear[index]) + 0.0,
                gated=bool(result.gated[index]),
                views=int(result.views[index]),
                top=top if topk > 1 else None,
            )
        )
    return found


@dataclass(frozen=True)
class Answer:
    """A row with what undoes the tilt it speaks of.

    Attributes:
        row: What is said of the image.
        pose: (3, 3), what turns the square that the model saw upright; None where there is no answer.
        confidence: How probable that pose is by a fitted head; None where no head tells.
    """

    row: Row
    pose: Tensor | None = None
    confidence: float | None = None


def answers(
    robust: ITS,
    adapted: Adapted,
    sources: Iterable[Any],
    *,
    batch: int = 32,
    topk: int = 1,
    decoders: Decoders | None = None,
) -> Iterator[Answer]:
    """Yield an answer for each source in order; one that cannot be read gets its error and the others go on.

    Args:
        robust: Who answers.
        adapted: How its model wants images prepared.
        sources: Paths, or anything else that `images.upright` takes.
        batch: Images per search.
        topk: How many of the best labels each row should hold.
        decoders: Who reads files; None starts some for this call.
    """
    with Decoders() if decoders is None else nullcontext(decoders) as readers:
        stream = squares(sources, adapted, batch, readers)
        while waiting := list(islice(stream, batch)):
            yield from answered(robust, adapted, waiting, topk=topk)


def squares(
    sources: Iterable[Any], adapted: Adapted, ahead: int, decoders: Decoders
) -> Iterator[tuple[str, Tensor | str]]:
    """Yield each source's name with its square, or with why there is none.

    Args:
        sources: See `answers`.
        adapted: For whom to read them.
        ahead: How many are read before their turn.
        decoders: Who reads them.
    """
    reading: deque[tuple[str, Future[Tensor]]] = deque()
    for number, source in enumerate(sources):
        name = str(source) if isinstance(source, (str, Path)) else f"image {number}"
        reading.append((name, decoders.submit(source, adapted.square)))
        if len(reading) > ahead:
            yield _read(*reading.popleft())
    while reading:
        yield _read(*reading.popleft())


def readable(
    sources: Iterable[Any], adapted: Adapted, ahead: int, decoders: Decoders, unread: list[str]
) -> Iterator[Tensor]:
    """Yield the squares of sources that can be read; why others cannot is added to `unread`. Else as `squares`."""
    for _, square in squares(sources, adapted, ahead, decoders):
        if isinstance(square, Tensor):
            yield square
        else:
            unread.append(square)


def _read(name: str, square: Future[Tensor]) -> tuple[str, Tensor | str]:
    try:
        return name, square.result()
    except DataError as error:
        return name, str(error)


def answered(
    robust: ITS, adapted: Adapted, batch: Sequence[tuple[str, Tensor | str]], *, topk: int = 1
) -> Iterator[Answer]:
    """Yield an answer for each of some paths, which come with the square of an image or with why there is none."""
    images = [image for _, image in batch if isinstance(image, Tensor)]
    paths = [path for path, image in batch if isinstance(image, Tensor)]
    found = iter(_searched(robust, adapted, images, paths, topk) if images else ())
    for path, image in batch:
        yield next(found) if isinstance(image, Tensor) else Answer(Row(path, error=image))


def _searched(robust: ITS, adapted: Adapted, images: list[Tensor], paths: list[str], topk: int) -> list[Answer]:
    """Return the answers for images; where the model fails on some of them, these get its error.

    A model that fails on all of them, and on a plain grey image too, is at fault itself.
    """

    def ask(some: list[Tensor], names: list[str]) -> list[Answer]:
        result = robust.search(torch.stack(some))
        rows = rows_of(result, names, adapted.labels, topk=topk)
        sure = [None if math.isnan(one) else one for one in result.pose_confidence.tolist()]
        return [Answer(*parts) for parts in zip(rows, result.pose.double().cpu(), sure, strict=True)]

    def alone(image: Tensor, path: str) -> Answer:
        try:
            return ask([image], [path])[0]
        except ModelError as error:
            return Answer(Row(path, error=str(error)))

    try:
        return ask(images, paths)
    except ModelError:
        found = [alone(image, path) for image, path in zip(images, paths, strict=True)]
        if all(answer.pose is None for answer in found):
            ask([torch.full_like(images[0], 0.5)], [""])  # raises where the model is at fault
        return found
