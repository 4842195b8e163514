"""The figures of docs/scale.md are those of the files under results/."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "scale.md"
sys.path.insert(0, str(ROOT / "docs"))

if not DOC.exists():
    pytest.skip("docs/ is not here", allow_module_level=True)


def stored(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def page():
    """Return the page as it is published, with its figures filled in."""
    import blocks
    import figures

    return re.sub(r"<!--= [^>]* -->|<!--/-->", "", figures.fill(DOC.read_text(encoding="utf-8"), blocks.BLOCKS))


def cells(beginning):
    (line,) = [line for line in page().splitlines() if line.startswith(f"| {beginning} |")]
    return [cell.strip().replace(",", "") for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize(
    ("beginning", "decoding", "searching"),
    [
        ("digits, the same CNN, fitted `accurate()`", stored("batch"), stored("digits-fitted")),
        ("photographs, MobileNetV2, 17 rotations", stored("photos"), stored("photos")),
    ],
    ids=["digits", "photographs"],
)
def test_the_cost_of_a_million_images_follows_from_what_was_measured(beginning, decoding, searching):
    where, views, search, hours, cores = cells(beginning)
    gpu = searching["hardware"]["gpu"]
    entry = searching.get("methods", {}).get("accurate+gate", searching)
    rate = entry.get("images_per_second") or entry["search_images_per_second"]
    decode = decoding["decode_images_per_second"]
    assert where == (gpu or "one core")
    assert float(views) == pytest.approx(entry["views_per_image"], abs=0.5)
    assert float(search) == pytest.approx(rate, rel=0.04)
    assert float(hours) == pytest.approx(1e6 / 3600 * (1 / rate + (0 if gpu else 1 / decode)), rel=0.06)
    assert cores == (f"{rate / decode:.0f}" if gpu else "–")


@pytest.mark.parametrize(
    ("beginning", "network", "decoding"),
    [
        ("28 × 28, the same small CNN, a lattice of 54 views", "small CNN", "batch"),
        ("photographs, MobileNetV2, a lattice of 54 views", "MobileNetV2", "photos"),
    ],
)
def test_on_a_gpu_it_follows_from_the_benchmark(beginning, network, decoding):
    where, views, search, hours, cores = cells(beginning)
    report, decode = stored("benchmark-gpu"), stored(decoding)["decode_images_per_second"]
    rate = report["networks"][network]["images_per_second"]["fast"]["median"]
    assert (where, views) == (report["machine"]["gpu"], "54")
    assert float(search.replace(",", "")) == pytest.approx(rate, rel=0.04)
    assert float(hours) == pytest.approx(1e6 / 3600 / rate, rel=0.15)
    assert float(cores.replace(",", "")) == pytest.approx(rate / decode, abs=0.5)


def test_stored_proofs_are_whole():
    batch = stored("batch")
    runs = [*batch["after_kills"].values(), *(batch[f"ray_{kill}"] for kill in ("none", "actor", "node"))]
    assert len(batch["kills"]) == 10
    assert all(run["rows"] == run["distinct_paths"] == run["same_labels"] == 5000 for run in runs)
    assert batch["ray_node"]["nodes_left"] == 1


def test_the_stored_load_test_has_no_failure_and_is_told_as_it_was():
    serve, text = stored("serve"), page()
    assert (serve["failures"], serve["server_errors"]) == (0, 0)
    assert serve["seconds"] >= 60
    assert f"{serve['requests_per_second']:.0f} requests a second" in text
    assert f"{100 * serve['share_of_bare_search']:.0f}% of the speed of the search alone" in text
