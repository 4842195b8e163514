"""Is the promise kept, and how many fit images does a fit need? Many small fits, measured on test images.

``python -m benchmarks.promise`` fits on 100, 300 and 1,000 images of several sets, for several networks and promises,
and writes ``results/promise.json`` and its picture after each fit. Every fit has other images and other seeds. A run
that was stopped goes on where it was, if nothing was committed meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import shlex
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtilt import ITS, accurate
from headtilt.cli.app import progress
from headtilt.model.device import resolve_device
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.paper.data.perturb import draw, draw_quarters, perturb_dataset, schedule, turn_dataset
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.plot.style import FAINT, INK, PALETTE, VERMILION, new_figure, save, style_axes

DATASETS, SIZES, PROMISES = ("mnist", "fashion-mnist", "cifar10"), (100, 300, 1000), (0.0, 0.5, 1.0)
ACCURACIES = ("accuracy", "quarter_accuracy", "upright_accuracy")
TEST = 2000
SURE = 1.645  # standard errors: a loss above the promise by more is chance in one case of twenty


@dataclass(frozen=True)
class Case:
    """One fit: which network, on how many images, under which promise."""

    dataset: str
    network: int
    images: int
    promise: float
    device: str

    @property
    def seed(self) -> int:
        """Seed of the choice of images and of the fit: another for every fit."""
        return 1000 * self.images + 100 * self.network + round(10 * self.promise)


def measured(case: Case) -> dict[str, Any]:
    """Return what a fit cost upright test images, and what it gained on tilted ones, in points."""
    model = zoo.load(f"{case.dataset}:{case.network}", device=case.device)
    chosen = load(case.dataset, "fit", limit=case.images, seed=case.seed)  # type: ignore[arg-type]
    robust = ITS(model, **accurate(schedule("affine").searched))
    robust.fit(chosen.floats(), promise=case.promise, seed=case.seed, progress=False)
    test = load(case.dataset, "test", limit=TEST)
    count = len(test)
    still = turn_dataset(test, torch.zeros(count, dtype=torch.long)).images
    bare, gated = (_right(one, still, test.labels, case.device) for one in (model, robust))
    lost = bare.double() - gated.double()
    tilted = perturb_dataset(test, draw("affine", count, seed=0)).images
    quarter = turn_dataset(test, draw_quarters(count, 0)).images
    return {
        **asdict(case),
        "seed": case.seed,
        "loss": 100 * float(lost.mean()),
        "standard_error": 100 * float(lost.std()) / math.sqrt(count),
        "upright_accuracy": 100 * float(gated.double().mean()),
        "accuracy": 100 * float(_right(robust, tilted, test.labels, case.device).double().mean()),
        "quarter_accuracy": 100 * float(_right(robust, quarter, test.labels, case.device).double().mean()),
        "gate": robust.report["gate"],
    }


@torch.no_grad()
def _right(model: Any, images: Tensor, labels: Tensor, device: str) -> Tensor:
    said = [model(images[rows].to(device)).argmax(1).cpu() for rows in torch.arange(len(images)).split(500)]
    return torch.cat(said) == labels


def over(case: dict[str, Any]) -> bool:
    """Return whether a fit lost more than was promised, by more than chance explains."""
    return bool(case["loss"] - case["promise"] > SURE * case["standard_error"] + 1e-9)


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return mean loss, worst loss and fits over the promise, for each promise; and accuracy by number of images."""
    promises = {}
    for promise in sorted({case["promise"] for case in cases}):
        some = [case for case in cases if case["promise"] == promise]
        promises[str(promise)] = {
            "fits": len(some),
            "mean_loss": statistics.fmean(case["loss"] for case in some),
            "worst_loss": max(case["loss"] for case in some),
            "over_by_more_than_chance": sum(map(over, some)),
        }
    accuracy: dict[str, dict[str, dict[str, float]]] = {}
    for dataset, images in dict.fromkeys((case["dataset"], case["images"]) for case in cases):
        some = [c for c in cases if (c["dataset"], c["images"], c["promise"]) == (dataset, images, 0.5)]
        if some:
            row = {name: statistics.fmean(case[name] for case in some) for name in ACCURACIES}
            row["accuracy_std"] = statistics.stdev(case["accuracy"] for case in some) if len(some) > 1 else 0.0
            accuracy.setdefault(dataset, {})[str(images)] = row
    return {"promises": promises, "accuracy": accuracy}


def draw_losses(report: dict[str, Any], path: Path) -> Path:
    """Write the picture: every fit a dot, its loss against the number of fit images, one panel for each promise."""
    cases = report["fits"]
    promises = sorted({case["promise"] for case in cases})
    datasets = list(dict.fromkeys(case["dataset"] for case in cases))
    sizes = sorted({case["images"] for case in cases})
    figure = new_figure(3.4 * len(promises) + 0.6, 3.6)
    panels = figure.subplots(1, len(promises), sharey=True, squeeze=False)[0]
    for panel, promise in zip(panels, promises, strict=True):
        for (place, dataset), colour in zip(enumerate(datasets), PALETTE, strict=False):
            some = [c for c in cases if c["promise"] == promise and c["dataset"] == dataset]
            spread = [sizes.index(c["images"]) + 0.22 * (place - (len(datasets) - 1) / 2) for c in some]
            panel.scatter(spread, [c["loss"] for c in some], s=22, color=colour, alpha=0.8, lw=0, label=dataset)
        panel.axhline(promise, color=VERMILION, lw=1.2, ls="--")
        panel.axhline(0, color=FAINT, lw=0.8)
        ylabel = "points lost upright" if panel is panels[0] else ""
        style_axes(panel, title=f"promise {promise:g}", xlabel="fit images", ylabel=ylabel, grid="y")
        panel.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    panels[0].legend(fontsize=8, frameon=False, labelcolor=INK, loc="upper left")  # where next to nothing is lost
    return save(figure, path)


def before(path: Path, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fits that a stopped run of the same command and commit left in a file."""
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    same = all(report.get(name) == told[name] for name in ("command", "commit"))
    return report["fits"] if same else []


def main() -> None:
    """Run the study and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", default=DATASETS)
    parser.add_argument("--images", nargs="+", type=int, default=SIZES)
    parser.add_argument("--promise", nargs="+", type=float, default=PROMISES)
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/promise.json"))
    given = parser.parse_args()
    device = resolve_device(given.device)
    cases = [
        Case(dataset, network, images, promise, device)
        for images, dataset, network, promise in itertools.product(
            given.images, given.dataset, range(given.networks), given.promise
        )
    ]
    told = metadata(shlex.join(["python", "-m", "benchmarks.promise", *sys.argv[1:]]))
    found = before(given.out, told)
    known = {tuple(one[part.name] for part in fields(Case)) for one in found}
    left = [case for case in cases if astuple(case) not in known]
    with (
        progress() as tell,
        ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        for number, case in enumerate(pool.map(measured, left), start=1 + len(cases) - len(left)):
            found.append(case)
            report = {**summary(found), "test_images": TEST, "fits": found, **told}
            write_json(given.out, report)
            draw_losses(report, given.out.with_suffix(".png"))
            tell(f"{case['dataset']}:{case['network']}, {case['images']} images", number, len(cases))


if __name__ == "__main__":
    main()
