"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headtilt.io.files import written_whole


def test_what_is_written_takes_its_place_and_leaves_nothing_beside(tmp_path: Path):
    target = tmp_path / "deep" / "file.txt"
    with written_whole(target) as unfinished:
        unfinished.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path):
    target = tmp_path / "file.txt"
    target.write_text("old")

    def interrupted() -> None:
        with written_whole(target) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_names_may_be_as_long_as_they_can_be(tmp_path: Path):
    target = tmp_path / (251 * "n" + ".txt")
    with written_whole(target) as unfinished:
        unfinished.write_text("new")
    assert target.read_text() == "new"


def test_an_unfinished_file_is_taken_for_no_image(tmp_path: Path):
    with written_whole(tmp_path / "picture.png") as unfinished:
        assert (unfinished.name[0], unfinished.suffix) == (".", ".tmp")
        unfinished.touch()
