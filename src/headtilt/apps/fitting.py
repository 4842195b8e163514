"""A wrapper fitted on a folder of upright image files: what it will cost, the fit itself, and what it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headtilt.apps.rows import squares
from headtilt.calibration.fit_images import FEWEST, split
from headtilt.calibration.fitter import FEWEST_FOR_HEAD, Fitter
from headtilt.calibration.gate import Promise
from headtilt.calibration.head import HeadRecipe
from headtilt.errors import DataError
from headtilt.geometry.groups import rotation
from headtilt.geometry.warp import Padding, centre_crop
from headtilt.model.predictor import Predictor
from headtilt.paper.data.dataset import sample_indices
from headtilt.progress import Progress, duration
from headtilt.sources import Adapted
from headtilt.sources.decoders import Decoders
from headtilt.sources.sidecar import PHOTOGRAPHS

if TYPE_CHECKING:
    from headtilt.sources.pretrained import Pretrained

AHEAD = 64  # images that are decoded before their turn
TIMED_CHUNKS, TIMED_VIEWS = 2, 2048  # by which a view is timed, and no more views than that
TIMED_POSES, TIMED_STEPS = 8, 3


@dataclass(frozen=True)
class Cost:
    """What a fit will take.

    Attributes:
        images: Images that it is fitted on.
        views: Views of the model.
        seconds: On this machine, about; nothing but these words depends on it.
    """

    images: int
    views: int
    seconds: float

    def words(self) -> str:
        """Return it as a line: "300 images, about 29,000 views, about 5 min on this machine"."""
        digits = max(len(str(self.views)) - 2, 0)
        views = round(self.views, -digits)
        time = duration(max(self.seconds, 1.0))
        return f"{self.images:,} images, about {views:,} views, about {time} on this machine"


@dataclass(frozen=True)
class Fitting:
    """How to fit.

    Attributes:
        method: "head", "balance", "prototypes" or "neighbours".
        promise: Points of upright accuracy that the search may cost; None fits no gate.
        images: Most images.
        recipe: How a head is trained.
        seed: Seeds everything random.
    """

    method: str = "head"
    promise: float | None = 0.5
    images: int = 1000
    recipe: HeadRecipe = HeadRecipe()  # noqa: RUF009 - frozen
    seed: int = 0

    def read(self, robust: Pretrained, paths: Sequence[Path], tell: Progress) -> tuple[Tensor, list[str]]:
        """Return images (n, C, H, W) from files, and what was wrong with those that could not be read.

        Args:
            robust: The wrapper that will be fitted.
            paths: Upright images; some of them, where they are too many.
            tell: Called with (stage, done, total).
        """
        chosen = [paths[index] for index in sample_indices(len(paths), self.images, self.seed).tolist()]
        return read(chosen, larger_square(robust.adapted), tell)

    def cost(self, robust: Pretrained, images: Tensor) -> Cost:
        """Return what `run` will take, after trying a few views of some of the images (n, C, H, W)."""
        fitter = self._fitter(robust)
        views = fitter.views(len(images))
        fresh = robust.predictor.with_model(robust.model)  # a fit must not depend on what was tried before it
        reads = self.method in ("head", "prototypes", "neighbours")
        predictor = fresh.with_features(robust.features if reads else None)
        some = centre_crop(images[:TIMED_VIEWS], self._crop(robust))
        with torch.inference_mode(False), torch.random.fork_rng():
            seconds = views * seconds_per_view(predictor, some, robust.padding)
            if self.method == "head" and len(images) >= FEWEST_FOR_HEAD:
                folds = split(len(images), None, np.random.default_rng(0))
                trained = [len(fold.train) for fold in folds] + ([len(images)] if len(folds) > 1 else [])
                steps = sum(self.recipe.steps(count * fitter.looks(len(images))) for count in trained)
                seconds += steps * seconds_per_step(predictor, some[:1], self.recipe, fitter.views_each + 1)
        return Cost(len(images), views, seconds)

    def run(self, robust: Pretrained, images: Tensor, tell: Progress | None = None) -> None:
        """Fit the wrapper, in place.

        Args:
            robust: The wrapper.
            images: (n, C, H, W), from `read`.
            tell: Called with (stage, views done, views in all).
        """
        robust.fit(
            images,
            method=self.method,  # type: ignore[arg-type]
            promise=self.promise,
            recipe=self.recipe,
            crop=self._crop(robust),
            seed=self.seed,
            progress=tell,
        )

    def _crop(self, robust: Pretrained) -> int | None:
        side = robust.adapted.size
        return side if larger_square(robust.adapted).size > side else None

    def _fitter(self, robust: Pretrained) -> Fitter:
        return Fitter(
            robust.predictor,
            robust.plan,
            padding=robust.padding,
            interpolation=robust.interpolation,
            method=self.method,  # type: ignore[arg-type]
            recipe=self.recipe,
            readout=robust.readout,
            promise=None if self.promise is None else Promise(self.promise),
            crop=self._crop(robust),
            seed=self.seed,
        )


def larger_square(adapted: Adapted) -> Adapted:
    """Return how to read photographs for tilting: √2 times larger than the model sees them, and a bit.

    Photographs are what is padded by reflections, or what a model sees in colour and at least 64 pixels wide where
    nobody says how to pad. All else is read as it is.
    """
    large = adapted.channels == 3 and adapted.size >= PHOTOGRAPHS
    if adapted.padding != "reflection" and not (adapted.padding == "auto" and large):
        return adapted
    side = -(-adapted.size * 10 // 7)
    return replace(adapted, size=side, resize=max(side, adapted.resize))


def read(paths: Sequence[Path], adapted: Adapted, tell: Progress) -> tuple[Tensor, list[str]]:
    """Return the images (n, C, size, size) of files, and what was wrong with those that could not be read.

    Each goes straight to its place: never is more in memory than the images themselves, and those being decoded.
    """
    images = torch.empty(len(paths), adapted.channels, adapted.size, adapted.size)

    said: list[str | None] = []
    with Decoders() as decoders:
        for number, (_, found) in enumerate(squares(paths, adapted, AHEAD, decoders)):
            said.append(found if isinstance(found, str) else None)
            if isinstance(found, Tensor):
                images[number] = found
            tell("reading images", len(said), len(paths))
    good = [number for number, error in enumerate(said) if error is None]
    broken = [error for error in said if error is not None]
    if len(good) < FEWEST:
        why = f" {broken[0]}" if broken else ""
        raise DataError(f"fit needs at least {FEWEST} images that can be read; there are {len(good)}.{why}")
    if broken:
        for place, number in enumerate(good):
            images[place] = images[number]
    return images[: len(good)], broken


def seconds_per_view(predictor: Predictor, images: Tensor, padding: Padding) -> float:
    """Return how long a view of one of the images (n, C, H, W) takes here, by a few views of some of them."""
    device, _ = predictor.device_and_dtype(images)
    poses = rotation().matrix(torch.linspace(-3, 3, TIMED_POSES)).to(device)

    def look(count: int) -> None:
        predictor.all_views(images[:count].to(device), poses, padding=padding)

    look(1)  # gets to know the model
    chunk = max(predictor.chunks.values(), default=predictor.chunk or 1)
    count = min(max(min(TIMED_CHUNKS * chunk, TIMED_VIEWS) // len(poses), 1), len(images))
    return _timed(lambda: look(count), device) / (count * len(poses))


def seconds_per_step(predictor: Predictor, image: Tensor, recipe: HeadRecipe, views: int) -> float:
    """Return how long a step of training a head takes here, by a network of its size.

    Args:
        predictor: Reads what the head will read.
        image: (1, C, H, W).
        recipe: How the head will be trained.
        views: Of each image in a batch.
    """
    seen = predictor(image)
    inputs = seen.logits if seen.features is None or recipe.source == "logits" else seen.features
    rows = inputs.float().expand(recipe.batch * views, -1)
    widths = (rows.shape[1], recipe.hidden, recipe.hidden, seen.logits.shape[1] + 1)
    weights = [rows.new_zeros(pair, requires_grad=True) for pair in pairwise(widths)]

    def step() -> None:
        with torch.enable_grad():
            found = rows
            for weight in weights:
                found = F.gelu(F.dropout(found) @ weight)
            found.sum().backward()

    step()
    return min(_timed(step, rows.device) for _ in range(TIMED_STEPS))


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that some work takes, until the device is done with it."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def fallback(method: str, report: dict[str, Any]) -> str | None:
    """Return a sentence where something simpler was fitted than the head that was asked for; None otherwise."""
    if method != "head" or report.get("method", "head") == "head":
        return None
    return (
        f"{report['images']} images are too few for a head, which needs {FEWEST_FOR_HEAD}: a {report['method']} was "
        "fitted. It improves labels, but canonicalise needs a head. Give more upright images."
    )


def verdict(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a fit is worth, by its own report: what is judged, and how it came out, in plain words."""
    found = report.get("verdict")
    if found is None:
        return []
    said = []
    for name, words in (("tilted", "tilted images"), ("turned exactly", "turned by exact quarters")):
        agreement = found[name]
        if agreement["images"]:
            better = f"{agreement['bare']:.1f} % → {agreement['fitted']:.1f} % agree with the upright answer"
            said.append((words, better))
    upright = f"{found['upright answers replaced']:.1f} % of answers replaced"
    if (turned := found["upright images turned"]) is not None:
        upright += f", {turned:.1f} % of images would be turned by more than 10°"
    said.append(("upright images", upright))
    if (kept := found["tilted answers kept by the gate"]) is not None:
        said.append(("the gate", f"keeps {kept:.0f} % of the bare answers to tilted images"))
    return said
