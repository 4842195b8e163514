"""Text and figure "samples_vs_hypotheses": accuracy against Monte-Carlo passes, and against |G| and |H|."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headtilt.geometry.groups import rotation, scale
from headtilt.its import ITS
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.experiments.methods import ours, searching
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, ask, draw_images, network, our_tree, spread, tilt
from headtilt.presets import paper3

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "hyperparameters"
TITLE = "Accuracy against Monte-Carlo passes, samples and hypotheses"
DATASETS = ("fashion-mnist", "mnist")  # for the passes, for samples and hypotheses
PAPER: dict[str, Any] = {
    "gain_1_to_10": [9.46, 1.14],
    "gain_10_to_50": [1.38, 0.47],
    "best": {"samples": 16, "hypotheses": 3},
    "claims": ["accuracy does not grow with more samples or hypotheses; the middle ground is best"],
}
# Passes, and whether dropout is sampled: a single pass may be a random network or the deterministic one.
PASSES = {"deterministic": (1, False), "1": (1, True), "10": (10, True), "50": (50, True)}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        runs: Draws of transforms for the passes; run r uses network r mod `networks`.
        networks: Trained networks.
        images: Test images per run.
        samples: Values of |G|; odd, since a grid of scales holds the identity.
        hypotheses: Values of |H|.
        passes: Monte-Carlo passes of the heat map.
    """

    runs: int
    networks: int
    images: int
    samples: tuple[int, ...]
    hypotheses: tuple[int, ...]
    passes: int = 10


FULL = Size(10, 5, 1000, (5, 9, 13, 17, 25, 33), (1, 2, 3, 5, 7, 9))
QUICK = Size(3, 2, 60, (5, 9, 17), (1, 3, 5))


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return accuracies for each count of passes, and gains over the bare network for each |G| and |H|."""
    datasets, left_out = study.available(DATASETS)
    first, second = datasets[0], datasets[-1]
    jobs: dict[tuple[str, ...], Any] = {
        ("passes", name, f"run {run}"): partial(with_passes, study, size, first, name, run)
        for name in PASSES
        for run in range(size.runs)
    }
    for samples in size.samples:
        for kept in size.hypotheses:
            jobs["cell", str(samples), str(kept)] = partial(cell, study, size, second, samples, kept)
    found = store.within(first, second).gather(jobs)
    accuracy = {name: [found["passes", name, f"run {run}"] for run in range(size.runs)] for name in PASSES}
    gains = {
        f"{low} to {high}": spread(
            [after - before for before, after in zip(accuracy[low], accuracy[high], strict=True)]
        )
        for low, high in (("1", "10"), ("10", "50"), ("deterministic", "10"), ("deterministic", "50"))
    }
    cells = [[found["cell", str(samples), str(kept)] for samples in size.samples] for kept in size.hypotheses]
    return {
        "datasets_used": {"passes": first, "cells": second},
        "left_out": left_out,
        "seeds": list(range(size.runs)),
        "images": size.images,
        "results": {
            "passes": {name: {**spread(values), "values": values} for name, values in accuracy.items()},
            "gains": gains,
            "samples": list(size.samples),
            "hypotheses": list(size.hypotheses),
            "improvement": [[entry["mean"] for entry in row] for row in cells],
            "improvement_std": [[entry["std"] for entry in row] for row in cells],
        },
        "verdict": verdict(gains, cells, size),
    }


def with_passes(study: Study, size: Size, dataset: str, name: str, run: int) -> float | None:
    """Return the accuracy of ITS³ in one run."""
    passes, sampled = PASSES[name]
    seed = run % size.networks
    options = ours(paper3(passes), "incumbent")
    robust = ITS(network(study, dataset, seed), **options, padding="zeros", mc_sampled=sampled, seed=run)
    data = draw_images(study, dataset, size.images, seed=run)
    return ask(searching(robust), tilt(data, draw_transforms("affine", len(data), seed=run), study.device))["accuracy"]


def cell(study: Study, size: Size, dataset: str, samples: int, hypotheses: int) -> dict[str, Any]:
    """Return by how many points ITS with rotation and scale improves on the bare network, over networks."""
    gains = []
    for seed in range(size.networks):
        model = network(study, dataset, seed)
        data = draw_images(study, dataset, size.images, seed=seed)
        transforms = draw_transforms("rotation+scale", len(data), seed=seed)
        test = tilt(data, transforms, study.device)
        levels = [rotation(), scale(0.25)]
        robust = our_tree(model, levels, samples=samples, hypotheses=hypotheses, mc_passes=size.passes, seed=seed)
        result = robust.search(test.images)
        right = (result.labels == test.labels).float() - (result.bare.argmax(1) == test.labels).float()
        gains.append(100 * float(right.mean()))
    return spread(gains)


def verdict(gains: dict[str, Any], cells: list[list[dict[str, Any]]], size: Size) -> dict[str, Any]:
    """Return the paper's gains beside ours, and where the best cell lies."""
    best = max(
        ((entry["mean"], samples, kept) for row, kept in zip(cells, size.hypotheses, strict=True)
         for entry, samples in zip(row, size.samples, strict=True))
    )  # fmt: skip
    most = cells[-1][-1]["mean"]
    return {
        "gain_1_to_10": gains["1 to 10"]["mean"],
        "gain_10_to_50": gains["10 to 50"]["mean"],
        "gain_1_to_10_within_3_points": abs(gains["1 to 10"]["mean"] - PAPER["gain_1_to_10"][0]) <= 3,
        "gain_10_to_50_within_3_points": abs(gains["10 to 50"]["mean"] - PAPER["gain_10_to_50"][0]) <= 3,
        "sampling_beats_the_deterministic_model": gains["deterministic to 50"]["mean"] > 0,
        "best": {"samples": best[1], "hypotheses": best[2], "improvement": best[0]},
        "largest_values_are_not_best": most < best[0],
        "mean_by_hypotheses": {
            str(kept): statistics.fmean(entry["mean"] for entry in row)
            for kept, row in zip(size.hypotheses, cells, strict=True)
        },
    }


def draw(report: Report) -> dict[str, Figure]:
    """Return accuracy against passes at left, the heat map of gains at right."""
    from headtilt.paper.experiments.reproduce.figures import heat_map
    from headtilt.plot.style import BLUE, COLORMAP, PALE, new_figure, say, style_axes

    results, names = report["results"], report["datasets_used"]
    figure = new_figure(9, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    for place, (name, entry) in enumerate(results["passes"].items()):
        left.bar(place, entry["mean"], width=0.62, color=PALE if name == "deterministic" else BLUE, zorder=2)
        left.errorbar(place, entry["mean"], yerr=entry["std"], color="#222222", lw=1.2, capsize=3, zorder=3)
        say(left, place, 2, f"{entry['mean']:.1f}", 8.5, "#222222" if name == "deterministic" else "white", va="bottom")
    words = {"deterministic": "no dropout"}
    left.set_xticks(range(len(PASSES)), [words.get(name, f"M = {name}") for name in results["passes"]])
    data = WORDS.get(names["passes"], names["passes"])
    style_axes(left, title=f"ITS³, affine {data}", ylabel="accuracy (%)", grid="y")
    left.set_ylim(0, max(entry["mean"] + (entry["std"] or 0) for entry in results["passes"].values()) * 1.12)
    values = results["improvement"]
    flat = [value for row in values for value in row]
    data = WORDS.get(names["cells"], names["cells"])
    drawn = heat_map(
        right,
        values,
        rows=results["hypotheses"],
        columns=results["samples"],
        title=f"gain over the bare network, turned and scaled {data}",
        xlabel="samples |G|",
        ylabel="hypotheses |H|",
        limits=(min(flat), max(flat)),
        cmap=COLORMAP,
        form="{:+.1f}",
    )
    bar = figure.colorbar(drawn, ax=right, aspect=25, pad=0.02)
    bar.outline.set_visible(False)
    style_axes(bar.ax, ylabel="points")
    return {NAME: figure}
