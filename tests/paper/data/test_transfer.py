from __future__ import annotations

import gzip
import socket
from pathlib import Path
from typing import Any

import pytest

from headtilt.errors import DataError
from headtilt.paper.data.transfer import Downloader

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "down" / "file.part"


def fetch(part: Path, url: str, **options: Any) -> bytes:
    target = part.parent.parent / "target"
    Downloader(part, **options)(url, str(target))
    return target.read_bytes()


def test_a_file_arrives_whole_and_leaves_no_part(part: Path, site: Any) -> None:
    site.content = CONTENT
    seen: list[tuple[int, int | None]] = []
    assert fetch(part, site.url, progress=lambda done, total: seen.append((done, total))) == CONTENT
    assert not part.exists()
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert site.asked == [None]


def test_a_transfer_that_breaks_goes_on_where_it_stopped(part: Path, site: Any) -> None:
    site.content = CONTENT
    site.cuts = [1000, 2000]
    assert fetch(part, site.url) == CONTENT
    assert site.asked == [None, "bytes=1000-", "bytes=3000-"]


def test_a_later_run_goes_on_from_the_part_an_earlier_one_left(part: Path, site: Any) -> None:
    site.content = CONTENT
    site.cuts = [1000, 0]
    with pytest.raises(DataError, match="1000 bytes are kept: the next attempt goes on from there"):
        fetch(part, site.url)
    assert part.read_bytes() == CONTENT[:1000]
    assert fetch(part, site.url) == CONTENT
    assert site.asked[-1] == "bytes=1000-"


def test_a_server_without_ranges_sends_the_file_from_its_start(part: Path, site: Any) -> None:
    site.content = CONTENT
    site.ranges = False
    part.parent.mkdir()
    part.write_bytes(b"x" * 1000)
    assert fetch(part, site.url) == CONTENT
    assert site.asked == ["bytes=1000-"]


def test_a_server_without_ranges_that_always_breaks_is_given_up(part: Path, site: Any) -> None:
    site.content = CONTENT
    site.ranges = False
    site.cuts = [1000] * 50
    with pytest.raises(DataError, match=f"the connection broke after 1000 of {len(CONTENT)} bytes"):
        fetch(part, site.url)
    assert len(site.asked) == 2


def test_a_part_that_is_already_whole_is_taken_as_it_is(part: Path, site: Any) -> None:
    site.content = CONTENT
    part.parent.mkdir()
    part.write_bytes(CONTENT)
    assert fetch(part, site.url) == CONTENT
    assert site.asked == [f"bytes={len(CONTENT)}-"]


def test_a_part_longer_than_the_file_is_thrown_away(part: Path, site: Any) -> None:
    site.content = CONTENT
    part.parent.mkdir()
    part.write_bytes(CONTENT + b"x")
    assert fetch(part, site.url) == CONTENT
    assert site.asked == [f"bytes={len(CONTENT) + 1}-", None]


def test_bytes_from_another_place_than_asked_for_are_never_joined(part: Path, site: Any) -> None:
    site.content = CONTENT
    site.shift = 1
    part.parent.mkdir()
    part.write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="other bytes than asked for: 'bytes 1001-"):
        fetch(part, site.url)
    assert fetch(part, site.url) == CONTENT
    assert site.asked == ["bytes=1000-", None]


def test_a_gzipped_file_leaves_unpacked(part: Path, site: Any) -> None:
    site.content = gzip.compress(CONTENT)
    site.cuts = [100]
    assert fetch(part, site.url, unpack=True) == CONTENT
    assert not part.exists()


@pytest.mark.parametrize("content", [b"<html>", gzip.compress(CONTENT)[:-20], b""])
def test_what_is_no_whole_gzip_file_is_refused_and_not_kept(part: Path, site: Any, content: bytes) -> None:
    site.content = content
    if content:
        with pytest.raises(DataError, match="did not send a whole gzip file"):
            fetch(part, site.url, unpack=True)
    else:
        assert fetch(part, site.url, unpack=True) == b""
    assert not part.exists()


@pytest.mark.parametrize("status", [404, 403, 500])
def test_an_error_status_is_named_with_the_address(part: Path, site: Any, status: int) -> None:
    site.status = status
    with pytest.raises(DataError, match=f"{site.url} answered {status}"):
        fetch(part, site.url)


def test_a_refused_connection_is_named_and_not_tried_again(part: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file"
    with pytest.raises(DataError, match=r"could not be fetched .*refused"):
        fetch(part, url)


def test_a_server_that_says_nothing_is_given_up_after_the_timeout(part: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(DataError, match="timed out"):
            fetch(part, f"http://127.0.0.1:{silent.getsockname()[1]}/file", timeout=0.1)
