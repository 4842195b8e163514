"""`headtilt demo`: seven methods on tilted digits, with data and weights that come with the package.

The order of events: tilt the test digits, each by its own rotation, scale and shear off any search grid; ask each
method about them, and about the same digits upright; say who loses; draw one search.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headtilt import plot
from headtilt.calibration.head import HeadRecipe
from headtilt.geometry.groups import decompose
from headtilt.its import ITS
from headtilt.paper import zoo
from headtilt.paper.data import load as load_data
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.perturb import TestSet, draw, perturb_dataset, schedule
from headtilt.paper.experiments.demo_text import BARE, OURS, PROMISE, say
from headtilt.paper.experiments.methods import Predict, Setting, build, searching
from headtilt.paper.experiments.names import NAMES
from headtilt.paper.experiments.report import fractions, networks, write_json
from headtilt.plot.style import need_matplotlib
from headtilt.presets import accurate, paper3
from headtilt.progress import Progress
from headtilt.result import SearchResult

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 60  # digits, the first ones, from which those in the pictures are taken


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        networks: Networks of the zoo, each trained from another seed.
        count: Test digits.
        passes: Dropout passes of the paper's method.
        recipe: How the head is trained: as by default, but narrower, for its speed.
        fit: Unlabelled upright digits to fit on, at most.
    """

    networks: int
    count: int
    passes: int
    recipe: HeadRecipe
    fit: int | None = None


FULL = Size(1, 400, 50, HeadRecipe(hidden=64))
QUICK = Size(1, 100, 10, HeadRecipe(hidden=64, batch=32), fit=500)


@dataclass(frozen=True)
class Row:
    """What one method did with the digits of one network.

    Attributes:
        right: Right answers on tilted digits.
        upright: Right answers on the same digits upright.
        views: Views per tilted digit.
        seconds: For all of the tilted digits.
        fitting: Seconds of fitting before that.
    """

    right: int
    upright: int
    views: float
    seconds: float
    fitting: float


def run(
    out: Path,
    size: Size,
    *,
    device: str,
    console: Console,
    progress: Callable[[], AbstractContextManager[Progress]],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Return the report, after printing the table and writing the pictures.

    Args:
        out: Folder for the pictures and the report.
        size: How much to do.
        device: Where to run.
        console: Where to print.
        progress: Opens something that shows progress.
        about: What else the report should say, such as versions and hardware.
    """
    need_matplotlib()
    start = time.perf_counter()
    data = load_data("digits", "test", limit=size.count)
    tilted, upright = tilt(data, draw("affine", len(data))), tilt(data, torch.eye(3).expand(len(data), 3, 3))
    with progress() as tell:
        rows, robust = measure(size, tilted, upright, device, tell)
        tell("drawing", 1, 1)
        report = summary(rows, size, len(data))
        words, paths = pictures(out, report, robust, tilted, data.classes)
    paths.append(write_json(out / "demo.json", {**report, **about}))
    say(console, report, words, paths, time.perf_counter() - start)
    return report


def tilt(data: Dataset, transforms: Tensor) -> TestSet:
    """Return the digits under the transforms (N, 3, 3)."""
    return perturb_dataset(data, transforms)


def measure(
    size: Size, tilted: TestSet, upright: TestSet, device: str, tell: Progress
) -> tuple[dict[str, list[Row]], ITS]:
    """Return what each method did with each network, and the first network's fitted wrapper."""
    fit_images = load_data("digits", "fit", limit=size.fit).floats()
    rows: dict[str, list[Row]] = {}
    wrappers: list[ITS] = []
    for seed in range(size.networks):
        model = zoo.load(f"digits:{seed}", device=device)
        methods = contenders(model, fit_images, size, wrappers)
        for number, (name, make) in enumerate(methods.items()):
            tell(
                f"network {seed + 1} of {size.networks}: {name}",
                len(methods) * seed + number,
                len(methods) * size.networks,
            )
            start = time.perf_counter()
            predict = make()
            ready = time.perf_counter()
            right, views = ask(predict, tilted, device)
            asked = time.perf_counter()
            straight, _ = ask(predict, upright, device)
            rows.setdefault(name, []).append(Row(right, straight, views, asked - ready, ready - start))
    return rows, wrappers[0]


def contenders(
    model: nn.Module, fit_images: Tensor, size: Size, wrappers: list[ITS]
) -> dict[str, Callable[[], Predict]]:
    """Return what makes each method, by name; no label is used, and the network never changes."""
    levels = schedule("affine").searched
    setting = Setting(model, levels, lambda: fit_images)

    def balanced() -> Predict:
        robust = ITS(model, **accurate(levels))
        return searching(robust.fit(fit_images, method="balance", promise=None))

    def ours() -> Predict:
        robust = ITS(model, **accurate(levels))
        wrappers.append(robust.fit(fit_images, recipe=size.recipe, promise=PROMISE))
        return searching(robust)

    return {
        BARE: lambda: build("vanilla", setting),
        NAMES["tta-mean"]: lambda: build("tta-mean", setting),
        NAMES["tta-max"]: lambda: build("tta-max", setting),
        NAMES["energy"]: lambda: build("energy", setting),
        NAMES["paper3"]: lambda: searching(ITS(model, **paper3(size.passes))),
        NAMES["balanced"]: balanced,
        OURS: ours,
    }


def ask(predict: Predict, test: TestSet, device: str) -> tuple[int, float]:
    """Return how many answers are right, and the views per image."""
    answer = predict(test.images.to(device))
    return int((answer.labels.cpu() == test.labels).sum()), answer.views


def summary(rows: dict[str, list[Row]], size: Size, count: int) -> dict[str, Any]:
    """Return the numbers of the table: over all networks, and in what a method loses to the bare model."""
    total = count * size.networks
    bare = rows[BARE]
    methods: dict[str, dict[str, Any]] = {}
    for name, found in rows.items():
        loses = ["tilted"] if sum(row.right for row in found) < sum(row.right for row in bare) else []
        cost = sum(row.upright for row in bare) - sum(row.upright for row in found)
        methods[name] = {
            "right": sum(row.right for row in found),
            "accuracy": 100 * sum(row.right for row in found) / total,
            "accuracy_std": statistics.stdev(100 * row.right / count for row in found) if len(found) > 1 else 0.0,
            "upright_right": sum(row.upright for row in found),
            "upright_accuracy": 100 * sum(row.upright for row in found) / total,
            "views_per_image": statistics.fmean(row.views for row in found),
            "fit_seconds": statistics.fmean(row.fitting for row in found),
            "ms_per_image": 1000 * sum(row.seconds for row in found) / total,
            "loses": [*loses, *(["upright"] if 100 * cost / total > PROMISE else [])],
        }
    return {"dataset": "digits", "perturb": "affine", "count": count, "networks": size.networks, "methods": methods}


def pictures(
    out: Path, report: dict[str, Any], robust: ITS, tilted: TestSet, names: Sequence[str]
) -> tuple[str, list[Path]]:
    """Return in words the search of one digit that the bare model gets wrong, and the files written.

    The words and the picture are of one and the same search.
    """
    images, truth = tilted.images[:SHOWN], tilted.labels[:SHOWN]
    found = robust.search(images)
    number = choose(found, truth)
    one = robust.search(images[number : number + 1])
    digits = [f"digit {name}" for name in names]
    many = f"accuracy (%), {report['count']} tilted digits, {networks(report)}"
    figures = {
        "accuracy": plot.bars(fractions(report), title="Tilted digits", highlight=[OURS], xlabel=many),
        "before-after": plot.before_after(found, count=10, names=names, truth=truth),
        "search": plot.explain(robust, one, names=digits, title="One digit, and how it was found out"),
    }
    words = one.describe(0, names=digits)
    words += f"\nin truth: {decompose(tilted.transforms[number].double()).describe()}, digit {int(truth[number])}"
    return words, [plot.save(figure, out / f"{name}.png") for name, figure in figures.items()]


def choose(found: SearchResult, truth: Tensor) -> int:
    """Return the first digit, turned by 60° to 150°, that the bare model gets wrong and the search right."""
    alone = found.bare.argmax(1).cpu()
    turned = decompose(found.perturbation.double()).rotation.abs().rad2deg().cpu()
    rescued = (alone != truth) & (found.labels.cpu() == truth)
    good = rescued & (turned > 60) & (turned < 150) & ~found.gated.cpu()
    return int((good.float() + rescued.float()).argmax())
