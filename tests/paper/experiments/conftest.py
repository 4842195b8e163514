"""The packaged digits network on a few digits; nothing is left on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from headtilt.calibration import fitter as fitting
from headtilt.paper import zoo
from headtilt.paper.data import Dataset, load


@pytest.fixture(scope="module", autouse=True)  # for longer it would reach tests of other folders
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADTILT_CACHE", str(folder))
        # Gates are quickly fitted: these tests are of how methods are compared.
        patch.setattr(fitting, "HELD_OUT_IMAGES", 30)
        yield folder


@pytest.fixture(scope="session")
def digits_net() -> nn.Module:
    return zoo.load("digits:0")


@pytest.fixture(scope="session")
def digits() -> Dataset:
    """All test digits; no nines."""
    return load("digits", "test")
