"""Figure "uncertainty": the probability that a transformed image is taken for the canonical one, by three measures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headtilt.geometry.groups import OneParameterGroup, rotation, scale, shear_x
from headtilt.model.predictor import Predictor
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, draw_images, network
from headtilt.search.confidence import MEASURES, Orbit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "confidence"
TITLE = "Probability that a transformed image is recognised as canonical"
DATASETS = ("fashion-mnist",)
GROUPS: dict[str, OneParameterGroup] = {"scale": scale(0.5), "shear": shear_x(0.5), "rotation": rotation()}
PAPER: dict[str, Any] = {
    "claims": [
        "the group-induced confidence surpasses both others or is on par with them",
        "energy and Bayesian confidence put mass on the borders and on quarter turns",
    ]
}

PAPERS = {name: MEASURES[name] for name in ("energy", "bayesian", "group")}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        networks: Trained networks.
        images: Test images.
        samples: Samples of each orbit.
        passes: Monte-Carlo passes.
    """

    networks: int
    images: int
    samples: int = 33
    passes: int = 50


FULL = Size(networks=5, images=10_000)
QUICK = Size(networks=1, images=60, samples=25, passes=10)


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return for each group and measure how often each pose wins, and its mean Boltzmann probability."""
    datasets, left_out = study.available(DATASETS)
    jobs = {
        (group, f"network {seed}"): partial(orbits, study, size, datasets[0], group, seed)
        for group in GROUPS
        for seed in range(size.networks)
    }
    found = store.within(datasets[0]).gather(jobs)
    results: dict[str, Any] = {}
    for group in GROUPS:
        networks = [found[group, f"network {seed}"] for seed in range(size.networks)]
        measures = {
            name: {kind: average([one[name][kind] for one in networks]) for kind in ("wins", "boltzmann")}
            for name in PAPERS
        }
        results[group] = {
            "parameters": GROUPS[group].grid(size.samples).tolist(),
            "periodic": GROUPS[group].periodic,
            "measures": {
                name: {**entry, **masses(entry["wins"], group == "rotation")} for name, entry in measures.items()
            },
        }
    return {
        "dataset": datasets[0],
        "left_out": left_out,
        "images": min(size.images, len(draw_images(study, datasets[0], size.images))),
        "seeds": list(range(size.networks)),
        "notes": [
            "wins: share of images whose most confident pose is this one. boltzmann: mean softmax over the orbit of "
            "the confidence, each image's scaled to unit spread, since the measures differ in scale by orders.",
        ],
        "results": results,
        "verdict": judge({"results": results}),
    }


def orbits(study: Study, size: Size, dataset: str, name: str, seed: int) -> dict[str, dict[str, list[float]]]:
    """Return for each measure how often each sample of the orbit wins over upright images, and its probability."""
    group = GROUPS[name]
    images = draw_images(study, dataset, size.images).floats()
    predictor = Predictor(network(study, dataset, seed), mc_passes=size.passes, seed=seed)
    poses = group.orbit(size.samples).float().to(study.device)
    wins = {measure: torch.zeros(size.samples) for measure in PAPERS}
    probability = {measure: torch.zeros(size.samples) for measure in PAPERS}
    for part in images.split(500):
        index = torch.arange(len(part), device=study.device).repeat_interleave(len(poses))
        seen = predictor.views(part.to(study.device), index, poses.repeat(len(part), 1, 1))
        seen = seen.reshape(len(part), 1, len(poses))
        for measure, judge in PAPERS.items():
            confidence = judge(seen, Orbit(group, size.samples))[:, 0].float().cpu()
            wins[measure] += torch.bincount(confidence.argmax(1), minlength=size.samples)
            scaled = confidence / confidence.std(dim=1, keepdim=True).clamp_min(1e-9)
            probability[measure] += scaled.softmax(1).sum(0)
    return {
        measure: {
            "wins": (wins[measure] / len(images)).tolist(),
            "boltzmann": (probability[measure] / len(images)).tolist(),
        }
        for measure in PAPERS
    }


def average(rows: list[list[float]]) -> list[float]:
    """Return the mean of each place over rows."""
    return [statistics.fmean(at) for at in zip(*rows, strict=True)]


def masses(wins: list[float], periodic: bool) -> dict[str, float]:
    """Return the share of images won near the canonical pose and far from it.

    Near is within an eighth of the grid's half, far is the outer eighth of each end; for a turn, within an eighth of
    it around the quarter turns and the half turn.
    """
    count = len(wins)
    middle, reach = count // 2, max(count // 16, 1)
    near = sum(wins[middle - reach : middle + reach + 1])
    if not periodic:
        return {"near": near, "far": sum(wins[: reach + 1]) + sum(wins[-reach - 1 :])}
    quarter = [round(middle + turn * count / 4) % count for turn in (-1, 1, 2)]
    places = {(place + step) % count for place in quarter for step in range(-(reach // 2), reach // 2 + 1)}
    return {"near": near, "far": sum(wins[place] for place in places)}


def judge(report: Report) -> dict[str, Any]:
    """Return for each group how the group confidence compares, and how often an end of the orbit wins."""
    found = {}
    for group, entry in report["results"].items():
        near = {name: row["near"] for name, row in entry["measures"].items()}
        others = max(near["energy"], near["bayesian"])
        found[group] = {
            "near": near,
            "far": {name: row["far"] for name, row in entry["measures"].items()},
            **({} if entry["periodic"] else {"at_the_ends": _ends(entry["measures"])}),
            "group_above_or_on_par": near["group"] >= others - 0.01,
        }
    return found


def _ends(measures: dict[str, Any]) -> dict[str, float]:
    return {name: row["wins"][0] + row["wins"][-1] for name, row in measures.items()}


def draw(report: Report) -> dict[str, Figure]:
    """Return a row for each group: who wins at left, probabilities at right."""
    import numpy as np

    from headtilt.paper.experiments.reproduce.figures import curves
    from headtilt.plot.style import BLUE, ORANGE, VERMILION, natural_ticks, new_figure, style_axes
    from headtilt.plot.style import in_natural_units as in_units

    figure = new_figure(8.4, 7.4)
    grid = figure.subplots(len(report["results"]), 2, squeeze=False)
    colours = {"energy": BLUE, "bayesian": ORANGE, "group": VERMILION}
    heads = ("share of images that choose this pose (%)", "mean Boltzmann probability (%)")
    for row, (name, entry) in enumerate(report["results"].items()):
        at, label, text = in_units(GROUPS[name], torch.tensor(entry["parameters"]))
        for column, kind in enumerate(("wins", "boltzmann")):
            axes = grid[row, column]
            lines = {
                measure: ([100 * value for value in found[kind]], None) for measure, found in entry["measures"].items()
            }
            curves(axes, at.tolist(), lines, colours=colours)
            axes.axvline(at[len(at) // 2], color="#767676", lw=0.8, ls=":", zorder=1)
            style_axes(axes, title=heads[column] if row == 0 else "", xlabel=label, grid="both")
            axes.set(ylim=(0, None), xlim=(float(np.min(at)), float(np.max(at))))
            natural_ticks(axes, at, text, GROUPS[name])
    handles, labels = grid[0, 0].get_legend_handles_labels()
    where = f"{WORDS.get(report['dataset'], report['dataset'])}, {report['images']:,} upright test images"
    figure.suptitle(where, fontsize=10, x=0.01, ha="left")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return {NAME: figure}
