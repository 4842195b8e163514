from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headtilt.errors import DataError, MissingExtraError
from headtilt.paper.data import fetch
from headtilt.paper.data.fetch import Remote

CONTENT = b"twelve bytes" * 1000
SHA = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def test_folders_come_from_the_argument_or_the_environment_and_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    assert fetch.data_folders() == (cache,)
    monkeypatch.setenv("HEADTILT_DATA", os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b")]))
    assert fetch.data_folders() == (tmp_path / "a", tmp_path / "b", cache)
    assert fetch.data_folders(tmp_path) == fetch.data_folders([str(tmp_path)]) == (tmp_path, cache)
    with pytest.raises(DataError, match="folders must name folders that exist"):
        fetch.data_folders(tmp_path / "nowhere")


def test_the_cache_is_the_platforms_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADTILT_CACHE")
    assert fetch.cache_folder().name in ("headtilt", "Cache")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(MissingExtraError, match="platformdirs is needed"):
        fetch.cache_folder()


def test_the_first_folder_wins_and_then_the_first_candidate(tmp_path: Path) -> None:
    for name in ("one/y", "two/x", "two/y"):
        (tmp_path / name).mkdir(parents=True)
    assert fetch.find(["x", "y"], [tmp_path / "one", tmp_path / "two"]) == tmp_path / "one" / "y"
    assert fetch.find(["x", "y"], [tmp_path / "two", tmp_path / "one"]) == tmp_path / "two" / "x"
    assert fetch.find(["z"], [tmp_path / "two"]) is None


def test_a_download_is_checked_kept_and_not_fetched_twice(tmp_path: Path, site: Any) -> None:
    site.content = CONTENT
    remote = Remote((site.url,), SHA, "folder/file")
    for _ in range(2):
        path = fetch.retrieve(remote, tmp_path)
        assert path == (tmp_path / "folder" / "file").resolve()
        assert path.read_bytes() == CONTENT
    assert len(site.asked) == 1
    assert [entry.name for entry in (tmp_path / "folder").iterdir()] == ["file"]


def test_an_interrupted_download_goes_on_at_the_next_call(tmp_path: Path, site: Any) -> None:
    site.content = CONTENT
    site.cuts = [500, 0]
    remote = Remote((site.url,), SHA, "file")
    with pytest.raises(DataError, match=r"file could not be downloaded.*500 bytes are kept"):
        fetch.retrieve(remote, tmp_path)
    assert fetch.retrieve(remote, tmp_path).read_bytes() == CONTENT
    assert site.asked[-1] == "bytes=500-"


def test_a_wrong_checksum_is_refused_and_nothing_of_it_stays(tmp_path: Path, site: Any) -> None:
    site.content = b"something else"
    with pytest.raises(DataError, match="its checksum is wrong"):
        fetch.retrieve(Remote((site.url,), SHA, "folder/file"), tmp_path)
    assert not list((tmp_path / "folder").iterdir())


def test_the_second_mirror_is_asked_when_the_first_fails(tmp_path: Path, site: Any) -> None:
    site.content = CONTENT
    remote = Remote(("http://127.0.0.1:1/file", site.url), SHA, "file")
    assert fetch.retrieve(remote, tmp_path).read_bytes() == CONTENT
    site.status = 404
    with pytest.raises(DataError, match=r"could not be fetched.*answered 404"):
        fetch.retrieve(Remote(remote.urls, SHA, "other"), tmp_path)


def test_a_target_that_cannot_be_written_is_a_data_error(tmp_path: Path, site: Any) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="file could not be downloaded"):
        fetch.retrieve(Remote((site.url,), SHA, "blocked/file"), tmp_path)


def test_without_pooch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingExtraError, match="pooch is needed"):
        fetch.retrieve(Remote(("http://127.0.0.1:1/",), SHA, "file"), tmp_path)


def test_an_archive_is_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("GTSRB/Final_Test/Images/00000.ppm", b"image")
        file.writestr("GTSRB/Readme.txt", b"text")
        file.writestr("../outside.txt", b"escape")
    home = tmp_path / "home"
    (home / "GTSRB" / "Final_Test" / "stale").mkdir(parents=True)
    fetch.unzip(archive, "GTSRB/Final_Test", home)
    assert [path.name for path in (home / "GTSRB" / "Final_Test").iterdir()] == ["Images"]
    assert [path.name for path in home.iterdir()] == ["GTSRB"]
    assert not (tmp_path / "outside.txt").exists()
    archive.write_bytes(b"PK")
    with pytest.raises(DataError, match="could not be unpacked"):
        fetch.unzip(archive, "GTSRB/Final_Test", home)


def test_progress_is_shown_to_people_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch._progress("file") is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show = fetch._progress("file")
    assert show is not None
    show(500_000, None)
    show(1_000_000, 1_000_000)
    assert capsys.readouterr().err == "\rfile: 0.5 MB\rfile: 1.0 of 1.0 MB\n"
