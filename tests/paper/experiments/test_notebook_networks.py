"""Networks trained as the authors' notebook does: standardised inside, so that raw pixels go in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headtilt.errors import OptionError
from headtilt.paper import zoo
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.train import NOTEBOOK, RECIPES, Standardised


def test_the_recipe_has_more_weight_decay_and_the_papers_learning_rate_on_every_set() -> None:
    assert {recipe.weight_decay for recipe in NOTEBOOK.values()} == {0.02}
    assert {recipe.learning_rate for recipe in NOTEBOOK.values()} == {5e-3}
    assert [NOTEBOOK[name].epochs for name in ("mnist", "fashion-mnist", "gtsrb")] == [3, 5, 10]
    assert RECIPES["gtsrb"].learning_rate == 1e-3


def test_inputs_are_standardised_by_channel_inside_of_the_network() -> None:
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 4
    seen = Standardised(nn.Identity(), 3).measure(images)(images.float() / 255)
    assert_close(seen.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    assert_close(seen.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)


def test_such_a_network_is_trained_once_and_kept_with_its_statistics(tmp_path, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (256, 1, 28, 28), dtype=torch.uint8, generator=generator)
    data = Dataset("mnist", images, torch.randint(0, 9, (256,), generator=generator), tuple("012345678"))
    calls = []
    monkeypatch.setattr(zoo, "load_data", lambda *_, **__: calls.append(1) or data)
    monkeypatch.setattr(zoo, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("headtilt.sources.zoo.cache_folder", lambda: tmp_path)
    first, second = (zoo.load_notebook("mnist:7") for _ in range(2))
    assert calls == [1]
    assert (tmp_path / "zoo" / "mnist-notebook-7.safetensors").exists()
    assert float(second.get_buffer("mean")) == pytest.approx(float(images.double().mean()) / 255, abs=1e-4)
    assert_close(first(images[:4] / 255), second(images[:4] / 255))
    with pytest.raises(OptionError, match="spec must be one of"):
        zoo.load_notebook("digits:0")
