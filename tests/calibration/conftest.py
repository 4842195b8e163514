"""The packaged digits network, a few upright images to fit on, and a few tilted ones to try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

import headtilt as ht
from headtilt.calibration import head
from headtilt.calibration.head import HeadRecipe
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.paper.data.perturb import draw, perturb_dataset
from tests.toys import its

QUICK = HeadRecipe(looks=1, views=8, epochs=1, hidden=16)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing of these tests is left on the machine."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADTILT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module", autouse=True)  # for longer it would reach tests of other folders
def quick_heads() -> Iterator[None]:
    """Heads may be trained for hardly any steps: most of these tests are of what is done with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "FEWEST_STEPS", 4)
        yield


@pytest.fixture(scope="session")
def digits_net() -> nn.Module:
    return zoo.load("digits:0")


@pytest.fixture(scope="session")
def upright() -> Tensor:
    """Upright images (200, 1, 28, 28) to fit on."""
    return load("digits", "fit", limit=200).floats()


@pytest.fixture(scope="session")
def tilted() -> Tensor:
    """Other images (60, 1, 28, 28), each turned by its own angle."""
    data = load("digits", "test", limit=60)
    return perturb_dataset(data, draw("rotation", 60, seed=1)).images


@pytest.fixture(scope="session")
def fitted(digits_net: nn.Module, upright: Tensor) -> ht.ITS:
    """A wrapper with a quickly trained head and a gate; no test changes it."""
    robust = its(digits_net, search="joint", budget=24, readout="marginal")
    return robust.fit(upright, recipe=HeadRecipe(looks=1, views=12, epochs=16, hidden=48), promise=1.0)
