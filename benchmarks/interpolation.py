"""How sharp must views be? ``python -m benchmarks.interpolation`` tells bare models the true pose, and resamples by it.

Images that no network was trained on are tilted, softly (bilinear) or sharply (bicubic), and turned back by the true
pose with either kind of interpolation. No search takes part: what differs is what resampling costs the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.geometry.groups import Group, matrices, rotation
from headtilt.geometry.warp import Interpolation, around, centre_crop, invert, warp
from headtilt.model.predictor import Predictor
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.presets import affine_levels
from headtilt.search.lattice import spread
from headtilt.sources import registry

KINDS: tuple[Interpolation, ...] = ("bilinear", "bicubic")
NETWORKS = {"digits": 5, "mnist": 5, "fashion-mnist": 5, "gtsrb": 5, "cifar10": 3}
OUT = Path("results/interpolation.json")


@torch.no_grad()
def told(model: nn.Module, images: Tensor, labels: Tensor, levels: list[Group], crop: int | None) -> dict[str, Any]:
    """Return the accuracy of a model told the true pose, in per cent, by how tilts are made and how they are undone."""
    predictor = Predictor(model)

    def accuracy(seen: Tensor) -> float:
        return 100 * float((predictor(seen).labels == labels).float().mean())

    draws = torch.rand(len(images), len(levels), generator=torch.Generator().manual_seed(7))
    poses = matrices(levels, torch.stack([spread(group, draws[:, place]) for place, group in enumerate(levels)], -1))
    share = 1.0 if crop is None else crop / max(images.shape[-2:])
    found: dict[str, Any] = {"upright": accuracy(centre_crop(images, crop))}
    for made in KINDS:
        tilted = centre_crop(warp(images, around(invert(poses), share), padding="auto", interpolation=made), crop)
        found[f"made_{made}"] = {
            f"undone_{kind}": accuracy(warp(tilted, poses, padding="auto", interpolation=kind)) for kind in KINDS
        }
    return found


def summary(values: list[Any]) -> Any:
    """Return mean and spread over networks, however deep the numbers lie."""
    if isinstance(values[0], dict):
        return {key: summary([value[key] for value in values]) for key in values[0]}
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else 0.0}


def main() -> None:
    """Measure, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1000, help="validation images of each set")
    parser.add_argument("--photographs", nargs="*", default=[], help="models of photographs, such as hf:FOLDER")
    parser.add_argument("--photograph-limit", type=int, default=500, help="photographs, of those that one may fit on")
    asked = parser.parse_args()
    sets = {}
    for name, networks in NETWORKS.items():
        data = load(name, "validation", limit=asked.limit)
        models = [zoo.load(f"{name}:{number}") for number in range(networks)]
        sets[name] = summary([told(model, data.floats(), data.labels, affine_levels(), None) for model in models])
        sys.stderr.write(f"{name}: {sets[name]}\n")
    for spec in asked.photographs:
        adapted = registry.load(spec)
        data = load("imagenet-mini", "fit", limit=asked.photograph_limit)
        name = Path(spec.partition(":")[2]).name
        sets[name] = summary([told(adapted.model, data.floats(), data.labels, [rotation()], adapted.size)])
        sys.stderr.write(f"{name}: {sets[name]}\n")
    words = " ".join(f"hf:data/{Path(spec.partition(':')[2]).name}" for spec in asked.photographs)
    command = f"python -m benchmarks.interpolation --limit {asked.limit}"
    if words:
        command += f" --photographs {words} --photograph-limit {asked.photograph_limit}"
    counts = {"count": asked.limit, "photographs": asked.photograph_limit, "networks": NETWORKS}
    write_json(OUT, {**counts, "sets": sets, **metadata(command)})


if __name__ == "__main__":
    main()
