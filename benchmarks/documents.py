"""How often is a page or photograph that lies on a side turned back? Quarter turns, head fitted on upright images.

    python benchmarks/documents.py --json results/documents.json --device cuda

Needs $HEADTILT_DATA with mobilenet_v2_imagenet and imagenet-mini; --data digits needs neither.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from headtilt.paper.data import load
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.sources import registry as door
from headtilt.sources.images import find, prepare, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--data", choices=("photographs", "digits"), default="photographs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=None, help="images to fit on, and to test on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make = photographs if arguments.data == "photographs" else digits
    model, upright, images, labels, padding = make(arguments.device, arguments.limit)
    quarters = torch.randint(0, 4, (len(images),), generator=torch.Generator().manual_seed(arguments.seed))
    pairs = zip(images, quarters.tolist(), strict=True)
    turned = torch.stack([torch.rot90(image, -turn, (-2, -1)) for image, turn in pairs])
    report: dict[str, Any] = {
        "data": arguments.data,
        "fit_images": len(upright),
        "test_images": len(images),
        "device": arguments.device,
        "seed": arguments.seed,
        "methods": {},
    }
    methods: dict[str, dict[str, Any]] = {
        "balance": {"method": "balance"},
        "head": {},
        "head, not asked for the pose": {"recipe": HeadRecipe(pose=0.0)},
        "head+gate": {"promise": 1.0},
        "head+gate, half a point": {"promise": 0.5},
    }
    for name, options in methods.items():
        robust = ht.ITS(model, **ht.documents(), padding=padding)
        started = time.perf_counter()
        robust.fit(upright, **{"promise": None, **options})
        report["methods"][name] = {
            "fit_seconds": time.perf_counter() - started,
            **measured(robust, turned, quarters, labels, "turned"),
            **measured(robust, images, torch.zeros_like(quarters), labels, "upright"),
        }
        print(name, json.dumps(report["methods"][name]), flush=True)
    write_json(arguments.json, {**report, **metadata(" ".join(["python", "benchmarks/documents.py", *sys.argv[1:]]))})


def measured(robust: ht.ITS, images: Tensor, quarters: Tensor, labels: Tensor, name: str) -> dict[str, float]:
    """Return accuracy, and how often the turn was found, over all images and over those the bare model knows."""
    results = [robust.search(part) for part in images.split(250)]
    found = torch.cat([result.quarters for result in results]).cpu()
    right = torch.cat([result.labels for result in results]).cpu() == labels
    bare = torch.cat([result.bare.argmax(1) for result in results]).cpu() == labels
    exact = (found + quarters) % 4 == 0
    return {
        f"{name}_turn_percent": 100 * float(exact.float().mean()),
        f"{name}_turn_percent_where_label_right": 100 * float(exact[right].float().mean()),
        f"{name}_accuracy": 100 * float(right.float().mean()),
        f"{name}_bare_accuracy": 100 * float(bare.float().mean()),
    }


def photographs(device: str, limit: int | None) -> tuple[nn.Module, Tensor, Tensor, Tensor, str]:
    data = Path(os.environ["HEADTILT_DATA"])
    adapted = door.load(f"hf:{data / 'mobilenet_v2_imagenet'}", device=device)
    classes = {folder.name: index for index, folder in enumerate(sorted((data / "imagenet-mini/test").iterdir()))}
    files = {split: find([data / "imagenet-mini" / split]) for split in ("fit", "test")}
    if limit is not None:
        files = {split: paths[:: max(len(paths) // limit, 1)][:limit] for split, paths in files.items()}
    upright, images = (torch.stack([prepare(read(path), adapted) for path in files[split]]) for split in files)
    labels = torch.tensor([classes[path.parent.name] for path in files["test"]])
    return adapted.model, upright, images, labels, "reflection"


def digits(device: str, limit: int | None) -> tuple[nn.Module, Tensor, Tensor, Tensor, str]:
    test = load("digits", "test", limit=limit)
    model = door.load("zoo:digits:0", device=device).model
    return model, load("digits", "fit", limit=limit).floats(), test.floats(), test.labels, "auto"


if __name__ == "__main__":
    main()
