"""Every figure in the README comes from a stored result."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "docs"))

import figures  # noqa: E402
import tables  # noqa: E402
from benchmark_picture import is_current  # noqa: E402

# How a result file says on what, with which versions, it was measured.
TOLD = ({"versions", "hardware", "date"}, {"machine"}, {"torch", "threads"})


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_figures_of_a_page_are_up_to_date(page: Path) -> None:
    assert tables.renewed(page) == page.read_text(encoding="utf-8"), "run python docs/tables.py --write"


def test_the_picture_of_the_benchmark_shows_the_stored_figures() -> None:
    assert is_current(), "run python docs/tables.py --write"


def test_the_table_shows_what_the_result_files_hold() -> None:
    assert figures.brief_table() in README
    assert figures.headline() in README
    mnist = figures.stored("mnist-fitted")
    assert (mnist["networks"], mnist["split"]) == (5, "test")
    row = next(line for line in README.splitlines() if line.startswith("| **headtilt**, fitted |"))
    entry = mnist["methods"]["accurate+gate"]
    assert row.split("|")[2].strip() == f"{entry['accuracy']:.1f} ({entry['upright_accuracy']:.1f})"
    assert "| *unlabelled images it was fitted on* | 12,000 |" in README


@pytest.mark.parametrize("dataset", figures.SETS)
def test_a_cell_of_the_large_table_shows_what_the_result_file_holds(dataset: str) -> None:
    reports = {kind: figures.stored(f"{dataset}-{kind}") or {"methods": {}} for kind in ("affine", "fitted")}
    for report in reports.values():
        assert not report["methods"] or (report["networks"], report["split"]) == (5, "test")
    place = list(figures.SETS).index(dataset)
    for label, method, _ in figures.ROWS:
        (line,) = [line for line in figures.affine_table().splitlines() if line.startswith(f"| {label} |")]
        cell = line.split("|")[3 + place].strip()
        entry = reports["fitted" if method in figures.FITTED else "affine"]["methods"].get(method)
        if entry is not None:
            assert cell == f"{entry['accuracy']:.1f} ± {entry['accuracy_std']:.1f} ({entry['upright_accuracy']:.1f})"
        elif not method.startswith("published"):
            assert cell == "–"


def test_the_headline_is_true_wherever_both_were_measured() -> None:
    beaten = figures.headline().partition("does not beat")[0]
    compared = 0
    for dataset, title in figures.SETS.items():
        fitted = (figures.stored(f"{dataset}-fitted") or {"methods": {}})["methods"]
        retrained = (figures.stored(f"{dataset}-affine") or {"methods": {}})["methods"]
        if "accurate+gate" in fitted and "augmented" in retrained:
            compared += 1
            keys = ("accuracy", "upright_accuracy")
            wins = all(fitted["accurate+gate"][key] > retrained["augmented"][key] for key in keys)
            assert wins == (f" on {title}" in beaten), dataset
    assert compared >= 2


def test_every_stored_result_says_how_it_was_made_and_holds_no_machine_path() -> None:
    for path in (ROOT / "results").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        report = json.loads(text)
        assert report["command"].startswith(
            ("headtilt ", "python benchmarks/", "python docs/", "python -m benchmarks.", "python -m hardening.")
        ), path.name
        assert any(keys <= report.keys() for keys in TOLD), path.name
        assert not re.search(r'"[^"]*/(home|root|work|tmp|Users)/', text), path.name


def test_every_link_to_a_file_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", README):
        path = target[0] or target[1]
        if "://" not in path:
            assert (ROOT / path).exists(), path


def test_links_are_absolute_as_soon_as_there_is_an_address() -> None:
    page = '![a cat](docs/a.png) [more](docs/b.md#c) <img src="docs/d.png"> [far](https://x.org) [here](#e)'
    assert tables.absolute(page, "https://code.org/it") == (
        "![a cat](https://code.org/it/raw/HEAD/docs/a.png) [more](https://code.org/it/blob/HEAD/docs/b.md#c) "
        '<img src="https://code.org/it/raw/HEAD/docs/d.png"> [far](https://x.org) [here](#e)'
    )
    assert tables.absolute(tables.absolute(page, "https://code.org/it"), "https://code.org/it").count("code.org") == 3
    assert tables.absolute(page, None) == page


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 100
