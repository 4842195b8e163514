"""Blocks of a page that are made from stored results: tables, verdicts, pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from everyday import audit, audit_mixtures, task, tasks
from figures import NEVER, NOTHING, RESULTS, SETS, affine_table, brief_table, headline, shown, stored
from tabular import folded, grid, provenance
from verdicts import verdict_on

# Long lists, for which the file itself is the place.
DETAILS = {"stages", "targets", "files", "survivors", "explained_as_equivalent", "tests", "replies_to_attackers"} | {
    "memory_after_by_process_mb", "files_after_each_kill", "pythons",
}  # fmt: skip
ABOUT = {"command", "commit", "versions", "hardware", "machine", "date", "name", "title", "paper", "notes"}
HARDENING = {
    "hardening-fuzz": "Fuzzing",
    "hardening-crossings": "Every pair of settings",
    "hardening-siege": "A siege of service and batch",
    "hardening-kills": "Batches killed, a node lost, a full disk",
    "hardening-mutate": "Mutation testing",
    "hardening-faults": "Fault injection",
    "hardening-memory": "Running out of memory",
    "hardening-pythons": "Versions of Python",
    "hardening-audit": "Known vulnerabilities",
    "hardening-release": "The release",
}


def words(key: str) -> str:
    """Return a key of a result file as words."""
    return re.sub(r"\bits(3?)\b", lambda match: f"ITS{'³' if match[1] else ''}", key.replace("_", " "))


def scalars(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield every number, word and truth value below, with the words that lead to it; long lists by their length."""
    if isinstance(value, dict) and {"median", "low", "high"} <= value.keys():
        yield " · ".join(path), f"{shown(value['median'])} ({shown(value['low'])} to {shown(value['high'])})"
    elif isinstance(value, dict) and {"mean", "std"} <= value.keys():
        yield " · ".join(path), f"{shown(value['mean'])} ± {shown(value['std'])}"
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from scalars(part, (*path, words(str(key))))
    elif isinstance(value, list):
        plain = [part for part in value if not isinstance(part, (dict, list))]
        short = len(plain) == len(value) <= 12
        yield " · ".join(path), ", ".join(map(shown, plain)) if short else f"{len(value)} of them, in the file"
    else:
        yield " · ".join(path), shown(value)


def without(value: Any, names: set[str]) -> Any:
    """Return a report without the parts of those names, however deep they lie."""
    if not isinstance(value, dict):
        return value
    return {key: without(part, names) for key, part in value.items() if key not in names}


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
    warning = ""
    if report.get("quick"):
        warning = (
            '!!! warning "Quick sizes"\n    A handful of images: it shows that it runs. Do not quote these numbers.'
        )
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
    head = ["accuracy", "paper, ITS³", "public code", "as printed", "ours, unfitted", "ours, fitted"]
    rows = []
    for name in module.DATASETS:
        table = report["results"].get(name, {}).get("each", {})
        methods = ("public code, ITS³", "ITS³", report["unfitted"]["rule"], "head")
        cells = [table.get(method, {}).get("accuracy") for method in methods]
        shown_cells = [NOTHING if cell is None else f"{cell['mean']:.1f} ± {cell['std']:.1f}" for cell in cells]
        rows.append([SETS[name], f"{module.PAPER[name]['accuracy']['ITS³'][0]:.1f}", *shown_cells])
    parts = [grid(head, rows)]
    if table_is_measured := bool(report["results"]):
        parts.append(f"Ours, unfitted: {report['unfitted']['rule']}, the best of four rules on validation images.")
    if table_is_measured and (RESULTS / "table1.png").exists():
        parts.append("![Table 1](../results/table1.png)")
    return "\n\n".join(parts)


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
            ours = results.get(name, {}).get("each", {}).get(method, {}).get("accuracy")
            row += [NOTHING if theirs is None else f"{theirs[0]:.2f}"]
            row += [NOTHING if ours is None else f"{ours['mean']:.1f} ± {ours['std']:.1f}"]
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


def file_block(name: str, title: str) -> str:
    """Return everything a result file says, as one table under a heading."""
    report = stored(name)
    if report is None:
        return ""
    if "methods" in report and "dataset" in report:
        body = methods(report)
    elif "networks" in report and "machine" in report:
        body = "\n\n".join([speeds(report["networks"]), *memory(report), *same_labels(report)])
    else:
        body = grid(
            ["", ""],
            [[key, value] for key, value in scalars(without(report, ABOUT | DETAILS))],
        )
    return f"## {title}\n\n{body}\n\n{provenance(name, report)}"


def behind(name: str, title: str) -> str:
    """Return what a result file says, behind a line that opens it."""
    _, _, body = file_block(name, title).partition("\n\n")
    return folded(title, body) if body else ""


def speeds(networks: dict[str, Any]) -> str:
    """Return what a search costs beside the bare model on the same views, and beside the naive way."""

    def middle(one: Any) -> str:
        if not one:
            return NOTHING
        median, low, high = (f"{one[key]:,.{0 if one[key] >= 100 else 2}f}" for key in ("median", "low", "high"))
        return f"{median} ({low} to {high})"

    head = ["network", "search", "images/s", "time over the bare model's", "over its channels-last time"]
    rows = [
        [
            network,
            kind,
            middle(rate),
            middle(one["over_bare"].get(kind)),
            middle(one["over_bare_channels_last"].get(kind)),
        ]
        for network, one in networks.items()
        for kind, rate in one["images_per_second"].items()
    ]
    naive = [
        [network, str(one["naive"]["passes"]), middle(one["naive"]["speedup"])]
        for network, one in networks.items()
        if one.get("naive")
    ]
    parts = [grid(head, rows), "Below 1 the search is quicker per view than the model called on the same views."]
    if naive:
        parts.append(grid(["network", "dropout passes", "times as fast as the naive way"], naive))
    new = [
        f"{one['new_sizes']['headtilt_seconds']:.2f} s instead of {one['new_sizes']['bare_seconds']:.2f} s ({network})"
        for network, one in networks.items()
        if "new_sizes" in one
    ]
    if new:
        numbers = next(one["new_sizes"]["numbers"] for one in networks.values() if "new_sizes" in one)
        parts.append(
            "A GPU's convolutions are planned anew for each number of views that has not been met, and a gate leaves "
            f"another one after every batch. headtilt fills views up to one of few numbers, which are soon planned. "
            f"{numbers} numbers not met before, once searches have run, against the bare model called on as many: "
            f"{', '.join(new)}."
        )
    return "\n\n".join(parts)


def memory(report: dict[str, Any]) -> list[str]:
    """Return the peak memory of searches, by images, chunk and hypotheses."""
    rows = [
        [f"{one['images']:,}", f"{one['chunk']:,}", str(one["hypotheses"]), f"{one['peak_mb']:,.0f}"]
        for one in report.get("memory", [])
    ]
    head = ["images", "views at once", "hypotheses", "peak memory beyond the images, MB"]
    return [grid(head, rows)] if rows else []


def same_labels(report: dict[str, Any]) -> list[str]:
    """Return how the labels agree with those of the plain path."""
    found = report.get("labels", {})
    parts = [
        f"{passes}: {100 * one['as shipped, labels alike']:.2f} %"
        for passes, one in found.items()
        if isinstance(one, dict)
    ]
    count = found.get("images")
    return [f"Labels as on the plain path, on {count:,} images, {', '.join(parts)}."] if parts and count else []


PHOTOGRAPHS = {"mobilenet_v2": "MobileNetV2", "vit_tiny": "ViT-Ti/16", "efficientnet_lite0": "EfficientNet-Lite0"}
# Rows of stored files that an earlier way to fit had made.
EARLIER = {
    *("bias", "balanced", "balanced+gate", "head", "head-features", "head-features+gate", "knn", "prototype"),
    *("fast", "fast+gate"),
}
# The name that a method has in README and on all pages, with what the command line calls it.
NAMED = {
    "vanilla": "bare model, `vanilla`",
    "oracle": "bare model told the true pose, `oracle`",
    "orient": "one pass guesses the pose, one classifies, `orient`",
    "augmented": "retrained with tilted, labelled images, `augmented`",
    "last-layer": "last layer refitted on the same, `last-layer`",
    "tta-mean": "test-time augmentation, mean, `tta-mean`",
    "tta-max": "test-time augmentation, max, `tta-max`",
    "energy": "arg-max energy over 17 rotations, `energy`",
    "paper3": "the paper's ITS³, as printed, `paper3`",
    "default": "`ITS` with three levels, not fitted: cautious gate, `default`",
    "joint": "the joint search, not fitted, no gate, `joint`",
    "accurate": "**`accurate()` + `fit`**, no gate, `accurate`",
    "accurate+gate": "**`accurate()` + `fit`**, `accurate+gate`",
    "fast": "`fast()` + `fit`, no gate, `fast`",
    "fast+gate": "`fast()` + `fit`, `fast+gate`",
}
METHOD_COLUMNS = {
    "tilted": ("accuracy", ".1f"),
    "±": ("accuracy_std", ".1f"),
    "quarter": ("quarter_accuracy", ".1f"),
    "nearly": ("nearly_accuracy", ".1f"),
    "upright": ("upright_accuracy", ".1f"),
    "median angle error, °": ("angle_error_deg", ".1f"),
    "views": ("views_per_image", ",.0f"),
    "views, upright": ("upright_views_per_image", ",.0f"),
    "images/s": ("images_per_second", ",.0f"),
}


def methods(report: dict[str, Any]) -> str:
    """Return the table of an evaluation; one network has no spread, and shows an interval over the images instead."""
    several = report["networks"] > 1
    rows = []
    for method, entry in report["methods"].items():
        if method in EARLIER and "conditions" not in report:
            continue
        cells = {name: shown(entry.get(key), form) for name, (key, form) in METHOD_COLUMNS.items()}
        if not several:
            cells["±"] = "{:.1f} to {:.1f}".format(*entry["accuracy_interval"])
        rows.append([NAMED.get(method, f"`{method}`"), *cells.values()])
    head = [name if several or name != "±" else "95 % of draws of images" for name in METHOD_COLUMNS]
    return grid(["method", *head], rows)


def evaluations() -> str:
    """Return every method on every set, with angle errors, views and speed."""
    found = [behind(f"photographs-{name}", f"Photographs, {title}") for name, title in PHOTOGRAPHS.items()]
    found += [behind(f"{name}-fitted", f"{title}, fitted") for name, title in {**SETS, "cifar10": "CIFAR-10"}.items()]
    found += [behind(f"{name}-affine", f"{title}, without a fit") for name, title in SETS.items()]
    return folded("All methods, set by set", "\n\n".join(block for block in found if block))


HEADINGS = {"benchmark-cpu": "On a CPU", "benchmark-gpu": "On a GPU"}


def benchmarks() -> str:
    """Return what results/benchmark-*.json say, or that there is none."""
    found = [path.stem for path in sorted(RESULTS.glob("benchmark-*.json"))]
    if not found:
        return f'!!! note "{NEVER}"\n    No results/benchmark-….json is stored. The commands above write them.'
    titles = {name: HEADINGS.get(name, words(name.removeprefix("benchmark-")).capitalize()) for name in found}
    pictures = {
        name: f"![How the cost grows, {title[0].lower()}{title[1:]}](../results/{name}.png)"
        for name, title in titles.items()
        if (RESULTS / f"{name}.png").exists()
    }
    first = next(iter(pictures), "")  # one is enough for a screen; the others lie with their figures
    parts = [pictures.get(first, "")]
    for name, title in titles.items():
        body = file_block(name, title).partition("\n\n")[2]
        parts.append(
            folded(f"{title}: all figures", "\n\n".join([*([] if name == first else [pictures.get(name, "")]), body]))
        )
    return "\n\n".join(part for part in parts if part)


def tested() -> str:
    """Return what the hardening commands stored, one section each, and which have not been run in full yet."""
    parts = [file_block(name, title) for name, title in HARDENING.items()]
    missing = [title.lower() for name, title in HARDENING.items() if stored(name) is None]
    if missing:
        parts.append(f'!!! note "{NEVER}"\n    No figures are stored for: {", ".join(missing)}.')
    return "\n\n".join(part for part in parts if part)


def plain(value: float) -> str:
    """Return a number without an exponent: whole from ten on, two digits that count below."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.{max(1, 1 - math.floor(math.log10(value)))}f}"


def costs() -> str:
    """Return what a million images cost, from measured speeds of decoding and searching."""
    batch, photos = stored("batch") or {}, stored("photos") or {}
    digits = batch.get("decode_images_per_second")
    cases = [("MNIST, the paper's small CNN, 17 rotations", digits, batch.get("hardware"), batch, "search", 17.0)]
    report, decode = stored("digits-fitted") or {"methods": {}}, photos.get("decode_images_per_second")
    entry = report["methods"].get("accurate+gate", {})
    title = "digits, the same CNN, fitted `accurate()`"
    cases.append((title, digits, report.get("hardware"), entry, "", entry.get("views_per_image")))
    cases.append(("photographs, MobileNetV2, 17 rotations", decode, photos.get("hardware"), photos, "search", 17.0))
    fastest = stored("benchmark-gpu") or {"networks": {}, "machine": None}
    for network, title, decoding in (
        ("small CNN", "28 × 28, the same small CNN", digits),
        ("large CNN", "32 × 32, the paper's large CNN", digits),
        ("MobileNetV2", "photographs, MobileNetV2", decode),
    ):
        found = fastest["networks"].get(network)
        if found is not None:
            rate = {"images_per_second": found["images_per_second"]["fast"]["median"]}
            views = found["views_per_image"]["fast"]
            cases.append((f"{title}, a lattice of {views:.0f} views", decoding, fastest["machine"], rate, "", views))
    rows = []
    for title, decoding, machine, entry, prefix, views in cases:
        rate = entry.get(f"{prefix}_images_per_second".lstrip("_"))
        if rate is None or decoding is None:
            continue
        on_gpu = bool((machine or {}).get("gpu"))
        hours = 1e6 / 3600 / rate + (0 if on_gpu else 1e6 / 3600 / decoding)
        cores = f"{rate / decoding:,.0f}" if on_gpu else NOTHING
        where = machine["gpu"] if on_gpu else "one core"
        rows.append([title, where, f"{views:,.0f}", plain(rate), plain(hours), cores])
    head = ["", "on", "views per image", "search, images/s", "hours per million", "cores to feed it"]
    return grid(head, rows)


def budget() -> str:
    """Return how accuracy depends on the number of views, for the lattice and for a full grid."""
    report = stored("budget")
    if report is None:
        return f'!!! note "{NEVER}"\n    No results/budget.json is stored.'
    sets = report["datasets"]
    kinds = next(iter(sets.values()))["searches"]
    sides = " × ".join(map(str, report["grid"]))
    rows = [
        [f"{kind} views" if kind.startswith("lattice") else f"{kind} views ({sides})"]
        + [
            "{accuracy:.1f} ± {accuracy_std:.1f} ({upright_accuracy:.1f})".format(**one["searches"][kind])
            for one in sets.values()
        ]
        for kind in kinds
    ]
    head = ["tilted (upright), %", *(f"{SETS[name]}, {one['count']:,} images" for name, one in sets.items())]
    return f"{grid(head, rows)}\n\n{provenance('budget', report)}"


SHOWN_CONFUSIONS = 6


def confused() -> str:
    """Return which signs the fitted search takes for which, most often first."""
    report = stored("gtsrb-confusions")
    if report is None:
        return f'!!! note "{NEVER}"\n    No results/gtsrb-confusions.json is stored.'
    pairs = report["most_confused"]["accurate"][:SHOWN_CONFUSIONS]
    rows = [[true, said, f"{share:.2f}"] for true, said, share in pairs]
    wrong = 100 - report["methods"]["accurate"]["accuracy"]
    head = ["tilted sign", "taken for", f"% of all tilted signs ({wrong:.1f} are wrong in all)"]
    return f"{grid(head, rows)}\n\n{provenance('gtsrb-confusions', report)}"


def promise() -> str:
    """Return how well the promise was kept over many fits, and what so many fit images give."""
    report, large = stored("promise"), stored("promise-large")
    if report is None:
        return f'!!! note "{NEVER}"\n    No results/promise.json is stored.'
    head = ["promise", "fits", "mean loss", "worst loss", "over the promise by more than chance"]
    rows = [
        [
            size,
            str(one["fits"]),
            f"{one['mean_loss']:.2f}",
            f"{one['worst_loss']:.2f}",
            str(one["over_by_more_than_chance"]),
        ]
        for size, one in report["promises"].items()
    ]
    accuracy: dict[str, dict[str, Any]] = {}
    for part in (report, large or {"accuracy": {}}):
        for dataset, sizes in part["accuracy"].items():
            accuracy.setdefault(dataset, {}).update(sizes)
    sizes = sorted({int(size) for row in accuracy.values() for size in row})

    def entry(one: dict[str, float] | None) -> str:
        if one is None:
            return NOTHING
        spread = f"{one['accuracy']:.1f} ± {one['accuracy_std']:.1f}"
        return f"{spread} / {one['quarter_accuracy']:.1f} / {one['upright_accuracy']:.1f}"

    cells = {dataset: [entry(row.get(str(size))) for size in sizes] for dataset, row in accuracy.items()}
    table = grid(["fit images", *(f"{size:,}" for size in sizes)], [[name, *row] for name, row in cells.items()])
    return "\n\n".join(
        [
            grid(head, rows),
            "![Points of upright accuracy lost in each fit](../results/promise.png)",
            "What so many fit images give at a promise of 0.5, default recipe, gated: tilted ± spread over networks / "
            "quarter turns / upright, in %.",
            table,
            provenance("promise", report),
        ]
    )


BLOCKS = {
    "audit": audit,
    "audit-mixtures": audit_mixtures,
    "task": task,
    "tasks": tasks,
    "promise": promise,
    # A number stays beside its spread.
    "affine": lambda: re.sub(r"(?<=\d) (?=[±(])|(?<=±) ", "\u00a0", affine_table()),
    "brief": brief_table,
    "headline": headline,
    "reproduce": reproduce,
    "front": front,
    "spreads": spreads,
    "evaluations": evaluations,
    "benchmarks": benchmarks,
    "tested": tested,
    "costs": costs,
    "confused": confused,
    "budget": budget,
}
