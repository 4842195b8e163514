"""Appendix "Markov": transition matrices of the search, energies over the passes, stochastic against greedy walks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headtilt.geometry.groups import rotation
from headtilt.its import ITS
from headtilt.model.predictor import Predictor
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, draw_images, network, our_tree, share, spread, tilt
from headtilt.presets import affine_levels
from headtilt.search.found import LevelTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "markov"
TITLE = "The search as a Markov process"
DATASETS = ("mnist",)
TURNS = (0, 45, 90, 180)
PAPER: dict[str, Any] = {
    "claims": [
        "the next move depends on the present pose alone: a Markov process with Boltzmann transition probabilities",
        "the energy is a random variable over dropout passes; its density is estimated with Gaussian kernels",
    ]
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        networks: Trained networks.
        images: Test images per network.
        samples: Samples along each orbit.
        passes: Monte-Carlo passes of the search.
        draws: Dropout passes for the densities.
        temperatures: Of the stochastic walk, in units of the spread of the confidence along an orbit.
    """

    networks: int
    images: int
    samples: int = 17
    passes: int = 10
    draws: int = 200
    temperatures: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)


FULL = Size(networks=5, images=1000)
QUICK = Size(networks=1, images=60, draws=60, temperatures=(0.3, 1.0))


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return transition matrices, energy densities, and the accuracy of greedy and stochastic walks."""
    datasets, left_out = study.available(DATASETS)
    seeds = range(size.networks)
    walks = ["greedy", *(f"T = {heat:g}" for heat in size.temperatures)]
    jobs: dict[tuple[str, ...], Any] = {
        ("walk", name, f"network {seed}"): partial(walk, study, size, datasets[0], name, seed)
        for name in walks
        for seed in seeds
    }
    jobs["transitions", ""] = partial(transitions, study, size, datasets[0])
    jobs["densities", ""] = partial(densities, study, size, datasets[0])
    found = store.within(datasets[0]).gather(jobs)
    accuracy = {name: spread([found["walk", name, f"network {seed}"] for seed in seeds]) for name in walks}
    results = {"walks": accuracy, "transitions": found["transitions", ""], "densities": found["densities", ""]}
    stochastic = max(accuracy[name]["mean"] for name in walks[1:])
    return {
        "dataset": datasets[0],
        "left_out": left_out,
        "seeds": list(seeds),
        "images": size.images,
        "notes": [
            "Transition probabilities: softmax of the group confidence over its spread along the orbit, averaged over "
            "the images whose hypothesis came from that pose of the level above; rows are empty where none did.",
        ],
        "results": results,
        "verdict": {
            "rows_sum_to_one": all(
                abs(sum(row) - 1) < 1e-2 for table in results["transitions"].values() for row in table["matrix"] if row
            ),
            "greedy_minus_best_stochastic": accuracy["greedy"]["mean"] - stochastic,
            "energy_is_random": min(entry["deviation"] for entry in results["densities"]["curves"].values()) > 0,
        },
    }


def robust_for(study: Study, size: Size, dataset: str, seed: int, **options: Any) -> ITS:
    """Return ITS³ for a network."""
    model = network(study, dataset, seed)
    return our_tree(model, affine_levels(), samples=size.samples, mc_passes=size.passes, seed=seed, **options)


def walk(study: Study, size: Size, dataset: str, name: str, seed: int) -> float:
    """Return the accuracy of a greedy or a stochastic walk; its temperature is measured on the images themselves."""
    data = draw_images(study, dataset, size.images, seed=seed)
    test = tilt(data, draw_transforms("affine", len(data), seed=seed), study.device)
    options: dict[str, Any] = {}
    if name != "greedy":

        def scaled(evidence: Any, orbit: Any) -> Tensor:
            from headtilt.search.confidence import group

            confidence = group(evidence, orbit)
            known = confidence.masked_fill(~confidence.isfinite(), float("nan"))
            deviation = (known - known.nanmean(-1, keepdim=True)).square().nanmean(-1, keepdim=True).sqrt()
            return confidence / deviation.clamp_min(1e-12)

        heat = float(name.removeprefix("T = "))
        options = {"traversal": "boltzmann", "temperature": heat, "confidence": scaled, "ranking": "energy"}
    result = robust_for(study, size, dataset, seed, **options).search(test.images)
    return share(result.labels == test.labels)


def transitions(study: Study, size: Size, dataset: str) -> dict[str, Any]:
    """Return P(pose of a level | pose of the level above) for the two steps of ITS³, on the first network."""
    data = draw_images(study, dataset, size.images)
    test = tilt(data, draw_transforms("affine", len(data)), study.device)
    result = robust_for(study, size, dataset, 0).search(test.images)
    levels = cast(tuple[LevelTrace, ...], result.trace)
    found = {}
    for above, below in pairwise(levels):
        samples = len(below.parameters)
        came_from = above.chosen.clamp_min(0) % len(above.parameters)
        live = below.active
        confidence = below.confidence[live]
        probability = (confidence / confidence.std(dim=-1, keepdim=True).clamp_min(1e-9)).softmax(-1).double().cpu()
        row = came_from[live].cpu()
        total = torch.zeros(len(above.parameters), samples, dtype=torch.float64).index_add_(0, row, probability)
        count = torch.bincount(row, minlength=len(above.parameters))
        matrix = [(total[i] / count[i]).tolist() if count[i] else [] for i in range(len(count))]
        found[f"{above.group.name} → {below.group.name}"] = {
            "from": above.parameters.tolist(),
            "to": below.parameters.tolist(),
            "matrix": matrix,
            "visits": count.tolist(),
        }
    return found


def densities(study: Study, size: Size, dataset: str) -> dict[str, Any]:
    """Return the density of the energy over dropout passes for the first image, upright and turned."""
    image = draw_images(study, dataset, 1).floats().to(study.device)
    model = network(study, dataset, 0)
    poses = rotation().matrix(torch.tensor(TURNS, dtype=torch.float32).deg2rad()).to(study.device)
    index = torch.zeros(len(TURNS), dtype=torch.long, device=study.device)
    energies = torch.stack(
        [
            Predictor(model, mc_sampled=True, seed=number).views(image, index, poses).energy.double().cpu()
            for number in range(size.draws)
        ]
    )
    margin = float(energies.std())
    grid = torch.linspace(float(energies.min()) - margin, float(energies.max()) + margin, 200, dtype=torch.float64)
    curves = {}
    for number, turn in enumerate(TURNS):
        values = energies[:, number]
        curves[str(turn)] = {
            "mean": float(values.mean()),
            "deviation": float(values.std()),
            "density": kernel_density(values, grid).tolist(),
        }
    return {"energy": grid.tolist(), "curves": curves, "passes": size.draws}


def kernel_density(values: Tensor, grid: Tensor) -> Tensor:
    """Return the density of values (n,) at grid (g,): Gaussian kernels of Scott's width."""
    width = values.std().clamp_min(1e-6) * len(values) ** -0.2
    return torch.exp(-0.5 * ((grid[:, None] - values) / width) ** 2).mean(1) / (width * math.sqrt(2 * math.pi))


def draw(report: Report) -> dict[str, Figure]:
    """Return both transition matrices, the densities, and the walks."""
    from headtilt.paper.experiments.reproduce.figures import curves, heat_map
    from headtilt.plot.style import BLUE, PALE, new_figure, say, style_axes

    results = report["results"]
    figure = new_figure(9.4, 6.6)
    grid = figure.subplots(2, 2)
    names = list(results["transitions"])
    tables = {
        name: [row or [float("nan")] * len(entry["to"]) for row in entry["matrix"]]
        for name, entry in results["transitions"].items()
    }
    for axes, name in zip(grid[0], names, strict=True):
        entry, flat = results["transitions"][name], [v for row in tables[name] for v in row if v == v]
        first, second = name.split(" → ")
        drawn = heat_map(
            axes, tables[name], rows=ticks(first, entry["from"]), columns=ticks(second, entry["to"]),
            limits=(0, max(flat)),
            title=f"P({second.replace('_', ' ')} | {first.replace('_', ' ')})", cmap="viridis",
            xlabel=second.replace("_", " "), ylabel=first.replace("_", " "),
        )  # fmt: skip
        for axis, values in ((axes.xaxis, entry["to"]), (axes.yaxis, entry["from"])):
            labels = ticks(second if axis is axes.xaxis else first, values)
            axis.set_ticks(range(0, len(values), 4), labels[::4])
        bar = figure.colorbar(drawn, ax=axes, aspect=25, pad=0.02)
        bar.outline.set_visible(False)
        style_axes(bar.ax)
    density = results["densities"]
    curves(grid[1, 0], density["energy"], {f"{t}°": (row["density"], None) for t, row in density["curves"].items()})
    style_axes(grid[1, 0], title=f"energy of one image over {density['passes']} passes", xlabel="energy", grid="both",
               ylabel="density")  # fmt: skip
    grid[1, 0].legend(title="turned by", frameon=False, fontsize=8, title_fontsize=8)
    for place, (name, entry) in enumerate(results["walks"].items()):
        axes = grid[1, 1]
        axes.bar(place, entry["mean"], width=0.62, color=BLUE if name == "greedy" else PALE, zorder=2)
        axes.errorbar(place, entry["mean"], yerr=entry["std"], color="#222222", lw=1.2, capsize=3, zorder=3)
        say(axes, place, 3, f"{entry['mean']:.1f}", 8.5, "white" if name == "greedy" else "#222222", va="bottom")
    style_axes(axes, title=f"walks on affine {WORDS.get(report['dataset'], report['dataset'])}", ylabel="accuracy (%)",
               grid="y")  # fmt: skip
    axes.set(ylim=(0, 100))
    axes.set_xticks(range(len(results["walks"])), list(results["walks"]))
    return {NAME: figure}


def ticks(group: str, parameters: list[float]) -> list[str]:
    """Return parameters in units that people use."""
    if group == "rotation":
        return [f"{math.degrees(value):.0f}°".replace("-", "−") for value in parameters]
    if group == "scale":
        return [f"×{math.exp(value):.2f}" for value in parameters]
    return [f"{value:+.2f}".replace("-", "−").replace("+0.00", "0") for value in parameters]
