"""A transform that turns pictures, tensors and batches upright, and leaves alone what it is not sure of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headtilt.apps.playground.methods import PACKAGED
from headtilt.apps.transform import Upright
from headtilt.errors import OptionError
from headtilt.paper.data import load
from headtilt.sources.pretrained import from_pretrained

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
ROBUST = from_pretrained("zoo:digits:0", bundle=PACKAGED)
DIGITS = load("digits", "test").images[:20, 0].numpy()


def pictures(turns=0):
    return [Image.fromarray(np.ascontiguousarray(np.rot90(pixels, -turns))) for pixels in DIGITS]


def test_pictures_turned_by_a_quarter_come_back_to_the_pixel():
    upright = Upright(ROBUST, quarters=True)
    found = [
        np.array_equal(np.asarray(upright(picture)), pixels)
        for picture, pixels in zip(pictures(1), DIGITS, strict=True)
    ]
    assert sum(found) >= 15
    kept = [
        np.array_equal(np.asarray(upright(picture)), pixels) for picture, pixels in zip(pictures(), DIGITS, strict=True)
    ]
    assert sum(kept) >= 19


def test_tensors_keep_their_shape_and_are_turned_as_the_search_says():
    images = torch.from_numpy(DIGITS).float()[:, None] / 255
    turned = torch.rot90(images, -1, (-2, -1))
    assert torch.equal(Upright(ROBUST)(turned), ROBUST.search(turned).canonical())
    exact = Upright(ROBUST, quarters=True)(turned)
    assert exact.shape == turned.shape
    assert sum(torch.equal(one, other) for one, other in zip(exact, images, strict=True)) >= 15
    assert Upright(ROBUST)(turned[0]).shape == (1, 28, 28)


def test_a_batch_of_datasets_keeps_its_other_columns():
    upright = Upright(ROBUST, quarters=True)
    batch = upright({"image": pictures(1)[:3], "label": [1, 2, 3]})
    assert batch["label"] == [1, 2, 3]
    assert [one.size for one in batch["image"]] == [(28, 28)] * 3
    single = upright({"image": pictures(1)[0]})
    assert np.array_equal(np.asarray(single["image"]), np.asarray(batch["image"][0]))


def test_what_cannot_be_turned_and_what_was_never_fitted_are_refused():
    with pytest.raises(OptionError, match="column must be one of picture; got 'image'"):
        Upright(ROBUST)({"picture": []})
    with pytest.raises(OptionError, match="takes a PIL image, a tensor or a batch"):
        Upright(ROBUST)("cup.jpg")
    with pytest.raises(OptionError, match="fitted head"):
        Upright(from_pretrained("zoo:digits:0"))
    assert repr(Upright(ROBUST)) == "Upright(digits:0, column='image', quarters=False)"
