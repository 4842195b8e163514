"""How many views does it take? The even lattice of the joint search against a full grid of 24 × 3 × 3 poses.

    python benchmarks/budget.py --data digits,mnist --limit 1000 --json results/budget.json

Five networks, each with a head fitted on unlabelled upright images and no gate; test images rotated by any angle,
scaled and sheared, each by its own draw. The grid and every lattice ask the same head about the same images and answer
with the sum over their views, so that nothing differs but where they look.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headtilt as ht
from headtilt.calibration.fit_images import HELD_OUT_IMAGES
from headtilt.calibration.head import HeadRecipe
from headtilt.geometry.groups import Group, matrices
from headtilt.model.views import Scored, Views
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.paper.data.perturb import draw, perturb_dataset
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.paper.train import accuracy
from headtilt.presets import affine_levels
from headtilt.search.run import as_it_came
from headtilt.search.seen import is_identity, log_weights

GRID = (24, 3, 3)
BUDGETS = (216, 96, 48, 24, 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--data", default="digits", help="names of data sets with networks, by commas")
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--limit", type=int, default=2000, help="test images")
    parser.add_argument("--fit-images", type=int, default=6000)
    parser.add_argument("--looks", type=int, help="tilts of each image for the head")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "grid": GRID,
        "networks": options.networks,
        "seed": options.seed,
        "datasets": {name: measured(name, options) for name in options.data.split(",")},
    }
    words = " ".join(["python", "benchmarks/budget.py", *sys.argv[1:]])
    write_json(options.json, {**report, **metadata(words)})


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return tilted and upright accuracy of the grid and of every budget, over the networks."""
    data = load(name, "test", limit=options.limit)  # type: ignore[arg-type]
    tilted = perturb_dataset(data, draw("affine", len(data), seed=options.seed)).images
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(options.networks):
        robust = fitted(name, zoo.load(f"{name}:{seed}", device=options.device), options)
        for kind, answer in searches(robust).items():
            right = [accuracy(answer, images, data.labels, options.device) for images in (tilted, data.floats())]
            found.setdefault(kind, []).append((right[0], right[1]))
            print(name, seed, kind, *(f"{value:.2f}" for value in right), flush=True)
    return {"count": len(data), "searches": {kind: summary(pairs) for kind, pairs in found.items()}}


def fitted(name: str, model: nn.Module, options: argparse.Namespace) -> ht.ITS:
    """Return a search with a head and no gate."""
    upright = load(name, "fit", limit=options.fit_images).floats()  # type: ignore[arg-type]
    held_out = load(name, "validation", limit=HELD_OUT_IMAGES).floats()  # type: ignore[arg-type]
    recipe = HeadRecipe(looks=options.looks)
    return ht.ITS(model, **ht.accurate(affine_levels()), seed=options.seed).fit(
        upright, held_out=held_out, promise=None, recipe=recipe, seed=options.seed
    )


def searches(robust: ht.ITS) -> dict[str, Any]:
    """Return what gives the logits for each way to look: the grid, and lattices of several budgets."""
    poses = grid(robust.plan.levels)

    def by_grid(images: Tensor) -> Tensor:
        views = Scored(Views(robust.predictor, images, robust.padding, robust.interpolation), robust.calibrator)
        scores = views.everywhere(len(images), poses.to(images)).reshape(len(images), len(poses)).logits
        first = as_it_came(robust.calibrator, robust.predictor(images)).logits
        scores = torch.where(is_identity(poses).to(images.device)[:, None], first[:, None], scores)
        return (scores + log_weights(poses.to(scores))[:, None]).logsumexp(1)

    def by_lattice(budget: int) -> ht.ITS:
        return robust.but(search=ht.Joint(budget=budget), gate=None)

    names = {f"lattice {budget}": by_lattice(budget) for budget in BUDGETS}
    return {f"grid {len(poses)}": by_grid, **names}


def grid(levels: tuple[Group, ...]) -> Tensor:
    """Return all poses (24·3·3, 3, 3) of the product of the levels' own grids."""
    axes = [group.grid(count) for group, count in zip(levels, GRID, strict=True)]
    return matrices(levels, torch.cartesian_prod(*axes))


def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return mean and spread over networks of (tilted, upright), and what each network had."""
    tilted, upright = zip(*pairs, strict=True)
    return {
        "accuracy": statistics.fmean(tilted),
        "accuracy_std": statistics.stdev(tilted) if len(tilted) > 1 else 0.0,
        "upright_accuracy": statistics.fmean(upright),
        "upright_accuracy_std": statistics.stdev(upright) if len(upright) > 1 else 0.0,
        "per_network": pairs,
    }


if __name__ == "__main__":
    main()
