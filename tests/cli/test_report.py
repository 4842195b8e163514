"""Reports: JSON that can be read back, files that are whole, and where they come from."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich import console as rich_console

from headtilt.paper.experiments import report


def test_numbers_are_the_same_when_read_back():
    value = {"a": 1 / 3, "b": (1, 2.0), "c": float("nan"), "d": None, 5: "ü", "e": float("inf"), "f": Path("x")}
    read = json.loads(report.to_json(value))
    assert read == {"a": 0.3333, "b": [1, 2.0], "c": None, "d": None, "5": "ü", "e": None, "f": "x"}
    assert json.loads(report.to_json(read)) == read


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = report.write_json(tmp_path / "new" / "report.json", {"kept": 1})
    with pytest.raises(TypeError):
        report.write_json(path, {"broken": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"kept": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_metadata_says_where_it_was_measured():
    found = report.metadata("headtilt evaluate digits")
    assert found["command"] == "headtilt evaluate digits"
    assert found["versions"]["torch"] == torch.__version__
    assert found["hardware"]["threads"] == torch.get_num_threads()
    assert found["hardware"]["cpu"]


def test_extras_are_those_of_the_package():
    found = report.extras()
    assert {"cli", "plot", "data"} <= set(found)
    assert {name for name, _ in found["cli"]} >= {"typer", "rich"}
    assert {name for name, _ in found["ray"]} >= {"ray"}  # which has an extra of its own, in brackets
    assert not any(name == "headtilt" for packages in found.values() for name, _ in packages)
    assert "dev" not in found


def measured(*names: str, quarter: float | None = 70.0, networks: int = 1, **accuracies: float) -> dict[str, object]:
    entry = {"accuracy_std": 1.0, "quarter_accuracy": quarter, "nearly_accuracy": 80.0, "upright_accuracy": 90.0}
    entry |= {"angle_error_deg": 12.0, "views_per_image": 216.0, "images_per_second": 12345.0}
    return {
        "dataset": "digits",
        "perturb": "affine",
        "count": 2000,
        "split": "test",
        "networks": networks,
        "conditions": ["tilted", "upright", "nearly", *(["quarter"] if quarter is not None else [])],
        "methods": {name: {**entry, "accuracy": accuracies.get(name, 50.0)} for name in names},
    }


def printed(found: dict[str, object]) -> str:
    console = rich_console.Console(width=80, record=True, file=io.StringIO())
    console.print(report.table(found))
    return console.export_text()


def test_the_table_fits_a_narrow_terminal_whatever_the_method_is_called():
    text = printed(measured("vanilla", "head-features+gate", networks=5))
    assert "…" not in text
    row = next(line for line in text.splitlines() if "head-features+gate" in line)
    assert row.split() == ["head-features+gate", "50.0", "±", "1.0", "70.0", "80.0", "90.0", "12.0°", "216.0", "12,345"]


def test_the_oracle_is_no_contender():
    rows = report.table(measured("vanilla", "oracle", "fast", oracle=99.0, fast=60.0)).rows
    assert [row.style for row in rows] == ["", "dim", "bold green"]
    assert report.table(measured("oracle")).rows[0].style == "dim"


def test_the_table_says_where_there_are_no_quarter_turns():
    text = printed(measured("vanilla", quarter=None))
    assert "no quarter turns" in text
    assert "–" in next(line for line in text.splitlines() if "vanilla" in line)
    assert "no quarter turns" not in printed(measured("vanilla"))
