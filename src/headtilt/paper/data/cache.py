"""Decoded data sets kept on disk, so that a second start does not decode again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headtilt.io.files import written_whole
from headtilt.paper.data.dataset import Dataset

# Raised when what a reader makes of the same files changes.
VERSION = 1


def cached(
    folder: Path | None,
    name: str,
    sources: Iterable[Path],
    build: Callable[[], Dataset],
    *,
    options: Mapping[str, object] | None = None,
) -> Dataset:
    """Return what `build` returns, from the cache folder where the same sources and options were decoded before.

    A cache that is missing, broken or cannot be written is never an error: the data set is then built.

    Args:
        folder: Where decoded sets are kept; None builds every time.
        name: What the file names begin with.
        sources: The files that `build` reads; their names, sizes and times of change identify the result.
        build: Reads and decodes them.
        options: Reader options that change the result; must be JSON values.
    """
    if folder is None:
        return build()
    stem = f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}-{_key(sources, options or {})}"
    images, rest = folder / "decoded" / f"{stem}.npy", folder / "decoded" / f"{stem}.npz"
    found = _load(images, rest)
    if found is None:
        found = build()
        _store(images, rest, found)
    return found


def _key(sources: Iterable[Path], options: Mapping[str, object]) -> str:
    digest = hashlib.sha256(json.dumps([VERSION, dict(options)], sort_keys=True).encode())
    for source in sources:
        state = source.stat()
        digest.update(json.dumps([str(source.absolute()), state.st_size, state.st_mtime_ns]).encode())
    return digest.hexdigest()[:20]


def _load(images: Path, rest: Path) -> Dataset | None:
    try:
        # Mapped, not read: a start then costs what is looked at. "c" leaves the file alone when the tensor is written.
        pixels = np.load(images, mmap_mode="c", allow_pickle=False)
        # Opened here: given a name, numpy leaves a broken file open.
        with rest.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            tracks = torch.from_numpy(arrays["tracks"]) if "tracks" in arrays else None
            labels = torch.from_numpy(arrays["labels"])
        return Dataset(about["name"], torch.from_numpy(pixels), labels, tuple(about["classes"]), tracks)
    except Exception:
        # Bytes that are not ours fail in too many ways to list, and all of them mean the same: build it again.
        return None


def _store(images: Path, rest: Path, dataset: Dataset) -> None:
    about = json.dumps({"name": dataset.name, "classes": dataset.classes}).encode()
    arrays: dict[str, Any] = {"labels": dataset.labels.numpy(), "about": np.frombuffer(about, dtype=np.uint8)}
    if dataset.tracks is not None:
        arrays["tracks"] = dataset.tracks.numpy()
    try:
        with written_whole(images) as unfinished, unfinished.open("wb") as file:
            np.save(file, dataset.images.numpy(), allow_pickle=False)
        # Last, so that labels never stand beside half of the images.
        with written_whole(rest) as unfinished, unfinished.open("wb") as file:
            np.savez(file, **arrays)
    except OSError:
        return
