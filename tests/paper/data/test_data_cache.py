from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from headtilt.paper.data import Dataset
from headtilt.paper.data.cache import cached


class Counter:
    """Builds a small set and counts how often."""

    def __init__(self, tracks: bool = True) -> None:
        self.built = 0
        self.tracks = torch.tensor([3, 4]) if tracks else None

    def __call__(self) -> Dataset:
        self.built += 1
        images = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
        return Dataset("toy", images, torch.tensor([1, 0]), ("a", "ü"), self.tracks)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"data")
    return path


@pytest.mark.parametrize("tracks", [True, False])
def test_the_second_read_comes_from_the_cache_and_is_equal(tmp_path: Path, source: Path, tracks: bool) -> None:
    build = Counter(tracks)
    first, second = (cached(tmp_path / "cache", "to/y.v1", [source], build) for _ in range(2))
    assert build.built == 1
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    assert (first.name, first.classes) == (second.name, second.classes)
    assert (second.tracks is not None) == tracks


def test_a_cached_tensor_can_be_written_without_changing_the_cache(tmp_path: Path, source: Path) -> None:
    build = Counter()
    cached(tmp_path / "cache", "toy", [source], build)
    cached(tmp_path / "cache", "toy", [source], build).images.zero_()
    assert int(cached(tmp_path / "cache", "toy", [source], build).images.max()) == 23
    assert build.built == 1


@pytest.mark.parametrize("change", ["content", "time", "options", "name"])
def test_another_source_or_option_is_another_entry(tmp_path: Path, source: Path, change: str) -> None:
    build = Counter()
    cached(tmp_path / "cache", "toy", [source], build, options={"size": 32})
    size = 32
    if change == "content":
        source.write_bytes(b"more data")
    elif change == "time":
        os.utime(source, ns=(1, 1))
    elif change == "name":
        source = source.rename(tmp_path / "renamed")
    else:
        size = 48
    cached(tmp_path / "cache", "toy", [source], build, options={"size": size})
    assert build.built == 2


def overwrite(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=True)


@pytest.mark.parametrize("damage", ["empty", "cut off", "noise", "a pickle", "other shape", "gone"])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_damaged_cache_is_built_again_silently(tmp_path: Path, source: Path, suffix: str, damage: str) -> None:
    build = Counter()
    cached(tmp_path / "cache", "toy", [source], build)
    (path,) = (tmp_path / "cache").rglob(f"*{suffix}")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "a pickle":
        overwrite(path, np.array([object()]))
    elif damage == "other shape":
        overwrite(path, np.zeros((1, 2, 3), np.uint8))
    else:
        path.write_bytes({"empty": b"", "cut off": content[:-9], "noise": bytes(200)}[damage])
    for _ in range(2):
        assert cached(tmp_path / "cache", "toy", [source], build).labels.tolist() == [1, 0]
    assert build.built == 2


def test_nothing_half_written_is_left_behind(tmp_path: Path, source: Path) -> None:
    cached(tmp_path / "cache", "toy", [source], Counter())
    assert sorted(path.suffix for path in (tmp_path / "cache" / "decoded").iterdir()) == [".npy", ".npz"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, source: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    build = Counter()
    assert len(cached(blocked, "toy", [source], build)) == 2
    assert len(cached(None, "toy", [source], build)) == 2
    assert build.built == 2
