"""What a photograph costs on one core: bytes, decoding, and views of a real network.

python benchmarks/photos.py FOLDER --model hf:CHECKPOINT --json results/photos.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch


def main() -> None:
    from headtilt.apps.loading import Wrapped
    from headtilt.paper.experiments.report import metadata, write_json
    from headtilt.sources.images import find, square_of

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--searched", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    robust, adapted = Wrapped(options.model).load()
    paths = find([options.folder])[: options.count]
    start = time.perf_counter()
    images = [square_of(path, adapted) for path in paths]
    decoded = time.perf_counter() - start
    some = torch.stack([image for image in images if isinstance(image, torch.Tensor)][: options.searched])
    robust.search(some[:2])
    start = time.perf_counter()
    views = int(robust.search(some).views.sum())
    searched = time.perf_counter() - start
    report = {
        "images": len(paths),
        "mean_bytes": sum(path.stat().st_size for path in paths) / len(paths),
        "decode_images_per_second": len(paths) / decoded,
        "views_per_image": views / len(some),
        "views_per_second": views / searched,
        "search_images_per_second": len(some) / searched,
        "model": adapted.name,
    }
    model = f"{options.model.partition(':')[0]}:{adapted.name}"  # not where it lies on this machine
    counts = f"--count {options.count} --searched {options.searched}"
    report |= metadata(f"python benchmarks/photos.py imagenet-mini --model {model} {counts} --json results/photos.json")
    print(json.dumps(report, indent=1))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
