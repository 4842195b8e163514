"""What every report needs: where it was measured, files written whole, and a table for the terminal."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import headtilt
from headtilt import plot
from headtilt.errors import MissingExtraError
from headtilt.io.files import cache_folder, written_whole
from headtilt.paper.data import NAMES, cifar
from headtilt.paper.data.fetch import data_folders, find
from headtilt.paper.data.gtsrb import PLACES
from headtilt.paper.data.idx import SETS, file_names, spellings
from headtilt.paper.experiments.methods import ORACLE
from headtilt.sources import zoo

if TYPE_CHECKING:
    from rich.table import Table

BARS = ("accuracy", "accuracy_std", "upright_accuracy")
DIGITS = 4  # decimals kept in files: far below any spread, and the same number when read back


def metadata(command: str) -> dict[str, Any]:
    """Return where and with what something was measured: command, commit, versions, hardware, date."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": command,
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "headtilt": headtilt.__version__,
        },
        "hardware": {"cpu": cpu_model(), "threads": torch.get_num_threads(), "gpu": gpu},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Return the commit of the source that runs, with "+" where files of it were changed since; None where unknown.

    A copy without its history is told by the variable HEADTILT_COMMIT.
    """
    source = Path(headtilt.__file__).parent
    if told := os.environ.get("HEADTILT_COMMIT"):
        return told
    # A package that is installed beside somebody else's history is no part of it.
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(source, "rev-parse", "HEAD")
    changed = _git(source, "status", "--porcelain", "--", ".")
    return None if head is None else f"{head}{'+' if changed else ''}"


def changed_since(known: str) -> list[str]:
    """Return the rooms of the source that were changed since a commit; none where that cannot be told."""
    source = Path(headtilt.__file__).parent
    said = _git(source, "diff", "--name-only", "--relative", known.rstrip("+"), "--", ".")
    return sorted({line.split("/")[0].removesuffix(".py") for line in (said or "").splitlines()})


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says, None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


MADE = "made.json"  # in a bundle's folder: how it was made


def note_origin(bundle: Path, command: str) -> None:
    """Write into a bundle's folder which command made it, and where."""
    write_json(bundle / MADE, metadata(command))


def origin_of(bundle: Path) -> dict[str, Any] | None:
    """Return what `note_origin` wrote, None for a bundle that was made otherwise."""
    path = bundle / MADE
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def cpu_model() -> str:
    """Return what the processor calls itself."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def plain(value: Any) -> Any:
    """Return the value as JSON knows it: floats rounded, None for what is not finite, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def to_json(value: Any) -> str:
    """Return the value as one JSON object, readable and without NaN."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> Path:
    """Write the value as JSON, whole or not at all, and return the path; missing folders are made."""
    with written_whole(path) as unfinished:
        unfinished.write_text(to_json(value) + "\n", encoding="utf-8")
    return path


def table(report: Mapping[str, Any]) -> Table:
    """Return what `Evaluation.run` returned as a table for the terminal: the best is bold, losses are marked."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    methods: Mapping[str, Mapping[str, float | None]] = report["methods"]
    where = f"{report['dataset']} · {report['perturb']} · {report['count']:,} {report['split']} images"
    drawn = Table(
        title=f"{where} · {networks(report)}",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,  # the box has a space between columns, and a terminal is 80 wide
    )
    drawn.add_column("method", no_wrap=True)
    for heading in ("tilted", "", "quarter", "nearly", "upright", "angle", "views", "img/s"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    bare = methods.get("vanilla", {}).get("accuracy") or 0.0
    # The oracle is the ceiling, not a contender.
    best = max((entry["accuracy"] or 0.0 for name, entry in methods.items() if name != ORACLE), default=0.0)
    lost = [name for name, entry in methods.items() if (entry["accuracy"] or 0.0) < bare]
    for name, entry in methods.items():
        drawn.add_row(
            name,
            spread(entry, "accuracy", report["networks"]),
            "▼" if name in lost else "",
            number(entry["quarter_accuracy"], "{:.1f}"),
            number(entry["nearly_accuracy"], "{:.1f}"),
            number(entry["upright_accuracy"], "{:.1f}"),
            number(entry["angle_error_deg"], "{:.1f}°"),
            number(entry["views_per_image"], "{:.1f}"),
            number(entry["images_per_second"], "{:,.0f}"),
            style=look(name, entry["accuracy"] == best, name in lost),
        )
    drawn.caption = "\n".join(captions(report, bool(lost)))
    return drawn


def look(name: str, best: bool, lost: bool) -> str:
    """Return how the row of a method is printed."""
    if name == ORACLE:
        return "dim"
    return "red" if lost else "bold green" if best else ""


def captions(report: Mapping[str, Any], lost: bool) -> list[str]:
    """Return what a reader of the table must know."""
    said = ["accuracy in %; quarter: turned by exactly 90°, 180° or 270°; nearly: upright to ± 3°"]
    said.append("angle: median error of the estimated rotation of tilted images")
    if report["networks"] > 1:
        said[-1] += "; ±: over networks"
    if "quarter" not in report["conditions"]:
        said.append("no quarter turns: only where images are square and turned by any angle")
    return [*said, "▼ below the bare model on tilted images"] if lost else said


def write(folder: Path, report: Mapping[str, Any], name: str | None = None) -> list[Path]:
    """Write the report as JSON, its bars and, where it has them, its curves; return the files.

    Args:
        folder: For the files.
        report: What `Evaluation.run` returned, with `metadata`.
        name: Of the JSON file without its ending, for numbers that something else reads; no pictures are drawn then.
    """
    if name is not None:
        return [write_json(folder / f"{name}.json", report)]
    title = f"{Path(report['dataset']).resolve().name}, {report['perturb']}"
    models = "".join(f"-{name}" for name in report.get("models", ()))
    stem = re.sub(r"[^\w.+-]+", "-", f"{title}{models}-seed{report['seed']}")
    many = f"{report['count']:,} images, {networks(report)}"
    paths = [write_json(folder / f"{stem}.json", report)]
    paths.append(
        plot.save(
            plot.bars(fractions(report), title=title, xlabel=f"accuracy (%), {many}"), folder / f"{stem}-bars.png"
        )
    )
    if "angles" in report:
        curves = {
            method: (report["angles"], [statistics.fmean(at) / 100 for at in zip(*found, strict=True)])
            for method, found in report["accuracy_at_angle"].items()
        }
        paths.append(plot.save(plot.angle_curve(curves, title=f"{title}: {many}"), folder / f"{stem}-angles.png"))
    return paths


def fractions(report: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the accuracies as `plot.bars` wants them; a single network has no spread."""
    fields = [field for field in BARS if field != "accuracy_std" or report["networks"] > 1]
    return {
        method: {field: None if entry[field] is None else entry[field] / 100 for field in fields}
        for method, entry in report["methods"].items()
    }


def number(value: float | None, form: str) -> str:
    """Return the number in that form, or a dash where there is none."""
    return "–" if value is None else form.format(value)


def networks(report: Mapping[str, Any]) -> str:
    """Return how many networks there were, in words."""
    return f"{report['networks']} network{'s' if report['networks'] > 1 else ''}"


def spread(entry: Mapping[str, float | None], field: str, networks: int) -> str:
    """Return a mean, with the standard deviation over networks where there are several."""
    mean = number(entry[field], "{:.1f}")
    return mean if networks < 2 else f"{mean} ± {number(entry[f'{field}_std'], '{:.1f}')}"


def extras() -> dict[str, list[tuple[str, str | None]]]:
    """Return the packages of each extra with their installed version, None where one is missing."""
    found: dict[str, list[tuple[str, str | None]]] = {}
    for line in packages.requires("headtilt") or []:
        match = re.match(r"""([\w.-]+)\b(?:\[[^\]]*\])?[^;]*;\s*extra\s*==\s*['"]([\w-]+)['"]""", line)
        if match and match[1] != "headtilt" and match[2] != "dev":
            found.setdefault(match[2], []).append((match[1], version(match[1])))
    return found


def version(package: str) -> str | None:
    """Return the installed version of a package, None where it is missing."""
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """Return the devices that torch can use here, in words."""
    found = [f"cpu: {cpu_model()}, {torch.get_num_threads()} threads"]
    found += [f"cuda:{index}: {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def data_found(folders: list[Path] | None = None) -> dict[str, str | None]:
    """Return where each data set lies, None where it is not found."""
    places = data_folders(folders)
    files = {
        name: [f"{inside}/{spelling}" for inside in known.folders for spelling in spellings(file_names("test")[0])]
        for name, known in SETS.items()
    }
    candidates = {
        **files,
        "gtsrb": list(PLACES["test"]),
        "cifar10": list(cifar.PLACES["test"]),
        "imagenet-mini": ["imagenet-mini"],
    }
    found: dict[str, str | None] = {}
    for name in NAMES:
        if name == "digits":
            found[name] = "comes with scikit-learn" if version("scikit-learn") else None
            continue
        place = find(candidates[name], places)
        found[name] = None if place is None else str(place if place.is_dir() else place.parent)
    return found


def zoo_found() -> dict[str, list[str]]:
    """Return which trained networks are there: "packaged" and "cached"."""
    try:
        cached = sorted((cache_folder() / "zoo").glob("[!.]*.safetensors"))
    except MissingExtraError:
        cached = []
    packaged = sorted(zoo.PACKAGED.glob("*.safetensors"))
    return {"packaged": [path.stem for path in packaged], "cached": [path.stem for path in cached]}
