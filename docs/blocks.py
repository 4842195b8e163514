"""Blocks of a page that are made from stored results: tables, verdicts, pictures."""

from __future__ import annotations

import math
import re
from typing import Any

from everyday import audit, audit_mixtures, task, tasks
from figures import NAMES, NEVER, NOTHING, RESULTS, SETS, affine_table, bold, brief_table, headline, shown, stored
from reproduction import front, reproduce, spreads
from tabular import folded, grid, provenance, scalars, without, words

# Long lists, for which the file itself is the place.
DETAILS = {"stages", "targets", "files", "survivors", "explained_as_equivalent", "tests", "replies_to_attackers"} | {
    "memory_after_by_process_mb", "memory_before_by_process_mb", "files_after_each_kill", "pythons",
}  # fmt: skip
ABOUT = {"command", "commit", "versions", "hardware", "machine", "date", "name", "title", "paper", "notes"}
HARDENING = {
    "hardening-fuzz": "Fuzzing",
    "hardening-crossings": "Every pair of settings",
    "hardening-siege": "Attacks on service and batch",
    "hardening-kills": "Batches killed, a node lost, a full disk",
    "hardening-mutate": "Mutation testing",
    "hardening-faults": "Fault injection",
    "hardening-memory": "Running out of memory",
    "hardening-pythons": "Versions of Python",
    "hardening-audit": "Known vulnerabilities",
    "hardening-release": "The release",
}


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
    parts = [grid(head, rows), "Below 1, the search is faster per view than the model called on the same views."]
    if naive:
        parts.append(grid(["network", "dropout passes", "times faster than the naive way"], naive))
    new = [
        f"{one['new_sizes']['headtilt_seconds']:.2f} s instead of {one['new_sizes']['bare_seconds']:.2f} s ({network})"
        for network, one in networks.items()
        if "new_sizes" in one
    ]
    if new:
        numbers = next(one["new_sizes"]["numbers"] for one in networks.values() if "new_sizes" in one)
        parts.append(
            "A GPU plans its convolutions anew for each new number of views. With a gate it changes with every batch. "
            "headtilt pads the views to one of few numbers, so that little planning is left. Time for "
            f"{numbers} new numbers of views, compared with the bare model: {', '.join(new)}."
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
    return (
        [f"Same labels as without optimisations, on {count:,} images: {', '.join(parts)}."] if parts and count else []
    )


PHOTOGRAPHS = {"mobilenet_v2": "MobileNetV2", "vit_tiny": "ViT-Ti/16", "efficientnet_lite0": "EfficientNet-Lite0"}
# Rows of stored files that an earlier way to fit had made.
EARLIER = {
    *("bias", "balanced", "balanced+gate", "head", "head-features", "head-features+gate", "knn", "prototype"),
    *("fast", "fast+gate"),
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


def named(method: str) -> str:
    """Return the name of a method, and what it is called on the command line."""
    return f"{bold(NAMES[method])}, `{method}`" if method in NAMES else f"`{method}`"


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
        rows.append([named(method), *cells.values()])
    head = [name if several or name != "±" else "95 % interval over images" for name in METHOD_COLUMNS]
    return grid(["method", *head], rows)


def evaluations() -> str:
    """Return every method on every set, with angle errors, views and speed."""
    found = [behind(f"photographs-{name}", f"Photographs, {title}") for name, title in PHOTOGRAPHS.items()]
    found += [behind(f"{name}-fitted", f"{title}, fitted") for name, title in {**SETS, "cifar10": "CIFAR-10"}.items()]
    found += [behind(f"{name}-affine", f"{title}, without a fit") for name, title in SETS.items()]
    words = (
        "The name in code type is what `headtilt evaluate --method` takes. *quarter*: turned by exactly 90°, 180° or "
        "270°. *nearly*: upright except for a few degrees. Compare speeds only within one table: other tables may come "
        "from other machines."
    )
    return folded("Accuracy of all methods, for each data set", "\n\n".join([words, *(one for one in found if one)]))


HEADINGS = {"benchmark-cpu": "What a search costs, on a CPU", "benchmark-gpu": "What a search costs, on a GPU"}
HOW_TIMED = (
    "The variants take turns, so that other work on the machine affects all of them alike. A figure is the median over "
    "the turns, with quartiles in brackets. M is the number of dropout passes of the paper's ITS³. The naive way is "
    "the search as the public code does it."
)


def benchmarks() -> str:
    """Return what results/benchmark-*.json say, or that there is none."""
    found = [path.stem for path in sorted(RESULTS.glob("benchmark-*.json"))]
    if not found:
        return f'!!! note "{NEVER}"\n    No results/benchmark-….json is stored. The commands above write them.'
    titles = {name: HEADINGS.get(name, words(name.removeprefix("benchmark-")).capitalize()) for name in found}
    parts = []
    for name, title in titles.items():
        picture = f"![{title}](../results/{name}.png)" if (RESULTS / f"{name}.png").exists() else ""
        body = file_block(name, title).partition("\n\n")[2]
        parts.append(folded(title, "\n\n".join(part for part in (HOW_TIMED, picture, body) if part)))
    return "\n\n".join(parts)


def tested() -> str:
    """Return what the hardening commands stored, each behind a line, and which have not been run in full yet."""
    parts = [behind(name, title) for name, title in HARDENING.items()]
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
    head = ["", "on", "views per image", "search, images/s", "hours per million", "cores to decode for it"]
    return grid(head, rows)


def budget() -> str:
    """Return how accuracy depends on the number of views, for the lattice and for a full grid."""
    report = stored("budget")
    title = "How many views it takes"
    if report is None:
        return folded(title, f"{NEVER}: no results/budget.json is stored.")
    words = (
        "The joint search spreads its views evenly over the product of all groups. A full grid needs several views "
        "along each group: 24 rotations, 3 scales and 3 shears are 216 views. Both use the same fitted head, the same "
        "images and five networks, without a gate."
    )
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
    return folded(title, f"{words}\n\n{grid(head, rows)}\n\n{provenance('budget', report)}")


SHOWN_CONFUSIONS = 6


def confused() -> str:
    """Return which signs the fitted search takes for which, most often first."""
    report = stored("gtsrb-fitted")
    if report is None:
        return f'!!! note "{NEVER}"\n    No results/gtsrb-fitted.json is stored.'
    pairs = report["most_confused"]["accurate"][:SHOWN_CONFUSIONS]
    rows = [[true, said, f"{share:.2f}"] for true, said, share in pairs]
    wrong = 100 - report["methods"]["accurate"]["accuracy"]
    head = ["tilted sign", "taken for", f"% of all tilted signs ({wrong:.1f} are wrong in all)"]
    return f"{grid(head, rows)}\n\n{provenance('gtsrb-fitted', report)}"


def kept(size: str, parts: list[dict[str, Any]]) -> list[str]:
    """Return the row of a promise: fits, mean and worst loss, fits clearly over it; of several studies as of one."""
    fits = sum(one["fits"] for one in parts)
    mean = sum(one["fits"] * one["mean_loss"] for one in parts) / fits
    worst, over = max(one["worst_loss"] for one in parts), sum(one["over_by_more_than_chance"] for one in parts)
    return [size, str(fits), f"{mean:.2f}", f"{worst:.2f}", str(over)]


def promise() -> str:
    """Return how well the promise was kept over many fits, and what so many fit images give."""
    report = stored("promise")
    if report is None:
        return f'!!! note "{NEVER}"\n    No results/promise.json is stored.'
    head = ["promise", "fits", "mean loss", "worst loss", "fits clearly over the promise"]
    large = stored("promise-large")
    studies = [report, *([large] if large is not None and large["commit"] == report["commit"] else [])]
    rows = [
        kept(size, [one["promises"][size] for one in studies if size in one["promises"]]) for size in report["promises"]
    ]
    accuracy: dict[str, dict[str, Any]] = {}
    others = (stored(name) for name in ("promise-large", "promise-cifar10"))
    for part in (report, *(other for other in others if other is not None)):
        for dataset, sizes in part["accuracy"].items():
            accuracy.setdefault(dataset, {}).update(sizes)
    for name in ("photographs-mobilenet_v2-100", "photographs-mobilenet_v2-300", "photographs-mobilenet_v2"):
        if (one := stored(name)) is not None:
            row = accuracy.setdefault("photographs, MobileNetV2", {})
            row[str(one["fit_images"])] = one["methods"]["accurate+gate"]
    sizes = sorted({int(size) for row in accuracy.values() for size in row})

    def entry(one: dict[str, float] | None) -> str:
        if one is None:
            return NOTHING
        spread = f" ± {one['accuracy_std']:.1f}" if one.get("accuracy_std") else ""  # one network has none
        return f"{one['accuracy']:.1f}{spread} / {one['quarter_accuracy']:.1f} / {one['upright_accuracy']:.1f}"

    cells = {dataset: [entry(row.get(str(size))) for size in sizes] for dataset, row in accuracy.items()}
    table = grid(["fit images", *(f"{size:,}" for size in sizes)], [[name, *row] for name, row in cells.items()])
    return "\n\n".join(
        [
            grid(head, rows),
            "![Points of upright accuracy lost in each fit](../results/promise.png)",
            "Accuracy in % by number of fit images, with a promise of 0.5 and the default recipe: tilted ± spread over "
            "networks / quarter turns / upright.",
            table,
            provenance("promise", report),
            "CIFAR-10, and 1,000 images or more: [promise-cifar10.json](../results/promise-cifar10.json), "
            "[promise-large.json](../results/promise-large.json). Photographs: one network, 1,000 test images. "
            "In the other rows the search still looked at more views, and on CIFAR-10 the gate had an earlier rule. "
            "Of the digits there are 990 fit images in all.",
        ]
    )


# What the peers of results/peers.json are called; those of others have their words in the file.
PEERS = {
    "bare": NAMES["vanilla"],
    "public": f"{NAMES['paper3']}, public code",
    "unfitted": bold(NAMES["default"]),
    "fast": bold(NAMES["fast+gate"]),
    "accurate": bold(NAMES["accurate+gate"]),
    "oracle": NAMES["oracle"],
}


def peers() -> str:
    """Return headtilt beside other methods: the picture and the table."""
    report = stored("peers")
    if report is None:
        return NEVER
    head = ["", "turned", "quarter", "upright", "views", "images/s"]
    parts = [
        "The same networks and images in one run, on one core; the methods take turns. Images are turned by any angle, "
        f"neither scaled nor sheared. headtilt was fitted on {report['fit_images']:,} unlabelled images, with the "
        "default recipe.",
        "![Accuracy on turned images against images per second](../results/peers.png)",
    ]
    for name, rows in report["sets"].items():
        table = []
        for peer, row in rows.items():
            accuracies = [f"{row[key]:.1f} ± {row[f'{key}_std']:.1f}" for key in ("tilted", "quarter", "upright")]
            table.append(
                [PEERS.get(peer, row["words"]), *accuracies, f"{row['views']:.0f}", f"{row['images_per_second']:,.0f}"]
            )
        parts.append(f"**{SETS.get(name, name)}**\n\n{grid(head, table)}")
    return folded("headtilt and other methods", "\n\n".join([*parts, provenance("peers", report)]))


def startup() -> str:
    """Return how long people wait before the first view."""
    report = stored("startup")
    if report is None:
        return NEVER
    rows = []
    for name, taken in report["seconds"].items():
        cells = [taken.get(kind) for kind in ("processor", "clock")]
        rows.append([name, *(NOTHING if one is None else f"{one['median']:.2f}" for one in cells)])
    table = grid(["seconds, median of " + str(report["runs"]), "processor time", "by the clock"], rows)
    return folded("Start-up time", f"{table}\n\n{provenance('startup', report)}")


def method_names() -> str:
    """Return what every method is called, on pages and on the command line."""
    return grid(["name", "command line, JSON"], [[bold(name), f"`{method}`"] for method, name in NAMES.items()])


BLOCKS = {
    "methods": method_names,
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
    "peers": peers,
    "startup": startup,
}
