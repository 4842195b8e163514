"""`headtilt demo`: a table with a real gain, honest marks, and three pictures."""

from __future__ import annotations

import json
import re

import pytest

from headtilt.paper.experiments.demo import Row, Size, summary
from headtilt.paper.experiments.demo_text import BARE, OURS, verdict
from tests.toys import whole_fits

for needed in ("matplotlib", "sklearn", "safetensors"):
    pytest.importorskip(needed)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The quick demo, run once."""
    from typer.testing import CliRunner

    from headtilt.cli import app

    out = tmp_path_factory.mktemp("demo") / "pictures"
    with whole_fits(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("HEADTILT_CACHE", str(out.parent / "cache"))
        patch.delenv("HEADTILT_DATA", raising=False)
        result = CliRunner().invoke(app, ["demo", "--quick", "--device", "cpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return result, out, json.loads((out / "demo.json").read_text(encoding="utf-8"))


def test_it_gains_on_tilted_digits_and_keeps_upright_ones(demo):
    _, _, report = demo
    bare, ours = report["methods"][BARE], report["methods"][OURS]
    assert bare["accuracy"] < 50
    assert ours["accuracy"] > 90
    assert ours["upright_accuracy"] >= bare["upright_accuracy"] - 1
    assert ours["accuracy"] > max(entry["accuracy"] for name, entry in report["methods"].items() if name != OURS)
    assert ours["views_per_image"] <= 72


def test_the_table_shows_what_the_report_holds(demo):
    result, _, report = demo
    assert len(report["methods"]) == 7
    for name, entry in report["methods"].items():
        line = next(line for line in result.stdout.splitlines() if name in line)
        assert f"{entry['accuracy']:.1f}" in line
        assert f"{entry['right']}/{report['count']}" in line
        assert f"{entry['upright_accuracy']:.1f}" in line
        assert ("▼" in line, "▽" in line) == ("tilted" in entry["loses"], "upright" in entry["loses"])
    assert "…" not in result.stdout, "nothing is cut off"


def test_it_says_why_and_shows_one_digit_in_words(demo):
    result, _, _ = demo
    said = " ".join(result.stdout.split())
    assert "energy prefers some classes in any pose" in said
    words = re.search(
        r"turned by [+−]\d+\.\d°[^→]*→ digit (\d) \(\d+\.\d%\), \d+ views.* in truth: .*?, digit (\d)", said
    )
    assert words[1] == words[2], "the digit shown is one that the search gets right"


def test_it_writes_the_pictures_and_names_them(demo):
    result, out, _ = demo
    names = {"accuracy.png", "before-after.png", "search.png", "demo.json"}
    assert {path.name for path in out.iterdir()} == names
    for path in out.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
    assert all(name in result.stdout for name in names)


def test_nothing_is_fetched_or_kept_elsewhere(demo):
    _, out, _ = demo
    assert not (out.parent / "cache").exists()


def test_losses_are_counted_over_all_networks_and_said():
    rows = {
        BARE: [Row(40, 99, 1, 1.0, 0.0), Row(30, 98, 1, 1.0, 0.0)],
        "worse": [Row(45, 99, 17, 1.0, 0.0), Row(20, 98, 17, 1.0, 0.0)],
        "costly": [Row(90, 97, 17, 1.0, 0.0), Row(90, 98, 17, 1.0, 0.0)],
        OURS: [Row(95, 98, 54, 2.0, 3.0), Row(97, 98, 54, 4.0, 5.0)],
    }
    report = summary(rows, Size(2, 100, 10, None), 100)
    assert {name: entry["loses"] for name, entry in report["methods"].items()} == {
        BARE: [],
        "worse": ["tilted"],
        "costly": ["upright"],
        OURS: [],
    }
    ours = report["methods"][OURS]
    assert (ours["accuracy"], ours["ms_per_image"], ours["fit_seconds"]) == (96, 30, 4)
    assert ours["accuracy_std"] == pytest.approx(2**0.5), "of a sample: 95 and 97"
    tilted, upright, _ = verdict(report)
    assert tilted.endswith("worse.")
    assert upright.endswith("costly.")
