"""Figure "rotation_mnist": accuracy on MNIST turned by fixed angles, for a CNN, equivariant networks, ITS and ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headtilt.geometry.groups import rotation
from headtilt.model.predictor import Predictor
from headtilt.paper.experiments.methods import Predict, Prediction, build, searching
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import (
    QUICK_FITTING,
    WORDS,
    Fitting,
    Training,
    ask,
    baseline,
    draw_images,
    our_tree,
    setting,
    tilt,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

NAME = "rotated-mnist"
TITLE = "Accuracy on MNIST turned by fixed angles"
DATASETS = ("mnist",)
ROWS = ("CNN", "GCNN (p4)", "RotDCF (p8)", "CNN + ITS", "CNN + head")
PAPER: dict[str, Any] = {
    "claims": [
        "ITS boosts the CNN's robustness significantly",
        "the p4-equivariant group CNN is above ITS at the majority of angles",
    ]
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        networks: Trained networks of each kind.
        images: Test images, the same at every angle.
        step: Degrees from angle to angle.
        passes: Monte-Carlo passes of ITS.
        training: How the equivariant networks are trained.
        fitting: How the head is fitted.
        head: Which method of `headtilt evaluate` stands for the head.
    """

    networks: int
    images: int
    step: int
    passes: int = 10
    training: Training = Training()  # noqa: RUF009 - frozen
    fitting: Fitting = Fitting()  # noqa: RUF009 - frozen
    head: str = "head-features"


FULL = Size(networks=5, images=2000, step=10)
QUICK = Size(1, 50, 45, training=Training(images=4096, epochs=2), fitting=QUICK_FITTING, head="fast")


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return the accuracy at each angle, for every network of every kind, and the mean curves."""
    datasets, left_out = study.available(DATASETS)
    dataset = datasets[0]
    angles = list(range(-180, 180, size.step))
    jobs = {
        (name, f"network {seed}"): partial(curve, study, size, dataset, name, seed, angles)
        for name in ROWS
        for seed in range(size.networks)
    }
    found = store.within(datasets[0]).gather(jobs)
    networks = {name: [found[name, f"network {seed}"] for seed in range(size.networks)] for name in ROWS}
    results = {
        name: {
            "accuracy": [statistics.fmean(at) for at in zip(*curves, strict=True)],
            "std": [statistics.stdev(at) if len(at) > 1 else 0.0 for at in zip(*curves, strict=True)],
            "mean": statistics.fmean(value for one in curves for value in one),
            "worst": min(statistics.fmean(at) for at in zip(*curves, strict=True)),
        }
        for name, curves in networks.items()
    }
    return {
        "dataset": dataset,
        "left_out": left_out,
        "images": size.images,
        "seeds": list(range(size.networks)),
        "angles": angles,
        "results": results,
        "networks": networks,
        "verdict": verdict(results, angles),
    }


def curve(study: Study, size: Size, dataset: str, name: str, seed: int, angles: list[int]) -> list[float | None]:
    """Return the accuracy of one network with all images turned by each angle."""
    predict = method(study, size, dataset, name, seed)
    data = draw_images(study, dataset, size.images)
    found = []
    for angle in angles:
        turn = rotation().matrix(torch.tensor(float(angle)).deg2rad()).expand(len(data), 3, 3)
        found.append(ask(predict, tilt(data, turn, study.device))["accuracy"])
    return found


def method(study: Study, size: Size, dataset: str, name: str, seed: int) -> Predict:
    """Return the method of a row."""
    trained = {"GCNN (p4)": "gcnn", "RotDCF (p8)": "rotdcf"}
    if name in trained:
        return classifying(baseline(study, trained[name], dataset, seed, size.training))
    given = setting(study, dataset, seed, [rotation()], size.fitting, size.passes)
    if name == "CNN + ITS":
        return searching(our_tree(given.model, [rotation()], mc_passes=size.passes, seed=seed))
    return build("vanilla" if name == "CNN" else size.head, given)


def classifying(model: nn.Module) -> Predict:
    """Return the method that asks a network as it is."""
    ask_network: Callable[[Tensor], Any] = Predictor(model)
    return lambda images: Prediction(ask_network(images).labels, None, 1)


def verdict(results: dict[str, Any], angles: list[int]) -> dict[str, Any]:
    """Return how often who is above whom."""
    its, group, ours = (results[name] for name in ("CNN + ITS", "GCNN (p4)", "CNN + head"))

    def above(first: Any, second: Any) -> int:
        return sum(one > other for one, other in zip(first["accuracy"], second["accuracy"], strict=True))

    return {
        "gain_of_its": its["mean"] - results["CNN"]["mean"],
        "its_boosts_the_cnn": its["mean"] > results["CNN"]["mean"],
        "angles": len(angles),
        "angles_where_gcnn_is_above_its": above(group, its),
        "gcnn_above_its_at_most_angles": above(group, its) > len(angles) / 2,
        "angles_where_ours_is_above_gcnn": above(ours, group),
    }


def draw(report: Report) -> dict[str, Figure]:
    """Return the curves over the angle."""
    from headtilt.paper.experiments.reproduce.figures import curves
    from headtilt.plot.style import new_figure, style_axes

    figure = new_figure(7, 4)
    axes = figure.subplots()
    at = [*report["angles"], 180]  # half a turn either way is the same

    def closed(values: list[float]) -> list[float]:
        return [*values, values[0]]

    curves(axes, at, {name: (closed(row["accuracy"]), closed(row["std"])) for name, row in report["results"].items()})
    title = f"{WORDS.get(report['dataset'], report['dataset'])}, all images turned by one angle"
    style_axes(axes, title=title, xlabel="angle (degrees, clockwise)", ylabel="accuracy (%)", grid="both")
    axes.set(ylim=(0, 101), xlim=(-180, 180))
    axes.set_xticks(range(-180, 181, 45), [f"{tick}°".replace("-", "−") for tick in range(-180, 181, 45)])
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    return {NAME: figure}
