"""Pages that lie on a side: the turn is read off the fitted head's best view."""

from __future__ import annotations

import torch

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from headtilt.paper.data import load

RECIPE = HeadRecipe(epochs=16, hidden=64)


def test_turned_digits_are_turned_back_by_exact_quarter_turns(digits_net):
    test = load("digits", "test", limit=300)
    images, quarters = test.floats(), torch.arange(300) % 4
    turned = torch.stack(
        [torch.rot90(image, -int(turn), (-2, -1)) for image, turn in zip(images, quarters, strict=True)]
    )
    robust = ht.ITS(digits_net, **ht.documents())
    robust.fit(load("digits", "fit", limit=400).floats(), promise=None, recipe=RECIPE)
    result = robust.search(turned)
    bare = (result.bare.argmax(1) == test.labels).float().mean()
    found = (result.quarters + quarters) % 4 == 0
    # Noughts, ones and eights look much the same upside down; the others do not.
    told_apart = ~torch.isin(test.labels, torch.tensor([0, 1, 8]))
    assert bare < 0.5
    assert (result.labels == test.labels).float().mean() > 0.95
    assert found.float().mean() > 0.75
    assert found[told_apart].float().mean() > 0.8
    assert torch.equal(result.canonical()[found], images[found])
