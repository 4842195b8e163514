"""Figure "reconstructions": transformed inputs and what each method makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headtilt.its import ITS
from headtilt.model.predictor import Predictor
from headtilt.paper.data.perturb import TestSet, schedule
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.experiments.methods import fitted
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.table1_rows import TRAINED
from headtilt.paper.experiments.reproduce.trial import (
    QUICK_FITTING,
    QUICK_TRAINING,
    WORDS,
    Fitting,
    Training,
    baseline,
    draw_images,
    network,
    picture,
    setting,
    tilt,
)
from headtilt.presets import accurate, fast, paper3, paper5

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

NAME = "reconstructions"
TITLE = "Inputs and canonicalised images"
DATASETS = ("mnist", "fashion-mnist", "gtsrb")
COLUMNS = ("original", "input", *TRAINED, "ITS³", "ITS⁵", "head")
PAPER: dict[str, Any] = {
    "ranges": "rotation ±π, scale ±1/4, shear ±1/4",
    "claims": ["trained canonicalisers cannot undo transformations outside of their training data; ITS can"],
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        images: Images per data set.
        passes: Monte-Carlo passes.
        slow_passes: Monte-Carlo passes of GTSRB's network, where they share next to nothing.
        training: How baselines are trained.
        fitting: How the head is fitted.
        fewer: By what the images for training and fitting are divided on GTSRB.
        budget: "accurate" or "fast".
    """

    images: int = 3
    passes: int = 50
    slow_passes: int = 50
    training: Training = Training()  # noqa: RUF009 - frozen
    fitting: Fitting = Fitting()  # noqa: RUF009 - frozen
    fewer: int = 1
    budget: str = "accurate"


FULL = Size()
QUICK = Size(
    passes=10, slow_passes=1, training=QUICK_TRAINING, fitting=QUICK_FITTING, fewer=5, budget="fast"
)  # the same baselines as in the quick table


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return the images and answers of each method, and how many answers are right."""
    datasets, left_out = study.available(DATASETS)
    jobs = {
        (dataset, column): partial(canonical, study, size, dataset, column)
        for dataset in datasets
        for column in COLUMNS
    }
    found = store.gather(jobs)
    results = {dataset: {column: found[dataset, column] for column in COLUMNS} for dataset in datasets}
    right = {
        column: sum(sum(entry[column]["right"]) for entry in results.values())
        for column in COLUMNS
        if "right" in results[datasets[0]][column]
    }
    return {
        "left_out": left_out,
        "seeds": [0],
        "images": size.images,
        "results": results,
        "verdict": {"right_answers": right, "of": size.images * len(datasets)},
    }


def samples(study: Study, size: Size, dataset: str) -> tuple[TestSet, Tensor, tuple[str, ...]]:
    """Return transformed images, the originals and the names of the classes."""
    data = draw_images(study, dataset, size.images, seed=1)
    test = tilt(data, draw_transforms("affine", len(data), seed=1), study.device)
    return test, data.floats(), data.classes


def canonical(study: Study, size: Size, dataset: str, column: str) -> dict[str, Any]:
    """Return the images that one method makes of the inputs, its answers, and whether they are right."""
    test, originals, classes = samples(study, size, dataset)
    if column == "original":
        return {"pictures": [picture(image) for image in originals], "labels": [classes[i] for i in test.labels]}
    images, labels = moved(study, size, dataset, column, test.images)
    return {
        "pictures": [picture(image) for image in images.cpu()],
        "labels": [classes[int(label)] for label in labels],
        "right": (labels == test.labels).tolist(),
    }


def moved(study: Study, size: Size, dataset: str, column: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a method takes for the canonical images, and its labels."""
    thrift = size.fewer if dataset == "gtsrb" else 1
    if column == "input":
        return images, Predictor(network(study, dataset, 0))(images).labels
    if column in TRAINED:
        training = size.training
        if training.images is not None:
            training = Training(training.images // thrift, training.epochs, training.warm)
        model: Any = baseline(study, TRAINED[column], dataset, 0, training)
        with torch.no_grad():
            return model.canonical(images), model(images).argmax(1)
    passes = size.slow_passes if dataset == "gtsrb" else size.passes
    if column == "head":
        levels = schedule("affine").searched
        fitting = Fitting(size.fitting.images // thrift, size.fitting.recipe)
        given = setting(study, dataset, 0, levels, fitting)
        robust = fitted(given, "head", (accurate if size.budget == "accurate" else fast)(levels), gate=False)
    else:
        robust = ITS(network(study, dataset, 0), padding="zeros", **(paper3 if column == "ITS³" else paper5)(passes))
    result = robust.search(images)
    return result.canonical(), result.labels


def draw(report: Report) -> dict[str, Figure]:
    """Return a row for each image and a column for each method, with the answers below."""
    from headtilt.paper.experiments.reproduce.figures import strip
    from headtilt.paper.experiments.reproduce.trial import pixels
    from headtilt.plot.style import FAINT, GREEN, VERMILION, canvas, say

    rows = [(dataset, number) for dataset in report["results"] for number in range(report["images"])]
    pitch, drop, left = 1.16, 1.36, 1.3
    figure, axes = canvas(left + pitch * len(COLUMNS), 0.4 + drop * len(rows), 0.82)
    for column, name in enumerate(COLUMNS):
        say(axes, left + pitch * column + 0.5, -0.2, name, 9.5, weight="bold")
    for row, (dataset, number) in enumerate(rows):
        top = -0.4 - drop * row
        if number == report["images"] // 2:
            say(axes, left - 0.15, top - 0.5, WORDS.get(dataset, dataset), 9.5, ha="right", weight="bold")
        entry = report["results"][dataset]
        looks = []
        for name in COLUMNS:
            right = entry[name].get("right", [None] * report["images"])[number]
            colour = {None: FAINT, True: GREEN, False: VERMILION}[right]
            looks.append((pixels(entry[name]["pictures"][number]), entry[name]["labels"][number], colour))
        strip(axes, looks, left, top, pitch)
    return {NAME: figure}
