"""The figures of docs/scale.md are those of the files under results/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "scale.md"

if not DOC.exists():
    pytest.skip("docs/ is not here", allow_module_level=True)


def stored(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def cells(beginning):
    (line,) = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {beginning}")]
    return [float(cell.replace(",", "")) for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize(
    ("beginning", "decoding", "searching"),
    [
        ("MNIST digits", stored("batch"), stored("mnist-affine")["methods"]["energy"]),
        ("digits", stored("batch"), stored("digits-affine")["methods"]["fast+gate"]),
        ("photographs", stored("photos"), stored("photos")),
    ],
    ids=["MNIST", "digits", "photographs"],
)
def test_the_cost_of_a_million_images_follows_from_what_was_measured(beginning, decoding, searching):
    decode, views, search, hours = cells(beginning)
    rate = searching.get("images_per_second") or searching["search_images_per_second"]
    assert decode == pytest.approx(decoding["decode_images_per_second"], abs=0.5)
    assert views == pytest.approx(searching["views_per_image"], abs=0.5)
    assert search == pytest.approx(rate, abs=0.5)
    assert hours == pytest.approx(1e6 / 3600 * (1 / decoding["decode_images_per_second"] + 1 / rate), rel=0.05)


def test_stored_proofs_are_whole():
    batch = stored("batch")
    runs = [*batch["after_kills"].values(), *(batch[f"ray_{kill}"] for kill in ("none", "actor", "node"))]
    assert len(batch["kills"]) == 10
    assert all(run["rows"] == run["distinct_paths"] == run["same_labels"] == 5000 for run in runs)
    assert batch["ray_node"]["nodes_left"] == 1


def test_the_stored_load_test_has_no_failure_and_is_told_as_it_was():
    serve, text = stored("serve"), DOC.read_text(encoding="utf-8")
    assert (serve["failures"], serve["server_errors"]) == (0, 0)
    assert serve["seconds"] >= 60
    assert f"{serve['requests_per_second']:.0f} requests a second" in text
    assert f"{100 * serve['share_of_bare_search']:.0f} % of what the bare search" in text
