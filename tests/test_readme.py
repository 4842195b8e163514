"""Every figure in the README comes from a stored result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    "bare model": "vanilla",
    "test-time augmentation, mean": "tta-mean",
    "test-time augmentation, max": "tta-max",
    "arg-max energy over 17 rotations": "energy",
    "the paper's ITS³, as implemented here": "paper3",
    "**`fit`**, balanced energy alone": "balanced",
    "**`fit`** with `fast()`, no gate": "fast",
    "**`fit`** with `fast()` and its gate": "fast+gate",
}
SETS = ("digits", "mnist", "fashion-mnist", "gtsrb")


def cells(label: str) -> list[str]:
    line = next(line for line in README.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("label", ROWS)
def test_the_table_shows_what_the_result_files_hold(label: str) -> None:
    for dataset, cell in zip(SETS, cells(label), strict=True):
        report = json.loads((ROOT / "results" / f"{dataset}-affine.json").read_text(encoding="utf-8"))
        entry = report["methods"].get(ROWS[label])
        if entry is None:
            assert cell == "–"
            continue
        assert cell == f"{entry['accuracy']:.1f} ± {entry['accuracy_std']:.1f} ({entry['upright_accuracy']:.1f})"
        assert report["networks"] == 5
        assert report["split"] == "test"


def test_every_stored_result_says_how_it_was_made_and_holds_no_machine_path() -> None:
    for path in (ROOT / "results").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        report = json.loads(text)
        assert report["command"].startswith(("headtilt ", "python benchmarks/")), path.name
        assert {"versions", "hardware", "date"} <= report.keys(), path.name
        assert not re.search(r'"[^"]*/(home|root|work|tmp|Users)/', text), path.name


def test_every_link_to_a_file_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
