"""Does the exported search say what Python says? MobileNetV2, rotated photographs, onnxruntime against Python.

    python benchmarks/export.py --json results/export.json

Needs $HEADTILT_DATA with mobilenet_v2_imagenet and imagenet-mini.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import headtilt as ht
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.sources import Adapted
from headtilt.sources import registry as door
from headtilt.sources.images import find, prepare, read

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--fit", type=int, default=48)
    parser.add_argument("--budget", type=int, default=24)
    arguments = parser.parse_args()
    data = Path(os.environ["HEADTILT_DATA"])
    adapted = door.load(f"hf:{data / 'mobilenet_v2_imagenet'}")
    robust = ht.ITS(
        adapted.model, search=ht.Joint(budget=arguments.budget), readout="marginal", padding=adapted.padding
    )
    robust.fit(photographs(data / "imagenet-mini/fit", arguments.fit, adapted), method="balance", promise=None)
    tilted = rotated(photographs(data / "imagenet-mini/test", arguments.images, adapted))
    started = time.perf_counter()
    result = robust.search(tilted)
    in_python = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "robust.onnx"
        started = time.perf_counter()
        robust.export(path, labels=adapted.labels)
        exporting = time.perf_counter() - started
        megabytes = path.stat().st_size / 2**20
        logits, pose, in_onnxruntime = run(path, tilted)
    report = {
        "model": "mobilenet_v2_imagenet",
        "images": len(tilted),
        "views_per_image": arguments.budget,
        "labels_equal_percent": 100 * float((logits.argmax(1) == result.labels.numpy()).mean()),
        "largest_logit_difference": float(np.abs(logits - result.logits.numpy()).max()),
        "poses_equal_percent": 100 * float((np.abs(pose - result.pose.numpy()).max((1, 2)) < 1e-4).mean()),
        "seconds": {"export": exporting, "python": in_python, "onnxruntime": in_onnxruntime},
        "megabytes": megabytes,
        **metadata("python benchmarks/export.py --json results/export.json"),
    }
    write_json(arguments.json, report)
    print(json.dumps(report, indent=1))


def photographs(folder: Path, count: int, adapted: Adapted) -> Tensor:
    """Return `count` photographs (count, 3, H, W), evenly over the sorted files of a folder."""
    files = find([folder])
    chosen = [files[round(place)] for place in np.linspace(0, len(files) - 1, count)]
    return torch.stack([prepare(read(file), adapted) for file in chosen])


def rotated(images: Tensor) -> Tensor:
    angles = (torch.rand(len(images), generator=torch.Generator().manual_seed(0)) * 2 - 1) * torch.pi
    return ht.warp(images, ht.rotation().matrix(angles), padding="reflection")


def run(path: Path, images: Tensor) -> tuple[np.ndarray, np.ndarray, float]:
    """Return logits, poses and seconds of onnxruntime, in small batches: a batch holds all of its views at once."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    started = time.perf_counter()
    parts = [session.run(["logits", "pose"], {"images": part.numpy()}) for part in images.split(BATCH)]
    seconds = time.perf_counter() - started
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), seconds


if __name__ == "__main__":
    main()
