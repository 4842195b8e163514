"""Figures from stored results, written into the pages: they read the same on a code host and on the site.

``<!--= mnist-affine.methods.fast.accuracy :.1f -->95.1<!--/-->`` holds a number of results/mnist-affine.json, and
``<!--= affine -->`` begins a block of its own. ``python docs/tables.py --write`` writes them anew. A figure that is not
measured yet shows as –, never as a number from somewhere else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
from headtilt.paper.experiments.names import NAMES  # noqa: E402

RESULTS = ROOT / "results"
NOTHING = "–"
PLACE = re.compile(r"<!--= (?P<what>[^>]+?) -->(?P<shown>.*?)<!--/-->", re.DOTALL)
SETS = {"digits": "digits", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "gtsrb": "GTSRB"}


def bold(name: str) -> str:
    """Return the name of a method with headtilt in bold."""
    return name.replace("headtilt", "**headtilt**")


NO_NEED, LABELS, UNLABELLED = "nothing", "labels, training", "unlabelled images"
# Row, method in the result file, what it needs beside the trained classifier.
ROWS = (
    (NAMES["vanilla"], "vanilla", NO_NEED),
    (NAMES["oracle"], "oracle", "the pose"),
    (NAMES["augmented"], "augmented", LABELS),
    (NAMES["last-layer"], "last-layer", LABELS),
    (NAMES["tta-mean"], "tta-mean", NO_NEED),
    (NAMES["tta-max"], "tta-max", NO_NEED),
    (NAMES["energy"], "energy", NO_NEED),
    (f"{NAMES['paper3']}, figures in the paper", "published: paper", NO_NEED),
    (f"{NAMES['paper3']}, public code", "published: public code", NO_NEED),
    (NAMES["paper3"], "paper3", NO_NEED),
    (NAMES["tree3-energy"], "tree3-energy", NO_NEED),
    (bold(NAMES["default"]), "default", NO_NEED),
    (bold(NAMES["accurate"]), "accurate", UNLABELLED),
    (bold(NAMES["accurate+gate"]), "accurate+gate", UNLABELLED),
)
FITTED = {"oracle", "accurate", "accurate+gate"}  # measured by a command of their own, in SET-fitted.json
PRINTED = {"paper3", "paper5"}
NEVER = "Not measured in full yet"


def stored(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return what results/NAME.json holds, or None where it is not there."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "commit" not in report and isinstance(report.get("methods"), dict):
        # Files that name no commit are older than the printed rules, for which these names stand today.
        report["methods"] = {name: entry for name, entry in report["methods"].items() if name not in PRINTED}
    return report


def look_up(path: str, folder: Path = RESULTS) -> Any:
    """Return the value at ``FILE.key.key…`` (numbers index lists), or None where there is none."""
    name, *keys = path.split(".")
    value: Any = stored(name, folder)
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def shown(value: Any, form: str = "") -> str:
    """Return a value in words or digits; a dash for what is not there."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        text = format(value, form) if form else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return text.replace("-", "−")
    return str(value)


def fill(text: str, blocks: dict[str, Callable[..., str]], folder: Path = RESULTS) -> str:
    """Return a page with all of its figures written anew.

    Args:
        text: Markdown with ``<!--= … -->…<!--/-->``.
        blocks: What makes each kind of block, by its first word; it is given the other words.
        folder: Of the results.
    """

    def one(match: re.Match[str]) -> str:
        what, _, form = match["what"].partition(" :")
        word, *rest = what.split()
        written = f"\n{blocks[word](*rest)}\n" if word in blocks else shown(look_up(what.strip(), folder), form.strip())
        return f"<!--= {match['what']} -->{written}<!--/-->"

    return PLACE.sub(one, text)


def cell(dataset: str, method: str, folder: Path = RESULTS) -> str:
    """Return accuracy and spread on tilted images and, in brackets, upright accuracy."""
    if method.startswith("published: "):
        published = json.loads((ROOT / "docs" / "published.json").read_text(encoding="utf-8"))
        return shown(published[method.removeprefix("published: ")]["accuracy"].get(dataset), ".1f")
    report = stored(f"{dataset}-{'fitted' if method in FITTED else 'affine'}", folder) or {"methods": {}}
    entry = report["methods"].get(method)
    if entry is None:
        return NOTHING
    return f"{entry['accuracy']:.1f} ± {entry['accuracy_std']:.1f} ({entry['upright_accuracy']:.1f})"


def affine_table(folder: Path = RESULTS) -> str:
    """Return the table that compares all methods on all sets."""
    lines = [f"| | needs | {' | '.join(SETS.values())} |", f"|---|---|{'---|' * len(SETS)}"]
    for label, method, needs in ROWS:
        lines.append(f"| {label} | {needs} | {' | '.join(cell(name, method, folder) for name in SETS)} |")
    return "\n".join(lines)


# What README shows: title, what was drawn, files of a set in the order in which they are looked into.
BRIEF_SETS = {
    "MNIST": ("mnist-fitted", "mnist-affine"),
    "Fashion-MNIST": ("fashion-mnist-fitted", "fashion-mnist-affine"),
    "GTSRB": ("gtsrb-fitted", "gtsrb-affine"),
    "CIFAR-10": ("cifar10-fitted", "cifar10-affine"),
    "photographs, MobileNetV2": ("photographs-mobilenet_v2",),
    "photographs, ViT-Ti": ("photographs-vit_tiny",),
}
BRIEF_ROWS = {bold(NAMES[method]): method for method in ("vanilla", "augmented", "accurate+gate", "accurate")}


def brief(folder: Path = RESULTS) -> dict[str, dict[str, tuple[str, str] | None]]:
    """Return tilted and upright accuracy of README's four ways on each of its six sets; None where not measured."""
    found: dict[str, dict[str, tuple[str, str] | None]] = {}
    for title, names in BRIEF_SETS.items():
        reports = [stored(name, folder) or {} for name in names]
        for row, method in BRIEF_ROWS.items():
            entries = (report.get("methods", {}).get(method) for report in reports)
            entry = next((entry for entry in entries if entry is not None), None)
            pair = None if entry is None else (f"{entry['accuracy']:.1f}", f"{entry['upright_accuracy']:.1f}")
            found.setdefault(title, {})[row] = pair
    return found


def brief_table(folder: Path = RESULTS) -> str:
    """Return README's table: four ways, six sets, tilted accuracy and, in brackets, upright accuracy."""
    pairs = brief(folder)
    counts = " | ".join(shown((stored(names[0], folder) or {}).get("fit_images")) for names in BRIEF_SETS.values())
    lines = [f"| tilted (upright), % | {' | '.join(BRIEF_SETS)} |", f"|---|{'---|' * len(BRIEF_SETS)}"]
    for row in BRIEF_ROWS:
        cells = [NOTHING if pair is None else f"{pair[0]} ({pair[1]})" for pair in (one[row] for one in pairs.values())]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| *unlabelled images it was fitted on* | {counts} |"])


def headline(folder: Path = RESULTS) -> str:
    """Return the sentence that sets the fitted search beside retraining, on every set where both were measured."""
    better, worse, images = [], [], 0
    for name, title in SETS.items():
        fitted, others = (
            (stored(f"{name}-{kind}", folder) or {"methods": {}})["methods"] for kind in ("fitted", "affine")
        )
        if "accurate+gate" in fitted and "augmented" in others:
            images = max(images, (stored(f"{name}-fitted", folder) or {}).get("fit_images", 0))
            ours, theirs = fitted["accurate+gate"], others["augmented"]
            pair = [f"{one['accuracy']:.1f} ({one['upright_accuracy']:.1f})" for one in (ours, theirs)]
            wins = all(ours[key] > theirs[key] for key in ("accuracy", "upright_accuracy"))
            (better if wins else worse).append(f"{pair[0]} against {pair[1]} on {title}")
    parts = []
    if better:
        parts.append(
            f"Fitted on at most {images:,} unlabelled images and with its gate, the untouched classifier beats the "
            f"same network retrained with labelled, tilted images: {', '.join(better)} "
            "(tilted images, in brackets upright ones)."
        )
    if worse:
        parts.append(f"It does not beat it in both respects: {', '.join(worse)}.")
    return " ".join(parts)
