"""Photographs saved at arbitrary angles, through the real command line: ``headtilt classify FILES --json``.

    headtilt fit $HEADTILT_DATA/imagenet-mini/fit --model hf:FOLDER --levels rotation --out BUNDLE
    python benchmarks/photographs.py --bundle BUNDLE --json results/photographs.json

Each 320 square of imagenet-mini/test is turned by an angle of its own, and its middle 256 are saved as a JPEG: of
these the checkpoint's own preprocessing keeps the middle 224, in which no corner is empty. The bare model sees the same
files, and the same squares upright. Angle errors are counted over the images that the bare model knows upright.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from headtilt.model.device import resolve_device
from headtilt.paper.data.folder import list_images
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.sources import Adapted, onnx
from headtilt.sources import registry as door
from headtilt.sources.images import square_of

KEPT = 256


@dataclass(frozen=True)
class Photograph:
    """A photograph saved twice, and by how much the second was turned clockwise."""

    upright: Path
    tilted: Path
    label: int
    angle: float


def main() -> None:
    options = arguments()
    root = Path(os.environ["HEADTILT_DATA"].split(os.pathsep)[0])
    spec = options.model or f"hf:{root / 'mobilenet_v2_imagenet'}"
    device = resolve_device(options.device)
    adapted = door.load(spec, device=device)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        photographs = turned(root / "imagenet-mini", folder, options.count, options.seed)
        found = measured(adapted, photographs, spec, options.bundle, device)
        if options.onnx:
            found["onnx"] = through_onnx(adapted, photographs, options.bundle, device, folder, found.pop("labels"))
        found.pop("labels", None)
    found |= {"count": len(photographs), "seed": options.seed, "model": adapted.name}
    words = " ".join(["python", "benchmarks/photographs.py", *sys.argv[1:]])
    print(json.dumps(found, indent=1))
    if options.json:
        write_json(options.json, {**found, **metadata(words)})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="what headtilt fit wrote")
    parser.add_argument("--model", help="the MobileNetV2 under HEADTILT_DATA unless another is named")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--onnx", action="store_true", help="also through the model exported to ONNX (onnxruntime)")
    return parser.parse_args()


def turned(data: Path, folder: Path, count: int, seed: int) -> list[Photograph]:
    """Return photographs of as many classes, each saved upright and turned clockwise by an angle of its own."""
    listing = list_images(data, "test")
    draw = random.Random(seed)
    chosen = sorted(draw.sample(range(len(listing.paths)), min(count, len(listing.paths))))
    found = []
    for number, index in enumerate(chosen):
        angle = draw.uniform(-180, 180)
        square = Image.open(listing.paths[index]).convert("RGB")
        paths = [folder / kind / f"{number:04d}.jpg" for kind in ("upright", "tilted")]
        for path, by in zip(paths, (0.0, angle), strict=True):
            path.parent.mkdir(exist_ok=True)
            edge = (square.width - KEPT) // 2
            whole = square.rotate(-by, Image.Resampling.BICUBIC) if by else square
            whole.crop((edge, edge, edge + KEPT, edge + KEPT)).save(path, quality=95)
        found.append(Photograph(*paths, int(listing.labels[index]), angle))
    return found


@torch.no_grad()
def bare(adapted: Adapted, paths: list[Path], device: str) -> list[int]:
    """Return what the model says by itself."""
    squares = torch.stack([square_of(path, adapted) for path in paths])
    return [int(label) for part in squares.split(50) for label in adapted.model(part.to(device)).argmax(1)]


def classified(photographs: list[Photograph], spec: str, bundle: Path, device: str) -> list[dict[str, Any]]:
    """Return the rows of the command line, in the order of the photographs."""
    files = [str(photograph.tilted) for photograph in photographs]
    words = ["classify", *files, "--model", spec, "--bundle", str(bundle), "--json", "--device", device]
    done = subprocess.run([sys.executable, "-m", "headtilt", *words], stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout)
    assert [row["path"] for row in rows] == files
    return rows


def measured(adapted: Adapted, photographs: list[Photograph], spec: str, bundle: Path, device: str) -> dict[str, Any]:
    names, truth = adapted.labels or (), [photograph.label for photograph in photographs]
    upright = bare(adapted, [photograph.upright for photograph in photographs], device)
    alone = bare(adapted, [photograph.tilted for photograph in photographs], device)
    rows = classified(photographs, spec, bundle, device)
    known = [index for index, label in enumerate(upright) if label == truth[index]]
    errors = [off(rows[index]["rotation_deg"], photographs[index].angle) for index in known]
    return {
        "bare_upright": percent(upright[index] == label for index, label in enumerate(truth)),
        "bare_tilted": percent(alone[index] == label for index, label in enumerate(truth)),
        "classify_tilted": percent(rows[index]["label"] == names[label] for index, label in enumerate(truth)),
        "gated": percent(row["gated"] for row in rows),
        "views_per_image": statistics.fmean(row["views"] for row in rows),
        "known_upright": len(known),
        "angle_error_median_deg": statistics.median(errors),
        "angle_error_within_15": percent(error <= 15 for error in errors),
        "labels": [row["label"] for row in rows],
    }


def through_onnx(
    adapted: Adapted, photographs: list[Photograph], bundle: Path, device: str, folder: Path, labels: list[str]
) -> dict[str, Any]:
    """Return how often the same model as an ONNX file gives the same labels."""
    path = folder / "net.onnx"
    onnx.write(path, adapted)
    rows = classified(photographs, f"onnx:{path}", bundle, device)
    same = [row["label"] == label for row, label in zip(rows, labels, strict=True)]
    return {"same_labels": percent(same), "different": len(same) - sum(same)}


def off(found: float, angle: float) -> float:
    """Return by how many degrees two angles differ."""
    return abs((found - angle + 180) % 360 - 180)


def percent(truths: Any) -> float:
    values = [bool(value) for value in truths]
    return 100 * sum(values) / len(values)


if __name__ == "__main__":
    main()
