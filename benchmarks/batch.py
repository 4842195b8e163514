"""Proof and price of batch runs: the same rows from one machine, a killed one, and a cluster that loses parts.

    python benchmarks/batch.py --json results/batch.json

5,000 tilted MNIST digits (scikit-learn's digits where there is no MNIST) as PNG bytes in parquet. An undisturbed run of
the command; one that is killed with SIGKILL at ten random points and resumed; a Ray cluster of two nodes, then with an
actor killed midway, then with a node. All must give the same rows.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
LEVELS = "rotation"  # a search of 17 views: the proof is about rows, and should take minutes


def images(count: int) -> tuple[str, list[bytes]]:
    """Return the name of the data and tilted digits as PNG files."""
    from PIL import Image

    from headtilt.errors import DataError
    from headtilt.paper.data import load
    from headtilt.paper.data.perturb import draw, perturb_dataset

    try:
        name, data = "mnist", load("mnist", "test", limit=count)
    except DataError:
        name, data = "digits", load("digits", "test")
        data = data.subset(torch.arange(count) % len(data))
    tilted = perturb_dataset(data, draw("affine", len(data))).images
    files = []
    for image in tilted:
        buffer = io.BytesIO()
        Image.fromarray((image[0] * 255).round().byte().numpy()).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return name, files


def command(source: Path, out: Path, model: str, shard_rows: int) -> list[str]:
    words = [sys.executable, "-m", "headtilt", "predict", str(source), "--model", model, "--out", str(out)]
    return [*words, "--levels", LEVELS, "--shard-rows", str(shard_rows), "--device", "cpu"]


def timed(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - start


def killed(source: Path, folder: Path, model: str, shard_rows: int, whole: float, times: int) -> list[dict[str, Any]]:
    """Return at which points runs were killed: that many kills met a living process, each run was resumed till its end.

    A run that ends before it can be killed does not count; the next one begins in a folder of its own.
    """
    dice, told, out = random.Random(0), [], folder / "killed-0"
    while len(told) < times:
        words = command(source, out, model, shard_rows)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = dice.uniform(0.1, 0.5) * whole
        with suppress(subprocess.TimeoutExpired):
            process.wait(after)
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            shards = len(list(out.glob("part-*.parquet")))
            told.append({"run": out.name, "after_seconds": after, "shards": shards})
        else:
            out = folder / f"killed-{len(told)}"
    subprocess.run(command(source, out, model, shard_rows), check=True, capture_output=True)
    return told


def rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    found: list[dict[str, Any]] = parquet.read_table(folder).to_pylist()
    return found


def compared(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far two runs agree, row by row."""
    numbers = ("score", "rotation_deg", "scale", "shear")
    pairs = list(zip(found, expected, strict=False))
    return {
        "rows": len(found),
        "distinct_paths": len({row["path"] for row in found}),
        "same_order": [row["path"] for row in found] == [row["path"] for row in expected],
        "same_labels": sum(a["label"] == b["label"] for a, b in pairs),
        "identical": found == expected,
        "largest_difference": max(abs(a[name] - b[name]) for a, b in pairs for name in numbers),
    }


def rates(files: list[bytes], model: str) -> dict[str, float]:
    """Return images per second of decoding alone and of the search alone, on one thread."""
    from headtilt.apps.loading import Wrapped
    from headtilt.sources.images import square_of

    torch.set_num_threads(1)
    robust, adapted = Wrapped(model, levels=LEVELS).load()
    start = time.perf_counter()
    decoded = [square_of(file, adapted) for file in files[:1000]]
    middle = time.perf_counter()
    for at in range(0, len(decoded), 64):
        robust.search(torch.stack(decoded[at : at + 64]))  # type: ignore[arg-type]
    return {
        "decode_images_per_second": len(decoded) / (middle - start),
        "search_images_per_second": len(decoded) / (time.perf_counter() - middle),
    }


def cluster(source: Path, out: Path, model: str, shard_rows: int) -> list[dict[str, Any]]:
    words = [sys.executable, str(HERE / "two_nodes.py"), str(source), str(out), "--model", model, "--levels", LEVELS]
    words += ["--shard-rows", str(shard_rows), "--kill", "none", "actor", "node"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the cluster failed:\n{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(folder: Path, count: int, kills: int, shard_rows: int) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    name, files = images(count)
    model, source = f"zoo:{name}", folder / f"{name}.parquet"
    parquet.write_table(pyarrow.table({"image": files}), source, row_group_size=500)
    report: dict[str, Any] = {"data": name, "images": len(files), "levels": LEVELS, "shard_rows": shard_rows}
    report |= rates(files, model)
    undisturbed = command(source, folder / "local", model, shard_rows)
    report["local_seconds"] = timed(undisturbed)
    report["local_images_per_second"] = len(files) / report["local_seconds"]
    report["nothing_missing_seconds"] = timed(undisturbed)
    expected = rows(folder / "local")
    report["kills"] = killed(source, folder, model, shard_rows, report["local_seconds"], kills)
    resumed = sorted(folder.glob("killed-*"))
    report["after_kills"] = {out.name: compared(rows(out), expected) for out in resumed}
    for run in cluster(source, folder / "ray", model, shard_rows):
        run["images_per_second"] = len(files) / run["seconds"]
        report[f"ray_{run['kill']}"] = run | compared(rows(folder / "ray" / run["kill"]), expected)
    return report


def main() -> None:
    from headtilt.paper.experiments.report import metadata, write_json

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--shard-rows", type=int, default=250)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options.count, options.kills, options.shard_rows)
    report |= metadata("python benchmarks/batch.py " + " ".join(sys.argv[1:]))
    print(json.dumps(report, indent=1))
    if options.json:
        write_json(options.json, report)
    runs = [*report["after_kills"].values(), *(report[f"ray_{kill}"] for kill in ("none", "actor", "node"))]
    whole = all(run["rows"] == run["distinct_paths"] == run["same_labels"] == report["images"] for run in runs)
    sys.exit(0 if whole and all(run["same_order"] for run in runs) else "rows differ")


if __name__ == "__main__":
    main()
