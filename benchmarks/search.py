"""What a search costs, side by side in one run: the bare model on the same views, headtilt, and the naive way.

    python benchmarks/search.py --json results/benchmark-cpu.json
    python benchmarks/search.py --device cuda --json results/benchmark-gpu.json

Compared variants take turns (A B A B …), so that whatever else the machine does falls on all of them alike; a figure is
the median over the turns with the quartiles beside it, a ratio the median of the ratios within a turn. On a CPU use
OMP_NUM_THREADS to say how many threads. Beside the JSON lies a picture of how the cost grows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headtilt as ht
from headtilt.model.chunking import channels_last
from headtilt.paper import zoo
from headtilt.paper.baselines.reference import ReferenceITS
from headtilt.paper.data import load as load_data
from headtilt.paper.data.perturb import draw, perturb_dataset
from headtilt.paper.experiments.report import metadata
from headtilt.presets import affine_levels
from headtilt.sources.zoo.cnn import SmallCNN

Run = Callable[[], object]
FULL = [ht.rotation(), ht.scale(0.25), ht.shear_x(0.25), ht.rotation(), ht.scale(0.25)]


@dataclass(frozen=True)
class Case:
    """A network and how it is measured.

    Attributes:
        name: What the report calls it.
        model: The network.
        shape: Of one image.
        batch: How many images are searched at once.
        chunks: Views at once from which the bare model takes what is best for it.
        passes: M of the searches with dropout.
        naive_passes: M of the comparison with the naive way.
        naive: Images at once from which the naive way takes what is best for it.
        most_turns: Where every turn takes long.
    """

    name: str
    model: nn.Module
    shape: tuple[int, int, int]
    batch: int
    chunks: tuple[int, ...]
    passes: int
    naive_passes: int
    naive: tuple[int, ...]
    most_turns: int = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results; the picture goes beside them")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="fewer turns and smaller batches")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_of(json.loads(options.peak), options.device))
        return
    turns = 3 if options.quick else 15
    report: dict[str, Any] = {**metadata(" ".join(["python", *sys.argv])), "machine": machine(options.device)}
    notes: list[str] = []
    report["networks"] = {}
    for name, part in (("growth", growth), ("memory", memory), ("labels", labels)):
        tell(name)
        report[name] = part(options.device, options.quick)
    for case in cases(options.device, options.quick, notes):
        tell(f"network {case.name}")
        report["networks"][case.name] = network(case, min(turns, case.most_turns), options.device)
    report["notes"] = notes
    text = json.dumps(report, indent=1)
    if options.json is None:
        print(text)
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(text + "\n", encoding="utf-8")
    from growth import draw_growth

    draw_growth(report, options.json.with_suffix(".png"))


def tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def machine(device: str) -> dict[str, Any]:
    """Return the hardware and the versions."""
    cpu = next(
        (line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "headtilt": ht.__version__,
    }


def cpu_lines() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").splitlines() if info.exists() else []


def cases(device: str, quick: bool, notes: list[str]) -> list[Case]:
    """Return the networks; on a CPU those that are slow are measured on few images and passes."""
    small, large = (zoo.load(name, device=device) for name in ("mnist", "gtsrb"))
    part = 2 if quick else 1
    if device == "cuda":
        found = [
            Case("small CNN", small, (1, 28, 28), 8192 // part, (1024, 4096, 16_384), 50, 50, (16, 64, 256)),
            Case("large CNN", large, (3, 32, 32), 1024 // part, (512, 2048, 8192), 50, 50, (4, 16), 3),
        ]
    else:
        found = [
            Case("small CNN", small, (1, 28, 28), 48 // part, (32, 64, 128, 256, 512, 1024), 50, 50, (1, 4)),
            Case("large CNN", large, (3, 32, 32), 4 // part, (8, 16, 32, 64, 128), 4, 4, (1,), 7),
        ]
    folder = Path(os.environ.get("HEADTILT_DATA", "")) / "mobilenet_v2_imagenet"
    if not folder.is_dir():
        notes.append("MobileNetV2 left out: HEADTILT_DATA names no folder with mobilenet_v2_imagenet in it.")
        return found
    from headtilt.sources import hf

    model = hf.load(str(folder), device=device).model
    if device == "cuda":
        return [*found, Case("MobileNetV2", model, (3, 224, 224), 64, (64, 256), 50, 50, (1, 2), 5)]
    return [*found, Case("MobileNetV2", model, (3, 224, 224), 1, (1, 2, 4, 8), 50, 2, (1,), 3)]


def pictures(count: int, shape: tuple[int, int, int], device: str) -> Tensor:
    """Return tilted digits as images (count, C, H, W): noise leaves but one hypothesis, and few views to pay for."""
    data = load_data("digits", "test")
    images = perturb_dataset(data, draw("affine", len(data), seed=0)).images
    images = images[torch.arange(count) % len(images)]
    return F.interpolate(images, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1).contiguous().to(device)


def clock(runs: dict[str, Run], turns: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each run, `turns` of them, taken in turn after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def ratio(above: list[float], below: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return median and quartiles of the ratios within the turns."""
    return spread([scale * a / b for a, b in zip(above, below, strict=True)])


@torch.no_grad()
def through(model: nn.Module, views: Tensor, count: int) -> None:
    """Run the bare model on `count` views, a chunk at a time."""
    for start in range(0, count, len(views)):
        model(views[: count - start])


def network(case: Case, turns: int, device: str) -> dict[str, Any]:
    """Return what a search costs around one network."""
    images = pictures(case.batch, case.shape, device)
    searches = {
        "M=1": ht.ITS(case.model, **ht.paper3(1)),
        f"M={case.passes}": ht.ITS(case.model, **ht.paper3(case.passes)),
        "accurate": ht.ITS(case.model, **ht.accurate(affine_levels())),
        "fast": ht.ITS(case.model, **ht.fast(affine_levels())),
    }
    if device == "cpu" and case.name != "small CNN":
        del searches["accurate"]
    views = {name: int(robust.search(images).views.sum()) for name, robust in searches.items()}

    sizes = {size: pictures(size, case.shape, device) for size in case.chunks if size <= 2 * views["M=1"]}
    bare: dict[str, Run] = {}
    some = min(views["M=1"], 2 * max(sizes))
    trial: dict[str, Run] = {}
    for size, chunk in sizes.items():
        moved_chunk = channels_last(chunk)
        bare[f"{size}"] = lambda chunk=chunk: through(case.model, chunk, views["M=1"])
        bare[f"{size}, channels last"] = lambda chunk=moved_chunk: through(case.model, chunk, views["M=1"])
        trial[f"{size}"] = lambda chunk=chunk: through(case.model, chunk, some)
        trial[f"{size}, channels last"] = lambda chunk=moved_chunk: through(case.model, chunk, some)
    tried = clock(trial, max(turns // 2, 2), device)
    plain = min((name for name in tried if "last" not in name), key=lambda name: statistics.median(tried[name]))
    moved = min((name for name in tried if "last" in name), key=lambda name: statistics.median(tried[name]))
    runs: dict[str, Run] = {"bare": bare[plain], "bare, channels last": bare[moved]}
    runs |= {name: (lambda robust=robust: robust.search(images)) for name, robust in searches.items()}
    seconds = clock(runs, turns, device)
    per_view = {name: statistics.median(values) / views.get(name, views["M=1"]) for name, values in seconds.items()}
    found: dict[str, Any] = {
        "images": case.batch,
        "shape": case.shape,
        "views_per_image": {name: count / case.batch for name, count in views.items()},
        "bare_best_chunk": {"plain": plain, "channels last": moved},
        "bare_microseconds_per_view": {name: 1e6 * statistics.median(v) / some for name, v in tried.items()},
        "microseconds_per_view": {name: 1e6 * value for name, value in per_view.items()},
        "images_per_second": {name: spread([case.batch / s for s in seconds[name]]) for name in searches},
        "over_bare": {name: ratio(seconds[name], seconds["bare"], views["M=1"] / views[name]) for name in searches},
        "over_bare_channels_last": {
            name: ratio(seconds[name], seconds["bare, channels last"], views["M=1"] / views[name]) for name in searches
        },
        f"M={case.passes}_over_M=1": ratio(seconds[f"M={case.passes}"], seconds["M=1"]),
    }
    found["naive"] = naive(case, images, turns, device)
    return found | ({"new_sizes": new_sizes(case, device)} if device == "cuda" else {})


def new_sizes(case: Case, device: str) -> dict[str, Any]:
    """Return the seconds for views in numbers not met before, by turns to the bare model and through headtilt.

    A GPU's convolutions are planned for every new number; a gate leaves another one after every batch. The few sizes to
    which headtilt fills up may have been met in the searches before, as they have in any job but its first batches.
    """
    predictor = ht.ITS(case.model).predictor
    views = channels_last(pictures(128, case.shape, device))
    predictor.views(views[:1], torch.zeros(1, dtype=torch.long, device=device), torch.eye(3, device=device)[None])
    seconds: dict[str, list[float]] = {"bare": [], "headtilt": []}
    for number in range(66, 128, 4):
        index = torch.arange(number + 2, device=device)
        poses = torch.eye(3, device=device).expand(number + 2, 3, 3)
        for name, run in {
            "bare": lambda: through(case.model, views[:number], number),  # noqa: B023 - called at once
            "headtilt": lambda: predictor.views(views, index, poses),  # noqa: B023
        }.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {"numbers": len(seconds["bare"]), **{f"{name}_seconds": sum(took) for name, took in seconds.items()}}


def naive(case: Case, images: Tensor, turns: int, device: str) -> dict[str, Any]:
    """Return how many times more images a second headtilt searches than the naive way at its own best batch."""
    robust = ht.ITS(case.model, **ht.paper3(case.naive_passes))
    reference = ReferenceITS(case.model, levels=3, samples=17, hypotheses=3, passes=case.naive_passes)
    runs: dict[str, Run] = {"headtilt": lambda: robust.search(images)}
    runs |= {
        f"{size}": (lambda size=size: reference.search(images[:size])) for size in case.naive if size <= len(images)
    }
    seconds = clock(runs, max(turns // 2, 2) if turns > 3 else 1, device)
    rates = {name: [(int(name) if name != "headtilt" else len(images)) / s for s in v] for name, v in seconds.items()}
    best = max((name for name in rates if name != "headtilt"), key=lambda name: statistics.median(rates[name]))
    return {
        "passes": case.naive_passes,
        "naive_batch": int(best),
        "naive_images_per_second": {name: spread(v) for name, v in rates.items() if name != "headtilt"},
        "headtilt_images_per_second": spread(rates["headtilt"]),
        "speedup": ratio(rates["headtilt"], rates[best]),
        "views_per_image": {"headtilt": float(robust.search(images).views.float().mean()), "naive": 3 * 3 * 17},
    }


def growth(device: str, quick: bool) -> dict[str, Any]:
    """Return milliseconds over B, K, L, M and the side of the images, around the small network."""
    model, gpu = zoo.load("mnist", device=device), device == "cuda"
    batch = 256 if gpu else 8
    torch.manual_seed(0)
    images = pictures(4096 if gpu else 64, (1, 28, 28), device)
    base: dict[str, Any] = ht.paper3(1)

    def search(count: int = batch, **more: Any) -> Run:
        robust = ht.ITS(model, **{**base, **more})
        return lambda: robust.search(images[:count])

    def sized(side: int) -> Run:
        robust = ht.ITS(SmallCNN(9, size=side).to(device).eval(), **base)
        larger = pictures(batch, (1, side, side), device)
        return lambda: robust.search(larger)

    axes: dict[str, dict[int, Run]] = {
        "images B": {count: search(count) for count in ((16, 64, 256, 1024, 4096) if gpu else (1, 4, 16, 64))},
        "hypotheses K": {keep: search(search=replace(base["search"], hypotheses=keep)) for keep in (1, 2, 3, 5, 8)},
        "levels L": {depth: search(levels=FULL[:depth]) for depth in (1, 2, 3, 4, 5)},
        "dropout passes M": {passes: search(mc_passes=passes) for passes in (1, 2, 5, 10, 20, 50, 100)},
        "side of the image": {side: sized(side) for side in (28, 40, 56, 80, 112)},
    }
    found: dict[str, Any] = {}
    for axis, runs in axes.items():
        seconds = clock({str(x): run for x, run in runs.items()}, 2 if quick else 5, device)
        found[axis] = {x: spread([1e3 * s for s in values]) for x, values in seconds.items()}
    return {"milliseconds": found, "otherwise": {"B": batch, "K": 3, "L": 3, "M": 1, "side": 28}}


def memory(device: str, quick: bool) -> list[dict[str, Any]]:
    """Return the peak memory of searches in MB, each in a process of its own."""
    many, few = (16_384, 512) if device == "cuda" else (512, 64) if quick else (4096, 64)
    wanted = [
        {"images": few, "chunk": 128, "hypotheses": 3},
        {"images": many // 4, "chunk": 128, "hypotheses": 3},
        {"images": many, "chunk": 128, "hypotheses": 3},
        {"images": few, "chunk": 128, "hypotheses": 9},
        {"images": few, "chunk": 512, "hypotheses": 3},
        {"images": few, "chunk": 2048, "hypotheses": 3},
    ]
    found = []
    for wish in wanted:
        command = [sys.executable, __file__, "--device", device, "--peak", json.dumps(wish)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append({**wish, "peak_mb": float(done.stdout)})
    return found


def peak_of(wish: dict[str, int], device: str) -> float:
    """Return by how many MB asking for the logits of images raises the peak of this process's memory.

    `search` also returns where it looked, which takes its room for every image.
    """
    model = zoo.load("mnist", device=device)
    paper = ht.paper3(1)
    walk = replace(paper["search"], hypotheses=wish["hypotheses"])
    robust = ht.ITS(model, **{**paper, "search": walk, "chunk": wish["chunk"]})
    images = pictures(wish["images"], (1, 28, 28), device)
    robust(images[:2])
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        robust(images)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    return live_peak(lambda: robust(images)) / 2**20


def live_peak(run: Run) -> int:
    """Return the most bytes of tensors alive at once while something runs on the CPU, less those alive before.

    Counted from torch's own allocations: what the system shows also holds what its allocator has not given back.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def labels(device: str, quick: bool) -> dict[str, Any]:
    """Return how the labels agree with those of the plain path: one layout, every pass by itself."""
    # A benchmark downloads nothing.
    if not (Path(os.environ.get("HEADTILT_DATA", "")) / "MNIST").is_dir():
        return {"left out": "HEADTILT_DATA names no folder with MNIST in it."}
    data = load_data("mnist", "test", limit=400 if quick else 2000)
    images = perturb_dataset(data, draw("affine", len(data), seed=0)).images.to(device)
    model = zoo.load("mnist", device=device)
    found: dict[str, Any] = {"images": len(images)}
    for name, options in {"M=1": ht.fast(affine_levels()), "M=5": {"levels": FULL[:1], "mc_passes": 5}}.items():
        plain, same, quickest = (ht.ITS(model, **options) for _ in range(3))
        for predictor in (plain.predictor, same.predictor):
            predictor.layouts[predictor.device_and_dtype(images)] = False
        plain.predictor.batched_passes = False
        wanted, alike, best = (robust.search(images) for robust in (plain, same, quickest))
        found[name] = {
            "same layout, labels alike": float((alike.labels == wanted.labels).float().mean()),
            "same layout, bit-equal": bool(torch.equal(alike.logits, wanted.logits)),
            "as shipped, labels alike": float((best.labels == wanted.labels).float().mean()),
            "as shipped, largest difference of a logit": float((best.logits - wanted.logits).abs().max()),
        }
    return found


if __name__ == "__main__":
    main()
