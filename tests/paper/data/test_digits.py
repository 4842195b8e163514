from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from headtilt.errors import MissingExtraError
from headtilt.paper.data import digits


def test_digits_have_1100_training_images_and_the_rest_to_test_without_overlap() -> None:
    train, test = digits.read("train"), digits.read("test")
    assert (len(train), len(test)) == (1100, 517)
    assert len(digits.read("test", drop_nines=False)) == 697
    assert train.classes == tuple("012345678")
    counts = torch.bincount(torch.cat([train.labels, test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174]


def test_a_digit_stands_in_the_middle_of_a_black_frame_and_uses_the_whole_range() -> None:
    images = digits.read("train").images
    assert images.shape[1:] == (1, 28, 28)
    framed = images.clone()
    framed[:, :, 4:24, 4:24] = 0
    assert not framed.any()
    assert images.max() == 255


def test_a_digit_shrunk_again_is_the_digit_it_was() -> None:
    data, originals = digits.read("train"), load_digits()
    small = F.interpolate(data.floats(slice(0, 200))[:, :, 4:24, 4:24], size=(8, 8), mode="area")
    distance = torch.cdist(small.flatten(1), torch.from_numpy(originals.images).float().flatten(1) / 16)
    nearest = distance.argmin(1)
    assert torch.from_numpy(originals.target)[nearest].tolist() == data.labels[:200].tolist()
    assert len(set(nearest.tolist())) == 200


def test_the_split_of_digits_never_changes() -> None:
    assert digits.read("train").labels[:12].tolist() == [1, 2, 4, 5, 6, 8, 0, 1, 3, 4, 5, 6]
    assert digits.read("test").labels[:12].tolist() == [0, 3, 7, 2, 5, 6, 7, 8, 5, 0, 8, 1]


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'headtilt\[data\]'"):
        digits.read()
