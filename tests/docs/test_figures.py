"""Every figure of the documentation comes from a stored result, and what is not measured is said to be so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import blocks
import figures
import pytest
import reproduction
from verdicts import verdict_on

import headtilt
from headtilt.paper.experiments.methods import METHODS
from headtilt.paper.experiments.reproduce import ITEMS, item, table1_rows

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LOOKS_MEASURED = re.compile(r"\d+(?:\.\d+)?\s?%|\b\d{2,}\.\d\b")
# No results: a bar of `top`, and a rule of thumb that follows from the number before it.
ALLOWED = {"docs/scale.md": {"100 %", "5 %"}}
ENTRY = {"accuracy", "accuracy_std", "upright_accuracy", "views_per_image", "upright_views_per_image"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """Return a page without code, places that are filled from results, and what is generated from them."""
    for pattern in (r"^```.*?^```$", figures.PLACE.pattern, r"`[^`\n]*`"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


def test_no_page_holds_a_figure_of_its_own():
    found = {
        name(path): set(LOOKS_MEASURED.findall(prose(path.read_text(encoding="utf-8"))))
        - ALLOWED.get(name(path), set())
        for path in [*PAGES, ROOT / "README.md"]
    }
    assert {page: typed for page, typed in found.items() if typed} == {}


def test_no_line_of_a_paragraph_begins_with_a_figure():
    # Markdown takes a comment at the beginning of a line for the end of the paragraph.
    begins = re.compile(r"^ *<!--= [^>]*-->[^\n]*<!--/-->.*\S", re.MULTILINE)
    found = {name(path): begins.findall(path.read_text(encoding="utf-8")) for path in [*PAGES, ROOT / "README.md"]}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_a_figure_typed_into_a_page_is_found_out():
    assert LOOKS_MEASURED.findall(
        prose("It reaches 97.3 on digits, `98.1` in code, <!--= a.b -->97.2<!--/--> and 12 %.")
    ) == [
        "97.3",
        "12 %",
    ]


def test_every_place_names_a_block_a_stored_figure_or_a_method_that_can_be_measured():
    for match in (match for path in PAGES for match in figures.PLACE.finditer(path.read_text(encoding="utf-8"))):
        where = match["what"].partition(" :")[0].strip()
        if where.split()[0] in blocks.BLOCKS or figures.look_up(where) is not None:
            continue
        file, _, rest = where.partition(".methods.")
        method, _, key = rest.rpartition(".")
        assert file.removesuffix("-affine").removesuffix("-fitted") in figures.SETS, where
        assert method in METHODS, where
        assert key in ENTRY, where


def test_places_are_filled_with_stored_numbers_and_gaps_with_a_dash(tmp_path):
    (tmp_path / "speed.json").write_text('{"rates": [1.25, -3], "ok": true}', encoding="utf-8")
    wanted = ["speed.rates.0 :.1f", "speed.rates.1", "speed.ok", "speed.rates.7", "other.x", "say a b"]
    page = " ".join(f"<!--= {one} -->old<!--/-->" for one in wanted)
    filled = figures.fill(page, {"say": lambda *words: "+".join(words)}, tmp_path)
    assert [match["shown"] for match in figures.PLACE.finditer(filled)] == ["1.2", "−3", "yes", "–", "–", "\na+b\n"]
    assert figures.fill(filled, {"say": lambda *words: "+".join(words)}, tmp_path) == filled


@pytest.mark.parametrize("one", ITEMS)
def test_an_item_that_was_not_run_in_full_is_said_not_to_be_measured(one, monkeypatch):
    monkeypatch.setattr(reproduction, "stored", lambda _: None)
    text = reproduction.reproduce(one)
    assert figures.NEVER in text
    assert f"$ headtilt reproduce {one}" in text
    assert all(claim[1:] in text for claim in item(one).PAPER.get("claims", ()))


def table1_report() -> dict:
    """A small stored table 1: one set, every row with the same figures."""
    module = item("table1")
    accuracy = {"accuracy": {"mean": 81.234, "std": 4.0, "runs": 25}, "over_networks": {"mean": 81.234, "std": 1.06}}
    row = {**accuracy, "frobenius": {"mean": 1.0}}
    names = [*module.PAPER_ROWS, *module.RULES, *table1_rows.PUBLIC, *table1_rows.OWN_ETN, *module.OURS]
    printed = {"as_printed": {"mean": 80.0, "std": 12.0}, "over_networks": {"std": 3.0}}
    mean = dict.fromkeys(module.UNFITTED, 70.0) | {"ITS³, by energy": 81.0}
    spread = {name: {"mean": value, "std": 0.5} for name, value in mean.items()}
    return {
        "quick": False,
        "origin": module.ORIGIN,
        "unfitted": {"rule": "ITS³, by energy", "mean": mean, "validation_accuracy": {"mnist": spread}},
        "results": {"mnist": {"each": dict.fromkeys(names, row), "paper": dict.fromkeys(names, printed)}},
        "verdict": {"goal": "reached"},
        "command": "headtilt reproduce table1",
        "hardware": {"gpu": "a GPU"},
        "date": "2026-01-02T03:04:05",
    }


def test_an_item_that_was_run_shows_its_numbers_its_verdict_and_its_command(monkeypatch):
    report = table1_report()
    monkeypatch.setattr(reproduction, "stored", lambda _: report)
    text = reproduction.reproduce("table1")
    assert "| ITS³ | paper | 88.89 | 81.2 ± 1.1 | 38.47 | – |" in text
    assert "| head | ours | – | 81.2 ± 1.1 | – | – |" in text
    assert "| public code, ITS³ | public code | – | 81.2 ± 1.1 |" in text
    assert "| ITS³ | 88.9 ± 13.9 | 80.0 ± 12.0 | – |" in text
    assert "The best on average is **ITS³, by energy**." in text
    assert "**Not reproduced.** MNIST: ITS³ as printed is -7.7 points from the paper's mean and not above" in text
    assert "-8.9 points off, not within the spread over networks (3.0)" in text
    assert "    | mnist · best of ours | 81.23 |" in text
    assert "goal" not in text  # the verdict is computed from the numbers, whatever is stored
    assert "`headtilt reproduce table1` on a GPU, 2026-01-02" in text
    assert figures.NEVER not in text
    assert "Do not quote" not in text
    monkeypatch.setitem(report, "quick", True)
    assert "Do not quote" in reproduction.reproduce("table1")


def test_numbers_that_todays_code_cannot_read_are_not_shown(monkeypatch):
    report = table1_report()
    del report["unfitted"]
    monkeypatch.setattr(reproduction, "stored", lambda _: report)
    text = reproduction.reproduce("table1")
    assert "was written by earlier code" in text
    assert "81.2" not in text


def test_the_front_page_sets_the_paper_its_code_and_ours_beside_each_other(monkeypatch):
    monkeypatch.setattr(reproduction, "stored", lambda _: table1_report())
    text = reproduction.front()
    assert "| MNIST | 88.9 | 81.2 ± 1.1 | 81.2 ± 1.1 | 81.2 ± 1.1 | 81.2 ± 1.1 |" in text
    assert "| GTSRB | 66.4 | – | – | – | – |" in text
    assert "ITS³, by energy, the best of four rules" in text
    monkeypatch.setattr(reproduction, "stored", lambda _: None)
    assert "| MNIST | 88.9 | – | – | – | – |" in reproduction.front()


def test_the_printed_spreads_stand_beside_those_that_a_short_batch_explains():
    assert "| ITS³ | 88.89 ± 13.86 (13.46) | 38.47 ± 7.77 (7.26) | 66.44 ± 11.48 (10.90) |" in reproduction.spreads()


def test_figures_of_the_printed_rules_are_not_taken_from_files_that_are_older_than_they_are(tmp_path):
    entry = {"accuracy": 84.0}
    for name, more in {"old": {}, "new": {"commit": "1234"}}.items():
        report = {"methods": {"paper3": entry, "energy": entry}, **more}
        (tmp_path / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    assert figures.look_up("old.methods.paper3.accuracy", tmp_path) is None
    assert figures.look_up("old.methods.energy.accuracy", tmp_path) == 84.0
    assert figures.look_up("new.methods.paper3.accuracy", tmp_path) == 84.0


@pytest.mark.parametrize("one", [name for name in ITEMS if (ROOT / "results" / f"{name}.json").exists()])
def test_what_was_run_has_a_verdict_in_words_unless_it_is_pictures(one):
    report = reproduction.judged(item(one), figures.stored(one))
    if report is not None:
        said = verdict_on(one, report)
        assert re.match(r"\*\*(Reproduced|Reproduced in part|Not reproduced)\.\*\* [A-Z]", said) or one == "examples"


@pytest.mark.parametrize("one", ITEMS)
def test_every_item_has_a_page(one):
    assert f"<!--= reproduce {one} -->" in (ROOT / "docs" / "reproduce" / f"{one}.md").read_text(encoding="utf-8")


def test_hardening_that_was_not_run_is_named(monkeypatch):
    monkeypatch.setattr(
        blocks, "stored", lambda name: {"command": "x", "findings": 0} if name == "hardening-fuzz" else None
    )
    text = blocks.tested()
    assert "<summary>Fuzzing</summary>" in text
    assert "| findings | 0 |" in text
    assert "mutation testing" in text.partition(figures.NEVER)[2]


def test_the_papers_figures_are_those_of_its_table():
    published = json.loads((ROOT / "docs" / "published.json").read_text(encoding="utf-8"))["paper"]["accuracy"]
    printed = {name: rows["accuracy"]["ITS³"][0] for name, rows in item("table1").PAPER.items() if name in figures.SETS}
    assert published == printed


def test_the_citation_names_this_version():
    assert f"\nversion: {headtilt.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_a_benchmark_shows_medians_with_quartiles_losses_too(monkeypatch):
    spread = {"median": 1.1789, "low": 1.166, "high": 1.194}
    network = {
        "images_per_second": {"fast": {"median": 298.6, "low": 295.8, "high": 303.2}},
        "over_bare": {},
        "over_bare_channels_last": {"fast": spread},
        "naive": {"passes": 50, "speedup": spread},
    }
    report = {"command": "python x", "machine": {"cpu": "a CPU", "threads": 1}, "networks": {"small CNN": network}}
    monkeypatch.setattr(blocks, "stored", lambda _: report)
    text = blocks.file_block("benchmark-none", "Somewhere")
    assert "| small CNN | fast | 299 (296 to 303) | – | 1.18 (1.17 to 1.19) |" in text
    assert "| small CNN | 50 | 1.18" in text
