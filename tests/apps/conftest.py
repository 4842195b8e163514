"""Digits as files: parquet of PNG bytes, tilted, always the same."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headtilt.geometry.groups import rotation
from headtilt.geometry.warp import warp
from headtilt.paper.data.digits import read

COUNT = 120


@pytest.fixture(scope="session")
def pngs() -> list[bytes]:
    """Return tilted test digits as PNG files in memory."""
    image = pytest.importorskip("PIL.Image")
    digits = read("test").images[:COUNT].float() / 255
    angles = torch.linspace(-3.1, 3.1, COUNT)
    turned = warp(digits, rotation().matrix(angles))
    found = []
    for picture in turned:
        buffer = io.BytesIO()
        image.fromarray((picture[0] * 255).round().byte().numpy()).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


@pytest.fixture(scope="session")
def digits_parquet(pngs: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a parquet file of those digits and one broken image among them, in several row groups."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path_factory.mktemp("digits") / "digits.parquet"
    cells = [*pngs[:50], b"no image at all", *pngs[50:]]
    parquet.write_table(arrow.table({"image": cells}), path, row_group_size=32)
    return path


@pytest.fixture(scope="session")
def rows_in() -> Callable[[Path], list[dict[str, object]]]:
    """Return what reads all rows of a folder."""
    parquet = pytest.importorskip("pyarrow.parquet")
    return lambda folder: parquet.read_table(folder).to_pylist()
