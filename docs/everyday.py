"""Blocks of the pages for everyday use: the tasks, and how often `headtilt audit` is right."""

from __future__ import annotations

import math
from typing import Any

from figures import NAMES, NEVER, RESULTS, bold, stored
from tabular import grid, provenance


def took(seconds: float) -> str:
    """Return a time in words that stay on one line."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}\u00a0min\u00a0{rest}\u00a0s" if minutes else f"{rest}\u00a0s"


def task(name: str) -> str:
    """Return a task's three numbers, how long it took, and its picture."""
    report = stored(f"task-{name}")
    if report is None:
        return f"{NEVER}: no results/task-{name}.json is stored."
    count = report["test_images"]
    error = max(
        math.sqrt(report[key] * (100 - report[key]) / count) for key in ("tilted_bare", "tilted_wrapped")
    )  # of a share, in points
    head = ["right answers, %", "tilted images", "upright images"]
    rows = [
        [NAMES["vanilla"], f"{report['tilted_bare']:.1f}", f"{report['upright_bare']:.1f}"],
        [bold(NAMES["accurate+gate"]), f"{report['tilted_wrapped']:.1f}", f"{report['upright_wrapped']:.1f}"],
    ]
    words = (
        f"{count:,} test images: each figure has a standard error of up to {error:.1f} points. Fitted on "
        f"{report['fit_images']:,} unlabelled images. All code of this page took {took(report['processor_seconds'])} "
        f"of one core ({took(report['seconds'])} by the clock, on a busy machine)."
    )
    notebook = f"This page is also [a notebook](../../examples/{name}.ipynb) with all outputs."
    parts = [grid(head, rows), words, notebook]
    if (RESULTS / f"task-{name}.png").exists():
        parts.append(f"![Images as they came, and turned back](../results/task-{name}.png)")
    return "\n\n".join([*parts, provenance(f"task-{name}", report)])


def audit() -> str:
    """Return how often audit's verdicts are right, by model and number of images, and its false alarms."""
    report = stored("audit")
    if report is None:
        return f"{NEVER}: no results/audit.json is stored."
    sizes = [str(size) for size in report["sizes"]]
    rows, alarms, draws, worst = [], 0.0, 0, 0.0
    for name, model in report["models"].items():
        cells = []
        for size in sizes:
            found = [source[size] for source in model["sources"].values()]
            right, wrong = (sum(one[key] for one in found) / len(found) for key in ("right", "wrong"))
            cells.append(f"{right:.0f}" + (f" ({wrong:.2f} wrong)" if wrong else ""))
            many = model["sources"]["upright"][size]["trials"]
            draws, alarms = draws + many, alarms + model["false_alarms"][size] * many / 100
        most = max(model["false_alarms"].values())
        worst = max(worst, most)
        rows.append([name, *cells, f"{most:.2f}"])
    head = ["model", f"{sizes[0]} images", *sizes[1:], "false alarms on upright sources, at most"]
    words = (
        f"False alarms: {alarms:.0f} in {draws:,} draws of upright images, over all models and sizes, and at most "
        f"{worst:.2f} % for one model and size. The draws share images, so they are not independent."
    )
    return f"{grid(head, rows)}\n\n{words}"


def audit_mixtures(size: str = "100") -> str:
    """Return what is said of sources that turn some of their images."""
    report: dict[str, Any] = stored("audit") or {"models": {}}
    kinds = list(next(iter(report["models"].values()), {"mixtures": {}})["mixtures"])
    rows = []
    for name, model in report["models"].items():
        found = [model["mixtures"][kind][size] for kind in kinds]
        rows.append([name, *(f"{one['right']:.0f}" for one in found), f"{found[0]['some_stand_out']:.0f}"])
    return grid([f'called "mixed", % of draws of {size} images', *kinds, '"Some do not" is said of the first'], rows)


def tasks() -> str:
    """Return the three numbers of every task that was run, and how long each took."""
    rows = []
    for path in sorted(RESULTS.glob("task-*.json")):
        report = stored(path.stem) or {}
        pairs = [f"{report[f'{kind}_bare']:.1f} → {report[f'{kind}_wrapped']:.1f}" for kind in ("tilted", "upright")]
        name = report["task"].replace("-", " ")
        rows.append([name, *pairs, f"{report['fit_images']:,}", took(report["processor_seconds"])])
    head = [
        "right answers, bare model → headtilt, %",
        "tilted images",
        "upright images",
        "fit images",
        "time on one core",
    ]
    return grid(head, rows)
