"""Pages of the reproduction, made from stored results: what the paper says, what we measured, and the verdict."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from typing import Any

from figures import NEVER, NOTHING, RESULTS, SETS, shown, stored
from tabular import grid, provenance, scalars
from verdicts import verdict_on

from headtilt.paper.experiments.report import to_json

QUICK = '!!! warning "Quick sizes"\n    A handful of images: it shows that it runs. Do not quote these numbers.'


def reproduce(name: str) -> str:
    """Return what an item of `headtilt reproduce` says: the paper's claims, our numbers, the verdict, the figures."""
    module = import_module(f"headtilt.paper.experiments.reproduce.{name.replace('-', '_')}")
    paper = module.PAPER
    report, earlier = judged(module, stored(name)), stored(name)
    claims = "\n".join(f"- {claim[0].upper()}{claim[1:]}." for claim in paper.get("claims", ()))
    numbers = NUMBERS.get(name)
    printed = [[key, value] for key, value in scalars({key: paper[key] for key in paper if key != "claims"})]
    parts = ["## What the paper says", claims, grid(["", ""], printed) if printed and numbers is None else ""]
    if report is None:
        if numbers is not None:
            parts += [numbers(paper, {})]
        command = f"```{{.console .no-run}}\n$ headtilt reproduce {name} --device cuda\n```"
        why = "is not stored" if earlier is None else "was written by earlier code, whose rows are not today's"
        note = f'!!! note "{NEVER}"\n    results/{name}.json {why}. This command writes it:'
        return "\n\n".join(part for part in [*parts, note, command] if part)
    warning = QUICK if report.get("quick") else ""
    parts += ["## What we measured", warning, numbers(paper, report) if numbers else ""]
    parts += [f"![{path.stem}](../results/{path.name})" for path in sorted(RESULTS.glob(f"{name}*.png"))]
    parts += [f"- {note}" for note in report.get("notes", ())]
    rows = [[key, value] for key, value in scalars(report["verdict"])]
    folded = "\n".join(f"    {line}" for line in grid(["", ""], rows).splitlines())
    parts += ["## Verdict", verdict_on(name, report), f'??? note "The numbers behind it"\n\n{folded}']
    return "\n\n".join(part for part in [*parts, provenance(name, report)] if part)


def judged(module: Any, report: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the report with the verdict that today's code gives its numbers; None for numbers that it cannot read."""
    judge = getattr(module, "judge", None)
    if report is None or judge is None:
        return report
    try:
        return {**report, "verdict": judge(report)}
    except (KeyError, TypeError, AttributeError):
        return None


def front() -> str:
    """Return what the paper, its public code and we make of the same tilted images, and the picture of table 1."""
    module = import_module("headtilt.paper.experiments.reproduce.table1")
    report = judged(module, stored("table1")) or {"results": {}, "verdict": {}, "unfitted": {"rule": NOTHING}}
    head = ["accuracy", "paper, ITS³", "public code", "as printed", "headtilt, unfitted", "headtilt, fitted"]
    rows = []
    for name in module.DATASETS:
        table = report["results"].get(name, {}).get("each", {})
        methods = ("public code, ITS³", "ITS³", report["unfitted"]["rule"], "head")
        cells = [_over_networks(table.get(method)) for method in methods]
        rows.append([SETS[name], f"{module.PAPER[name]['accuracy']['ITS³'][0]:.1f}", *cells])
    parts = [QUICK] if report.get("quick") else []
    parts.append(grid(head, rows))
    if table_is_measured := bool(report["results"]):
        parts.append(
            f"headtilt, unfitted: {report['unfitted']['rule']}, the best of four rules on validation images. "
            f"Tilted test images, one transform each{_images(report)}; ± is over networks."
        )
    if table_is_measured and (RESULTS / "table1.png").exists():
        parts.append("![Table 1](../results/table1.png)")
    return "\n\n".join(parts)


def _images(report: dict[str, Any]) -> str:
    """Return how many images a set of table 1 has, and how many passes, where these are not the full sizes."""
    full = json.loads(to_json(asdict(import_module("headtilt.paper.experiments.reproduce.table1").FULL)))
    sizes = report.get("sizes", full)
    if sizes == full:
        return ""
    share, runs = sizes["share"], sizes["runs"]
    return (
        f" ({runs * share['images']:,} for each set, {runs * share['public_images']:,} for the public code, "
        f"{share['passes']} dropout passes, {sizes['fitting']['images']:,} images for the fit: fewer than "
        "`headtilt reproduce table1` takes in full)"
    )


def _over_networks(entry: dict[str, Any] | None) -> str:
    """Return the accuracy of a row of table 1 and its spread over networks; that over runs grows as runs shrink."""
    return NOTHING if entry is None else "{mean:.1f} ± {std:.1f}".format(**entry["over_networks"])


def spreads() -> str:
    """Return the printed spreads of table 1 beside those that a short last batch explains."""
    module = import_module("headtilt.paper.experiments.reproduce.table1")
    found = module.printed_spreads()
    rows = []
    for name in module.PAPER_ROWS:
        row = [name]
        for dataset in found:
            cell = found[dataset][name]
            row.append(f"{cell['mean']:.2f} ± {cell['printed']:.2f} ({cell['explained']:.2f})")
        rows.append(row)
    return grid(["printed (explained)", *(SETS[dataset] for dataset in found)], rows)


def _table1(paper: dict[str, Any], report: dict[str, Any]) -> str:
    parts = [_table1_ours(paper, report)]
    results = report.get("results", {})
    if results:
        parts += [_table1_protocol(paper, results), _table1_choice(report["unfitted"])]
    return "\n\n".join(parts)


def _table1_protocol(paper: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the searches by the paper's protocol, each figure of the paper's own kind."""
    rows = []
    sets = [name for name in SETS if name in results and "paper" in results[name]]
    methods = [name for name in results[sets[0]]["paper"] if name == "CNN" or "ITS" in name] if sets else []
    for method in methods:
        row = [method]
        for name in sets:
            theirs = paper.get(name, {}).get("accuracy", {}).get(method)
            row.append(NOTHING if theirs is None else f"{theirs[0]:.1f} ± {theirs[1]:.1f}")
            for place in ("paper", "paper, notebook networks"):
                one = results[name].get(place, {}).get(method, {}).get("as_printed")
                row.append(NOTHING if one is None else _spread(one))
        rows.append(row)
    kinds = ("paper", "the zoo's networks", "notebook networks")
    head = ["by the paper's protocol"] + [f"{SETS[name]}, {kind}" for name in sets for kind in kinds]
    return f"### By the paper's protocol\n\n{grid(head, rows)}"


def _spread(one: dict[str, Any]) -> str:
    return f"{one['mean']:.1f}" if one["std"] is None else f"{one['mean']:.1f} ± {one['std']:.1f}"


def _table1_choice(unfitted: dict[str, Any]) -> str:
    """Return how the unfitted rule was chosen."""
    table = unfitted["validation_accuracy"]
    rows = [
        [rule, *(f"{table[name][rule]['mean']:.1f} ± {table[name][rule]['std']:.1f}" for name in table), f"{mean:.1f}"]
        for rule, mean in unfitted["mean"].items()
    ]
    head = ["on validation images", *(SETS.get(name, name) for name in table), "mean"]
    return f"### Which rule without a fit\n\n{grid(head, rows)}\n\nThe best on average is **{unfitted['rule']}**."


def _table1_ours(paper: dict[str, Any], report: dict[str, Any]) -> str:
    results = report.get("results", {})
    sets = [name for name in SETS if name in paper]
    methods = list(dict.fromkeys(key for name in sets for key in paper[name]["accuracy"]))
    methods += [key for name in sets for key in results.get(name, {}).get("each", {}) if key not in methods]
    rows = []
    origin = report.get("origin", {})
    for method in dict.fromkeys(methods):
        row = [method, origin.get(method, "ours" if origin else NOTHING)]
        for name in sets:
            theirs = paper[name]["accuracy"].get(method)
            row += [NOTHING if theirs is None else f"{theirs[0]:.2f}"]
            row += [_over_networks(results.get(name, {}).get("each", {}).get(method))]
        rows.append(row)
    head = ["accuracy", "whose rule"] + [f"{SETS[name]}, {who}" for name in sets for who in ("paper", "measured")]
    return grid(head, rows)


def _rotated(_: dict[str, Any], report: dict[str, Any]) -> str:
    results = report.get("results", {})
    rows = [[name, f"{one['mean']:.1f}", f"{one['worst']:.1f}"] for name, one in results.items()]
    return grid(["", "mean over all angles", "worst angle"], rows) if rows else ""


def _siscore(paper: dict[str, Any], report: dict[str, Any]) -> str:
    results = report.get("results", {})
    titles = {"rotation": "Turned objects", "area": "Resized objects", "location": "Moved objects"}
    parts = []
    for place, title in {**titles, "imagenet": "Whole photographs, turned"}.items():
        names = [name for name in results if place in results[name]]
        rows = [
            [f"{who} (paper)", f"{values[0]:.1f} / {values[1]:.1f}"] for who, values in paper.get(place, {}).items()
        ]
        if rows:
            parts.append(f"### {title}\n\n{grid(['quoted', 'top 1 / top 5'], rows)}")
        methods = list(dict.fromkeys(row for name in names for row in results[name][place]["rows"]))
        measured = [
            [method, *(_both(results[name][place]["rows"].get(method)) for name in names)] for method in methods
        ]
        if measured:
            heading = "" if rows else f"### {title}\n\n"
            parts.append(heading + grid(["measured, top 1 / top 5", *names], measured))
    return "\n\n".join(parts)


def _both(row: dict[str, Any] | None) -> str:
    return NOTHING if row is None else f"{row['acc1']:.1f} / {row['acc5']:.1f}"


def _hyperparameters(paper: dict[str, Any], report: dict[str, Any]) -> str:
    gains = report.get("results", {}).get("gains", {})
    rows = []
    for key, title in {"1 to 10": "dropout passes, 1 to 10", "10 to 50": "dropout passes, 10 to 50"}.items():
        mean, deviation = paper[f"gain_{key.replace(' ', '_')}"]
        ours = gains.get(key)
        rows.append([title, f"{mean} ± {deviation}", f"{ours['mean']:.2f} ± {ours['std']:.2f}" if ours else NOTHING])
    best, ours = paper["best"], report.get("verdict", {}).get("best", {})
    rows += [[f"best {key}", shown(best[key]), shown(ours.get(key))] for key in ("samples", "hypotheses")]
    return grid(["gain in points", "paper", "ours"], rows)


NUMBERS = {"hyperparameters": _hyperparameters, "table1": _table1, "rotated-mnist": _rotated, "siscore": _siscore}
