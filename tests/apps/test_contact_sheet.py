"""Contact sheets: what they show, and what they leave unread."""

from __future__ import annotations

import pytest

Image = pytest.importorskip("PIL.Image")

from headtilt.apps.contact_sheet import GAP, THUMB, Cell, sheet  # noqa: E402


def middles(page):
    """Return the colours in the middles of both pictures of the first cell."""
    return [page.getpixel((GAP + place * (THUMB + GAP) + THUMB // 2, GAP + THUMB // 2)) for place in (0, 1)]


def test_a_cell_shows_the_picture_before_and_after(tmp_path):
    for name, colour in (("before", "red"), ("after", "blue")):
        Image.new("RGB", (40, 40), colour).save(tmp_path / f"{name}.png")
    page = sheet([Cell(tmp_path / "before.png", tmp_path / "after.png", "turned")])
    assert middles(page) == [(255, 0, 0), (0, 0, 255)]


def test_a_small_picture_is_enlarged_so_that_it_can_be_seen(tmp_path):
    Image.new("RGB", (28, 20), "red").save(tmp_path / "small.png")
    page = sheet([Cell(tmp_path / "small.png", tmp_path / "small.png", "left as it came")])
    assert page.getpixel((GAP + 2, GAP + THUMB // 2)) == (255, 0, 0), "as wide as its place"


def test_a_file_that_failed_is_not_decoded_again(tmp_path):
    Image.new("RGB", (40, 40), "red").save(tmp_path / "slow.png")
    page = sheet([Cell(tmp_path / "slow.png", None, "failed")])
    assert middles(page) == [(238, 238, 238), (255, 255, 255)]
