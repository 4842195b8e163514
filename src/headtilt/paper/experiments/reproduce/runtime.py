"""Figure "runtime": wall time of ITS against depth, Monte-Carlo passes and hypotheses, beside the bare network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headtilt.geometry.groups import rotation, scale, shear_x
from headtilt.model.predictor import Predictor
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, draw_images, network, our_tree, tilt

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

NAME = "runtime"
TITLE = "Wall time against depth, passes and hypotheses"
DATASETS = ("mnist",)
LEVELS = (rotation(), scale(0.25), shear_x(0.25), rotation(), scale(0.25))
STANDARD = {"depth": 3, "passes": 10, "hypotheses": 3}
PAPER: dict[str, Any] = {
    "complexity": "O(M·k^d): passes one after the other, hypotheses and samples in parallel",
    "claims": ["the depth of the tree is the most significant factor"],
    "hardware": "Nvidia A40",
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        images: Test images per call on the chosen device.
        cpu_images: Test images per call on the CPU, where that is not the chosen device; 0 leaves it out.
        repeats: Calls timed, after one that is not.
        depth: Depths of the tree.
        passes: Counts of Monte-Carlo passes.
        hypotheses: Counts of hypotheses.
    """

    images: int
    cpu_images: int
    repeats: int = 5
    depth: tuple[int, ...] = (1, 2, 3, 4, 5)
    passes: tuple[int, ...] = (1, 10, 25, 50)
    hypotheses: tuple[int, ...] = (1, 2, 3, 5, 7, 9)


FULL = Size(images=2000, cpu_images=50)
QUICK = Size(images=16, cpu_images=0, repeats=2, passes=(1, 10, 50), hypotheses=(1, 3, 5))


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return milliseconds per image, mean and spread over calls, for each device and setting."""
    datasets, left_out = study.available(DATASETS)
    devices = {study.device: size.images}
    if size.cpu_images and not study.device.startswith("cpu"):
        devices["cpu"] = size.cpu_images
    jobs: dict[tuple[str, ...], Any] = {}
    for device, images in devices.items():
        jobs[device, "bare", ""] = partial(bare, study, size, datasets[0], device, images)
        for factor in STANDARD:
            for value in getattr(size, factor):
                jobs[device, factor, str(value)] = partial(
                    searched, study, size, datasets[0], device, images, {**STANDARD, factor: value}
                )
    found = store.within(datasets[0]).gather(jobs, timed=True)
    results = {
        device: {
            "images": images,
            "bare": found[device, "bare", ""],
            **{
                factor: {str(value): found[device, factor, str(value)] for value in getattr(size, factor)}
                for factor in STANDARD
            },
        }
        for device, images in devices.items()
    }
    return {
        "dataset": datasets[0],
        "left_out": left_out,
        "standard": STANDARD,
        "repeats": size.repeats,
        "results": results,
        "verdict": {device: verdict(entry, size) for device, entry in results.items()},
    }


def timed(call: Callable[[Tensor], Any], images: Tensor, repeats: int) -> dict[str, float]:
    """Return milliseconds per image over some calls; the first, which sets things up, does not count."""
    seconds = []
    for _ in range(repeats + 1):
        if images.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(images)
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    each = [1000 * second / len(images) for second in seconds[1:]]
    return {
        "ms_per_image": statistics.median(each),
        "std": statistics.stdev(each) if len(each) > 1 else 0.0,
        "fastest": min(each),
    }


def tilted(study: Study, dataset: str, device: str, count: int) -> Tensor:
    """Return turned, scaled and sheared test images on a device."""
    data = draw_images(study, dataset, count)
    return tilt(data, draw_transforms("affine", len(data)), device).images


def bare(study: Study, size: Size, dataset: str, device: str, count: int) -> dict[str, float]:
    """Return the time of the network alone."""
    predictor = Predictor(network(study, dataset, 0).to(device))
    return timed(predictor, tilted(study, dataset, device, count), size.repeats)


def searched(
    study: Study, size: Size, dataset: str, device: str, count: int, options: dict[str, int]
) -> dict[str, float]:
    """Return the time of a search."""
    robust = our_tree(
        network(study, dataset, 0).to(device),
        LEVELS[: options["depth"]],
        hypotheses=options["hypotheses"],
        mc_passes=options["passes"],
    )
    return timed(robust.search, tilted(study, dataset, device, count), size.repeats)


def verdict(entry: dict[str, Any], size: Size) -> dict[str, Any]:
    """Return by what factor time grows from the least to the most of each setting."""
    growth = {
        factor: entry[factor][str(max(getattr(size, factor)))]["ms_per_image"]
        / max(entry[factor][str(min(getattr(size, factor)))]["ms_per_image"], 1e-9)
        for factor in STANDARD
    }
    return {
        "growth": growth,
        "depth_matters_most": max(growth, key=lambda factor: growth[factor]) == "depth",
        "passes_are_nearly_free": growth["passes"] < 2,
    }


def draw(report: Report) -> dict[str, Figure]:
    """Return a panel for each setting, a bar for each device; the bare network is a dotted line."""
    from headtilt.plot.style import BLUE, FAINT, ORANGE, new_figure, say, style_axes

    figure = new_figure(9.6, 3.5)
    panels = figure.subplots(1, 3, sharey=True)
    words = {"depth": "levels of the tree", "passes": "Monte-Carlo passes", "hypotheses": "hypotheses"}
    devices = list(report["results"])
    width = 0.8 / len(devices)
    for axes, (factor, label) in zip(panels, words.items(), strict=True):
        for number, (device, colour) in enumerate(zip(devices, (BLUE, ORANGE), strict=False)):
            entry = report["results"][device]
            for place, row in enumerate(entry[factor].values()):
                x = place + (number - (len(devices) - 1) / 2) * width
                axes.bar(x, row["ms_per_image"], width=0.9 * width, color=colour, zorder=2, label=device)
                axes.errorbar(x, row["ms_per_image"], yerr=row["std"], color="#222222", lw=1, capsize=2, zorder=3)
            axes.axhline(entry["bare"]["ms_per_image"], color=colour, lw=1.3, ls=":", zorder=4)
        fixed = ", ".join(f"{name} {value}" for name, value in report["standard"].items() if name != factor)
        style_axes(axes, title=label, xlabel=fixed, grid="y")
        axes.set_xticks(range(len(entry[factor])), list(entry[factor]))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(which="minor", length=0)
    style_axes(panels[0], title=words["depth"], xlabel=panels[0].get_xlabel(), ylabel="ms per image", grid="y")
    handles, labels = panels[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    names = [f"{name}: {report['hardware']['gpu' if name.startswith('cuda') else 'cpu']}" for name in unique]
    figure.legend(list(unique.values()), names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    said = f"{WORDS.get(report['dataset'], report['dataset'])}; dotted: the bare network"
    say(panels[2], 1, 1.02, said, 8, FAINT, ha="right", va="bottom", transform=panels[2].transAxes)
    return {NAME: figure}
