"""The command that says what a search costs."""

from __future__ import annotations

import json
from pathlib import Path

from headtilt.apps.playground.methods import PACKAGED

from .test_audit import write

MODEL = ("--model", "zoo:digits:0", "--bundle", PACKAGED)


def test_a_table_and_a_picture_say_what_budgets_cost(call):
    write("in", count=6)
    Path("in/broken.png").write_bytes(b"no image")
    result = call("cost", "in", *MODEL, "--budget", "4", "--picture", "cost.png")
    assert result.exit_code == 0
    assert "over 6 images on cpu" in result.stdout
    assert "broken.png is not an image" in result.stderr
    assert Path("cost.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(call("cost", "in", *MODEL, "--budget", "4", "--images", "3", "--json").stdout)
    assert told["images"] == 3
    assert [row["budget"] for row in told["rows"]][:2] == [1, 4]


def test_one_image_tells_too_little(call):
    write("in", count=1)
    result = call("cost", "in", *MODEL)
    assert result.exit_code == 2
    assert "at least two images" in result.stderr
