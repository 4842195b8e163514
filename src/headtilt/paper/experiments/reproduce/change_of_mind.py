"""Figure "hypotheses": how H₀ and H₁ fare over a grid of rotation and shear, after each level of a two-level tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headtilt.geometry.groups import rotation, shear_x
from headtilt.geometry.warp import invert
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, draw_images, network, our_tree, share, tilt
from headtilt.search.found import LevelTrace
from headtilt.search.tree import count_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "change-of-mind"
TITLE = "Evolution of two hypotheses over rotation and shear"
DATASETS = ("fashion-mnist",)
MAPS = {
    "distance_1": "(a) distance, level 1",
    "accuracy_1": "(b) accuracy, level 1",
    "distance_2": "(c) distance, level 2",
    "accuracy_2": "(d) accuracy, level 2",
    "confidence_2": "(e) confidence, level 2",
    "support_2": "(f) class support, level 2",
}
PAPER: dict[str, Any] = {
    "claims": [
        "from level 1 to level 2 the leading hypothesis is superseded in some regions of the grid",
        "class support, by which the paper decides when to swap, has only minor advantages over confidence",
    ]
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        networks: Trained networks; their images are pooled.
        images: Test images at each point of the grid, per network.
        angles: Points along rotation, from −180° to 180°.
        shears: Points along shear, from −1/4 to 1/4.
        passes: Monte-Carlo passes.
    """

    networks: int
    images: int
    angles: int
    shears: int
    passes: int = 10


FULL = Size(networks=5, images=400, angles=25, shears=9)
QUICK = Size(networks=1, images=24, angles=9, shears=5)


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return the six maps (shear × rotation), positive where H₀ is superior, and the accuracy of each way to choose."""
    datasets, left_out = study.available(DATASETS)
    angles = torch.linspace(-180, 180, size.angles).tolist()
    shears = torch.linspace(-0.25, 0.25, size.shears).tolist()
    jobs = {
        (f"shear {shear:+.3f}", f"network {seed}"): partial(line, study, size, datasets[0], seed, shear, angles)
        for shear in shears
        for seed in range(size.networks)
    }
    found = store.within(datasets[0]).gather(jobs)
    points = [
        [
            pooled([found[f"shear {shear:+.3f}", f"network {seed}"][column] for seed in range(size.networks)])
            for column in range(size.angles)
        ]
        for shear in shears
    ]
    maps = cross_normalised(points)
    rules = ("h0", "h1", "confidence", "support", "energy", "either")
    every = [point for row in points for point in row]
    rule_accuracy = {rule: sum(point["rules"][rule] for point in every) / len(every) for rule in rules}
    return {
        "dataset": datasets[0],
        "left_out": left_out,
        "images_per_point": size.images * size.networks,
        "seeds": list(range(size.networks)),
        "angles": angles,
        "shears": shears,
        "notes": [
            "Maps are positive where H₀ is superior; distances enter as d̄(H₁) − d̄(H₀), cross-normalised per point, "
            "counts of right answers, of greater confidence and of greater support over the whole grid.",
            "rule_accuracy: final accuracy if H₀ always answers, or H₁, or whichever has more confidence, support or "
            "less energy; either: at least one of the two is right.",
        ],
        "results": {"maps": maps, "rule_accuracy": rule_accuracy, "points": points},
        "verdict": verdict(maps, rule_accuracy),
    }


def line(study: Study, size: Size, dataset: str, seed: int, shear: float, angles: list[float]) -> list[dict[str, Any]]:
    """Return what happens to both hypotheses at each angle, with one shear for all images."""
    robust = our_tree(
        network(study, dataset, seed),
        [rotation(), shear_x(0.25)],
        hypotheses=2,
        mc_passes=size.passes,
        seed=seed,
    )
    data = draw_images(study, dataset, size.images, seed=seed)
    slant = shear_x(0.25).matrix(torch.tensor(shear))
    found = []
    for angle in angles:
        truth = rotation().matrix(torch.tensor(angle).deg2rad()) @ slant
        test = tilt(data, truth.expand(len(data), 3, 3), study.device)
        result = robust.search(test.images)
        first, second = cast(tuple[LevelTrace, ...], result.trace)
        found.append(compare(first, second, test.labels, truth.to(study.device), result.logits.shape[-1]))
    return found


def compare(first: LevelTrace, second: LevelTrace, labels: Tensor, truth: Tensor, classes: int) -> dict[str, Any]:
    """Return distances, right answers, confidence and support of H₀ and H₁ after both levels.

    H₀ and H₁ are the trajectories that lead after level 1. In level 2 each takes its best view; H₁ one whose label is
    not H₀'s, as the search wants it, where there is one.
    """
    both = second.active.all(1)  # where only one label turns up along the first orbit there is no H₁
    rows = torch.arange(len(labels), device=labels.device)
    at = first.chosen.clamp_min(0)
    label_1 = first.labels.flatten(1).gather(1, at)
    best = second.confidence[:, 0].argmax(1)
    lead = second.labels[rows, 0, best]
    rival = second.confidence[:, 1].masked_fill(second.labels[:, 1] == lead[:, None], float("-inf")).argmax(1)
    chosen = torch.stack([best, rival], dim=1)
    label_2 = second.labels.gather(2, chosen[..., None])[..., 0]
    poses = second.poses()[rows[:, None], torch.arange(2, device=rows.device), chosen]
    confidence = second.confidence.gather(2, chosen[..., None])[..., 0]
    energy = second.energy.gather(2, chosen[..., None])[..., 0]
    seen = count_labels(first.labels, classes) + count_labels(second.labels, classes, second.active)
    support = seen.gather(1, label_2)
    right = label_2 == labels[:, None]

    def picked(swap: Tensor) -> float:
        return share(torch.where(swap & both, right[:, 1], right[:, 0]))

    return {
        "images": int(both.sum()),
        "distance_1": distances(second.parents[both], truth),
        "distance_2": distances(poses[both], truth),
        "right_1": (label_1 == labels[:, None])[both].sum(0).tolist(),
        "right_2": right[both].sum(0).tolist(),
        "confidence_2": wins(confidence[both]),
        "support_2": wins(support[both]),
        "rules": {
            "h0": share(right[:, 0]),
            "h1": picked(both),
            "confidence": picked(confidence[:, 1] > confidence[:, 0]),
            "support": picked(support[:, 1] > support[:, 0]),
            "energy": picked(energy[:, 1] < energy[:, 0]),
            "either": picked(~right[:, 0]),
        },
    }


def distances(poses: Tensor, truth: Tensor) -> list[float]:
    """Return the mean cross-normalised distance of H₀ and of H₁ to the true transform; poses (n, 2, 3, 3)."""
    if not len(poses):
        return [0.0, 0.0]
    distance = (invert(poses) - truth).flatten(2).norm(dim=2)
    low, high = distance.min(), distance.max()
    return ((distance - low) / (high - low).clamp_min(1e-9)).mean(0).tolist()


def wins(values: Tensor) -> list[int]:
    """Return how often H₀ has more, and H₁; values (n, 2). Ties count for neither."""
    return [int((values[:, 0] > values[:, 1]).sum()), int((values[:, 1] > values[:, 0]).sum())]


def pooled(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one point of the grid over several networks: counts added, means averaged."""
    counts = ("right_1", "right_2", "confidence_2", "support_2")
    mean = {
        name: [sum(point[name][side] for point in points) / len(points) for side in (0, 1)]
        for name in ("distance_1", "distance_2")
    }
    rules = {rule: sum(point["rules"][rule] for point in points) / len(points) for rule in points[0]["rules"]}
    added = {name: [sum(point[name][side] for point in points) for side in (0, 1)] for name in counts}
    return {"images": sum(point["images"] for point in points), **mean, **added, "rules": rules}


def cross_normalised(points: list[list[dict[str, Any]]]) -> dict[str, list[list[float]]]:
    """Return the six maps: differences of H₀ and H₁ after bringing both into the common range [0, 1]."""
    maps: dict[str, list[list[float]]] = {}
    for level in (1, 2):
        distance = f"distance_{level}"
        maps[distance] = [[point[distance][1] - point[distance][0] for point in row] for row in points]
    counts = {
        "accuracy_1": "right_1",
        "accuracy_2": "right_2",
        "confidence_2": "confidence_2",
        "support_2": "support_2",
    }
    for name, source in counts.items():
        every = [value for row in points for point in row for value in point[source]]
        span = max(max(every) - min(every), 1)
        maps[name] = [[(point[source][0] - point[source][1]) / span for point in row] for row in points]
    return {name: maps[name] for name in MAPS}


def verdict(maps: dict[str, list[list[float]]], rule_accuracy: dict[str, float]) -> dict[str, Any]:
    """Return how much of the grid changes hands, and what each way to choose gives."""
    before = [value for row in maps["accuracy_1"] for value in row]
    after = [value for row in maps["accuracy_2"] for value in row]
    changed = sum(one * other < 0 for one, other in zip(before, after, strict=True)) / len(before)
    return {
        "share_of_grid_where_h1_leads_after_level_1": sum(value < 0 for value in before) / len(before),
        "share_of_grid_where_h1_leads_after_level_2": sum(value < 0 for value in after) / len(after),
        "share_of_grid_that_changes_hands": changed,
        "support_minus_confidence": rule_accuracy["support"] - rule_accuracy["confidence"],
        "support_minus_h0": rule_accuracy["support"] - rule_accuracy["h0"],
    }


def draw(report: Report) -> dict[str, Figure]:
    """Return the six maps, red where H₀ is superior and blue where H₁ is."""
    from headtilt.paper.experiments.reproduce.figures import heat_map
    from headtilt.plot.style import new_figure, style_axes

    figure = new_figure(9.6, 5.2)
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    places = {"distance_1": (0, 0), "accuracy_1": (0, 1), "distance_2": (1, 0), "accuracy_2": (1, 1)}
    places |= {"confidence_2": (0, 2), "support_2": (1, 2)}
    angles = [f"{angle:.0f}°".replace("-", "−") for angle in report["angles"]]
    shears = [f"{shear:+.2f}".replace("-", "−").replace("+0.00", "0") for shear in report["shears"]]
    step = max((len(angles) - 1) // 4, 1)
    for name, (row, column) in places.items():
        values = report["results"]["maps"][name]
        axes = grid[row, column]
        below, left = ("rotation" if row else ""), ("shear" if column == 0 else "")
        drawn = heat_map(
            axes,
            values,
            rows=shears,
            columns=angles,
            title=MAPS[name],
            xlabel=below,
            ylabel=left,
            limits=(-1, 1) if name[:4] != "dist" else (-0.5, 0.5),
            cmap="RdBu_r",
        )
        axes.set_xticks(range(0, len(angles), step), angles[::step])
        axes.set_yticks(range(0, len(shears), 2), shears[::2])
        bar = figure.colorbar(drawn, ax=axes, aspect=22, pad=0.02)
        bar.outline.set_visible(False)
        style_axes(bar.ax)
    where = WORDS.get(report["dataset"], report["dataset"])
    said = f"{where}: red where H₀ is superior, blue where H₁ is; {report['images_per_point']:,} images per point"
    figure.suptitle(said, fontsize=10, x=0.01, ha="left")
    return {NAME: figure}
