"""Theorem "Group Elimination" and limitations (1) and (2): order of levels, false hypotheses, labels of an orbit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, cast

import torch

from headtilt.geometry.groups import Group, rotation, scale, shear_x
from headtilt.its import ITS
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.data.perturb import schedules
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, draw_images, network, our_tree, share, spread, tilt
from headtilt.result import SearchResult
from headtilt.search.found import LevelTrace
from headtilt.search.tree import count_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

NAME = "order"
TITLE = "Order of the levels, false hypotheses, and invariance along an orbit"
DATASETS = ("mnist", "fashion-mnist")
LEVELS: dict[str, Group] = {"rotation": rotation(), "scale": scale(0.25), "shear": shear_x(0.25)}
PAIRS = {"commuting": ("rotation", "scale"), "not commuting": ("rotation", "shear")}
SEARCHES: dict[str, dict[str, Any]] = {"group": {}, "energy": {"confidence": "energy"}}
PAPER: dict[str, Any] = {
    "claims": [
        "a factor is eliminated exactly where it commutes with those before it; the order matters otherwise",
        "false hypotheses may be reinforced down the tree",
        "an equivariant model would give all views of an orbit one label",
    ]
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        networks: Trained networks.
        images: Test images per network.
        passes: Monte-Carlo passes.
    """

    networks: int
    images: int
    passes: int = 10


FULL = Size(networks=5, images=1000)
QUICK = Size(networks=1, images=50)


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return accuracies for all orders, the fate of false hypotheses, and the share of an orbit with one label."""
    datasets, left_out = study.available(DATASETS)
    orders = list(permutations(LEVELS))
    jobs: dict[tuple[str, ...], Any] = {}
    for dataset in datasets:
        for seed in range(size.networks):
            name = f"network {seed}"
            for order in orders:
                jobs[dataset, "→".join(order), name] = partial(three, study, size, dataset, seed, order)
            for pair in PAIRS:
                jobs[dataset, pair, name] = partial(two, study, size, dataset, seed, pair)
            jobs[dataset, "orbit", name] = partial(orbit, study, size, dataset, seed)
    found = store.gather(jobs)

    def over_networks(dataset: str, what: str) -> dict[str, Any]:
        rows = [found[dataset, what, f"network {seed}"] for seed in range(size.networks)]
        return {field: spread([row[field] for row in rows]) for field in rows[0]}

    results = {
        dataset: {
            "orders": {"→".join(order): over_networks(dataset, "→".join(order)) for order in orders},
            "pairs": {pair: over_networks(dataset, pair) for pair in PAIRS},
            "orbit": over_networks(dataset, "orbit"),
        }
        for dataset in datasets
    }
    return {
        "left_out": left_out,
        "seeds": list(range(size.networks)),
        "images": size.images,
        "notes": [
            "Images are transformed by rotation · scale · shear (affine), or by rotation · scale and rotation · shear.",
            "reinforced: of images whose leader after level 1 is wrong, those whose final answer is that very label.",
            "lost: of those whose leader after level 1 is right, those whose final answer is wrong.",
        ],
        "residual": residuals(),
        "results": results,
        "verdict": {dataset: verdict(entry) for dataset, entry in results.items()},
    }


def three(study: Study, size: Size, dataset: str, seed: int, order: Sequence[str]) -> dict[str, float | None]:
    """Return accuracy and the fate of hypotheses on affine images, with the levels in one order."""
    data = draw_images(study, dataset, size.images, seed=seed)
    test = tilt(data, draw_transforms("affine", len(data), seed=seed), study.device)
    found: dict[str, float | None] = {}
    for name, options in SEARCHES.items():
        robust = searcher(study, size, dataset, seed, order, options)
        result = robust.search(test.images)
        fates = fate(result, test.labels)
        found |= {f"{name}: {what}": value for what, value in fates.items()}
    return found


def two(study: Study, size: Size, dataset: str, seed: int, pair: str) -> dict[str, float | None]:
    """Return the accuracy of both orders of a pair of levels, and how often they disagree."""
    first, second = PAIRS[pair]
    data = draw_images(study, dataset, size.images, seed=seed)
    drawn = [schedules()[name].drawn[0] for name in (first, second)]
    test = tilt(data, draw_transforms(drawn, len(data), seed=seed), study.device)
    found: dict[str, float | None] = {}
    for name, options in SEARCHES.items():
        # What was done last comes off first: rotation, then the other. The other way round is the wrong order.
        labels = [
            searcher(study, size, dataset, seed, order, options).search(test.images).labels
            for order in ((first, second), (second, first))
        ]
        for word, answer in zip(("right order", "wrong order"), labels, strict=True):
            found[f"{name}: {word}"] = share(answer == test.labels)
        found[f"{name}: disagree"] = share(labels[0] != labels[1])
    return found


def orbit(study: Study, size: Size, dataset: str, seed: int) -> dict[str, float | None]:
    """Return which share of the views along a turn gets the commonest label, and which the right one."""
    data = draw_images(study, dataset, size.images, seed=seed)
    test = tilt(data, torch.eye(3).expand(len(data), 3, 3), study.device)
    result = our_tree(network(study, dataset, seed), [rotation()], samples=72, confidence="energy").search(test.images)
    (level,) = cast(tuple[LevelTrace, ...], result.trace)
    counts = count_labels(level.labels, result.logits.shape[-1]) / level.labels[0].numel()
    own = counts.gather(1, test.labels[:, None])[:, 0]
    return {
        "commonest label": 100 * float(counts.amax(1).mean()),
        "right label": 100 * float(own.mean()),
        "right label is the commonest": share(counts.argmax(1) == test.labels),
        "distinct labels": float((counts > 0).sum(1).float().mean()),
    }


def searcher(study: Study, size: Size, dataset: str, seed: int, order: Sequence[str], options: dict[str, Any]) -> ITS:
    """Return ITS with the levels in one order."""
    levels = [LEVELS[name] for name in order]
    return our_tree(network(study, dataset, seed), levels, mc_passes=size.passes, seed=seed, **options)


def fate(result: SearchResult, truth: Tensor) -> dict[str, float | None]:
    """Return accuracy, and what becomes of wrong and of right leaders of level 1."""
    level = cast(tuple[LevelTrace, ...], result.trace)[0]
    leader = level.labels.flatten(1).gather(1, level.chosen[:, :1].clamp_min(0))[:, 0]
    wrong = leader != truth
    kept = result.labels == leader
    return {
        "accuracy": share(result.labels == truth),
        "level 1": share(~wrong),
        "reinforced": share(kept[wrong]) if bool(wrong.any()) else None,
        "mended": share((result.labels == truth)[wrong]) if bool(wrong.any()) else None,
        "lost": share((result.labels != truth)[~wrong]) if bool((~wrong).any()) else None,
    }


def residuals() -> dict[str, float]:
    """Return ‖g₁⁻¹ g₀ g₁ − g₀‖_F on average: zero where eliminating the inner factor first is exact."""
    found = {}
    for pair, names in PAIRS.items():
        outer, inner = (LEVELS[name] for name in names)
        g, h = outer.orbit(17)[:, None], inner.orbit(17)[None]
        found[pair] = float((torch.linalg.inv(h) @ g @ h - g).flatten(2).norm(dim=2).mean())
    return found


def verdict(entry: dict[str, Any]) -> dict[str, Any]:
    """Return by how much the order matters, and how often a false hypothesis lives on."""
    found: dict[str, Any] = {}
    for name in SEARCHES:
        accuracy = {order: row[f"{name}: accuracy"]["mean"] for order, row in entry["orders"].items()}
        found[name] = {
            "best_order": max(accuracy, key=lambda order: accuracy[order]),
            "spread_over_orders": max(accuracy.values()) - min(accuracy.values()),
            "rotation_first_is_best": max(accuracy, key=lambda order: accuracy[order]).startswith("rotation"),
            "reinforced": entry["orders"]["rotation→scale→shear"][f"{name}: reinforced"]["mean"],
            "disagreement": {pair: row[f"{name}: disagree"]["mean"] for pair, row in entry["pairs"].items()},
        }
    return found


def draw(report: Report) -> dict[str, Figure]:
    """Return accuracy by order, pairs, and what becomes of the leader of level 1, a row for each data set."""
    from headtilt.plot.style import new_figure, style_axes

    results = report["results"]
    figure = new_figure(10, 0.6 + 2.7 * len(results))
    grid = figure.subplots(len(results), 3, squeeze=False, width_ratios=[1.5, 1.2, 1])
    marks: dict[str, Any] = {}
    for row, (dataset, entry) in enumerate(results.items()):
        for column, (title, bars) in enumerate(panels(entry).items()):
            axes = grid[row, column]
            marks |= pairs_of_bars(axes, bars)
            head = f"{WORDS.get(dataset, dataset)}: {title}" if column == 0 else title
            below = "accuracy (%)" if column < 2 else "share (%)"
            style_axes(axes, title=head, xlabel=below if row == len(results) - 1 else "", grid="x")
            axes.set_yticks(range(len(bars)), list(bars), fontsize=7.5)
    shares = [
        f"{WORDS.get(dataset, dataset)} {entry['orbit']['commonest label']['mean']:.0f} %"
        for dataset, entry in results.items()
    ]
    said = f"views of a full turn that share the commonest label: {', '.join(shares)}"
    figure.suptitle(said, fontsize=9.5, x=0.01, ha="left")
    figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return {NAME: figure}


def panels(entry: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what the three panels of a data set show: mean and spread by row and by search."""
    standard = entry["orders"]["rotation→scale→shear"]
    fates = {"reinforced": "wrong,\nreinforced", "mended": "wrong,\nmended", "lost": "right,\nlost"}
    return {
        "levels from the root down": {
            order.replace("→", " → "): {name: found[f"{name}: accuracy"] for name in SEARCHES}
            for order, found in entry["orders"].items()
        },
        "two levels, both orders": {
            f"{pair},\n{which}": {name: found[f"{name}: {which}"] for name in SEARCHES}
            for pair, found in entry["pairs"].items()
            for which in ("right order", "wrong order")
        },
        "leaders of level 1": {
            word: {name: standard[f"{name}: {what}"] for name in SEARCHES} for what, word in fates.items()
        },
    }


def pairs_of_bars(axes: Axes, bars: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draw a bar for each search in each row; return one of each for a legend."""
    from headtilt.plot.style import BLUE, INK, ORANGE, say

    marks: dict[str, Any] = {}
    for place, values in enumerate(bars.values()):
        for number, (name, colour) in enumerate(zip(SEARCHES, (BLUE, ORANGE), strict=True)):
            mean, std = values[name]["mean"], values[name]["std"]
            y = place + (number - 0.5) * 0.36
            if mean is not None:
                marks[f"{name} confidence"] = axes.barh(y, mean, height=0.34, color=colour, zorder=2)
                axes.errorbar(mean, y, xerr=std, color=INK, lw=0.9, capsize=2, zorder=3)
                say(axes, 1.02, y, f"{mean:.0f}", 7, ha="left", transform=axes.get_yaxis_transform())
    axes.set(xlim=(0, 100), ylim=(len(bars) - 0.5, -0.5))
    return marks
