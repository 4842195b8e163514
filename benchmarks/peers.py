"""Beside what one would write or install instead: ``python -m benchmarks.peers`` compares accuracy and speed.

All methods see the same networks and the same images, turned by any angle. They take turns, so that whatever else the
machine does falls on all of them alike; images per second are the median over the turns and the networks. Needs ttach.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.calibration.head import HeadRecipe
from headtilt.geometry.groups import rotation
from headtilt.paper import zoo
from headtilt.paper.baselines.reference import ReferenceITS
from headtilt.paper.data import load
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.perturb import TestSet, draw, draw_quarters, perturb_dataset, schedule, turn_dataset
from headtilt.paper.experiments.methods import Predict, Prediction, Setting, ask, build
from headtilt.paper.experiments.names import NAMES
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.paper.experiments.reproduce.trial import WORDS
from headtilt.plot.style import BLUE, FAINT, INK, VERMILION, new_figure, save, style_axes

TURNS = 3
LOOP_VIEWS = 36
BATCH = 100
# What a peer is called; the first four and the last are others' ways, in the order of the table.
PEERS = {
    "bare": NAMES["vanilla"],
    "ttach": "ttach, quarter turns",
    "loop": f"a loop over {LOOP_VIEWS} rotations",
    "public": f"{NAMES['paper3']}, public code",
    "unfitted": NAMES["default"],
    "fast": NAMES["fast+gate"],
    "accurate": NAMES["accurate+gate"],
    "oracle": NAMES["oracle"],
}
OURS = ("unfitted", "fast", "accurate")
ABOVE, BELOW, LEFT, RIGHT = ("center", (0, 8)), ("center", (0, -16)), ("right", (-8, -3)), ("left", (8, -3))
# Where a peer's name stands, so that no two meet.
PLACES = {
    "bare": BELOW,
    "ttach": ABOVE,
    "loop": BELOW,
    "public": ("left", (-5, 8)),
    "unfitted": ABOVE,
    "fast": RIGHT,
    "accurate": LEFT,
    "oracle": ABOVE,
}


def plain_loop(model: nn.Module) -> Predict:
    """Return what people write first: turn the images, ask the model, take the mean of its probabilities."""

    def predict(images: Tensor) -> Prediction:
        total = None
        for angle in torch.arange(LOOP_VIEWS) * (360 / LOOP_VIEWS):
            turn = rotation().matrix(angle.deg2rad())[:2].to(images).expand(len(images), -1, -1)
            grid = F.affine_grid(turn, list(images.shape), align_corners=False)
            said = model(F.grid_sample(images, grid, align_corners=False)).softmax(1)
            total = said if total is None else total + said
        return Prediction(total.argmax(1), None, LOOP_VIEWS)  # type: ignore[union-attr]

    return predict


def ttach_wrapper(model: nn.Module) -> Predict:
    """Return ttach's wrapper with the rotations that it has."""
    import ttach

    wrapped = ttach.ClassificationTTAWrapper(
        nn.Sequential(model, nn.Softmax(1)), ttach.Compose([ttach.Rotate90([0, 90, 180, 270])]), merge_mode="mean"
    )
    return lambda images: Prediction(wrapped(images).argmax(1), None, 4)


def public_code(model: nn.Module) -> Predict:
    """Return the search as the paper's public code does it, with one dropout pass."""
    search = ReferenceITS(model, passes=1)
    each = search.samples + 2
    return lambda images: Prediction(search.search(images).labels, None, each * (1 + 2 * search.hypotheses))


def methods(model: nn.Module, setting: Setting) -> Iterator[tuple[str, Predict]]:
    """Yield the peers of one network, fitted where they need it."""
    yield "bare", build("vanilla", setting)
    yield "ttach", ttach_wrapper(model)
    yield "loop", plain_loop(model)
    yield "public", public_code(model)
    yield "unfitted", build("default", setting)
    yield "fast", build("fast+gate", setting)
    yield "accurate", build("accurate+gate", setting)
    yield "oracle", build("oracle", setting)


def tests_of(data: Dataset, seed: int) -> dict[str, TestSet]:
    """Return the images turned by any angle, by exact quarters, and upright."""
    count = len(data)
    return {
        "tilted": perturb_dataset(data, draw("rotation", count, seed=seed)),
        "quarter": turn_dataset(data, draw_quarters(count, seed)),
        "upright": turn_dataset(data, torch.zeros(count, dtype=torch.long)),
    }


@torch.no_grad()
def asked(predict: Predict, test: TestSet, device: str) -> tuple[float, float, float]:
    """Return accuracy in per cent, views per image, and seconds."""
    right, views, spent = 0, 0.0, 0.0
    for rows in torch.arange(len(test)).split(BATCH):
        images, transforms = test.images[rows].to(device), test.transforms[rows].to(device)
        spent -= _now(device)
        said = ask(predict, images, transforms)
        spent += _now(device)
        right += int((said.labels.cpu() == test.labels[rows]).sum())
        views += said.views * len(rows)
    return 100 * right / len(test), views / len(test), spent


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(name: str, number: int, args: argparse.Namespace, tell: Callable[[str], object]) -> dict[str, Any]:
    """Return what every peer makes of one network."""
    model = zoo.load(f"{name}:{number}", device=args.device)
    fit = load(name, "fit", limit=args.fit_images).floats()
    setting = Setting(model, schedule("rotation").searched, lambda: fit, seed=number, recipe=HeadRecipe())
    peers = dict(methods(model, setting))
    tests = tests_of(load(name, "test", limit=args.limit), seed=number)
    found: dict[str, dict[str, Any]] = {peer: {"seconds": []} for peer in peers}
    for turn in range(TURNS):
        for peer, predict in peers.items():
            tell(f"{name}:{number}, turn {turn + 1} of {TURNS}: {PEERS[peer]}")
            accuracy, views, spent = asked(predict, tests["tilted"], args.device)
            found[peer]["seconds"].append(spent / len(tests["tilted"]))
            found[peer] |= {"tilted": accuracy, "views": views}
    for peer, predict in peers.items():
        for condition in ("quarter", "upright"):
            found[peer][condition], found[peer][f"views_{condition}"], _ = asked(predict, tests[condition], args.device)
    return found


def summary(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and spread over networks of what every peer reached."""
    rows = {}
    for peer, words in PEERS.items():
        mine = [one[peer] for one in each]
        row: dict[str, Any] = {"words": words}
        for key in ("tilted", "quarter", "upright", "views", "views_upright"):
            values = [one[key] for one in mine]
            row[key] = statistics.mean(values)
            row[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        row["images_per_second"] = statistics.median(1 / spent for one in mine for spent in one["seconds"])
        rows[peer] = row
    return rows


def picture(sets: dict[str, dict[str, Any]]) -> Any:
    """Return accuracy on turned images against images per second, a panel for each data set."""
    figure = new_figure(5.2 * len(sets), 3.9)
    panels = figure.subplots(1, len(sets), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, sets.items(), strict=True):
        for peer, row in rows.items():
            colour = VERMILION if peer in OURS else FAINT if peer == "oracle" else BLUE
            axes.plot(row["images_per_second"], row["tilted"], "o", ms=7, color=colour, zorder=3)
            side, shift = PLACES[peer]
            where = (row["images_per_second"], row["tilted"])
            axes.annotate(
                PEERS[peer], where, xytext=shift, textcoords="offset points", ha=side, fontsize=7.5, color=INK
            )
        style_axes(axes, title=f"{WORDS.get(name, name)}: right labels of turned images, %", grid="both")
        axes.set_xscale("log")
        axes.set_xlabel("images per second", fontsize=9, color=INK)
        axes.margins(0.22, 0.14)
    return figure


def main() -> None:
    """Measure, and store the figures and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits,fashion-mnist", help="data sets of the zoo, divided by commas")
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--limit", type=int, default=500, help="test images")
    parser.add_argument("--fit-images", type=int, default=300)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("results/peers.json"))
    parser.add_argument("--draw", action="store_true", help="draw what is stored anew, and measure nothing")
    args = parser.parse_args()
    if args.draw:
        save(picture(json.loads(args.out.read_text(encoding="utf-8"))["sets"]), args.out.with_suffix(".png"))
        return
    sets = {}
    for name in args.data.split(","):
        each = [
            measured(name, number, args, lambda said: sys.stderr.write(f"{said}\n")) for number in range(args.networks)
        ]
        sets[name] = summary(each)
        for row in sets[name].values():
            sys.stdout.write(
                f"{name:<14}{row['words']:<36}{row['tilted']:>6.1f} {row['quarter']:>6.1f} {row['upright']:>6.1f}"
                f"{row['views']:>7.1f}{row['images_per_second']:>10.0f}\n"
            )
    command = f"python -m benchmarks.peers --data {args.data} --networks {args.networks} --limit {args.limit}"
    command += f" --fit-images {args.fit_images} --device {args.device}"
    found = {
        "networks": args.networks,
        "count": args.limit,
        "fit_images": args.fit_images,
        "turns": TURNS,
        "sets": sets,
    }
    write_json(args.out, {**found, **metadata(command)})
    save(picture(sets), args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
