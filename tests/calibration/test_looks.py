"""What a fit looked at: kept once, in half precision, and no more of it than memory should hold."""

from __future__ import annotations

import pytest
import torch

from headtilt.calibration.looks import Pile
from headtilt.calibration.sampler import Orbits
from headtilt.model.evidence import Evidence


def orbits(images: torch.Tensor, *, features: bool = True) -> Orbits:
    """Two views of each image; logits and features of an image are its number."""
    count = len(images)
    number = images.float()[:, None, None]
    evidence = Evidence(number.expand(count, 2, 3), number.expand(count, 2, 4) if features else None)
    flags = torch.zeros(count, dtype=torch.bool)
    transforms = torch.eye(3).expand(count, 3, 3)
    poses = torch.eye(3).expand(count, 2, 3, 3)
    return Orbits(evidence, torch.zeros(count, 2, 1), poses, torch.zeros(count, 2), flags, flags, transforms)


def piled(*parts: list[int], most: int = 10**6, features: bool = True) -> tuple[Pile, list[bool]]:
    pile = Pile(most, sum(map(len, parts)))
    return pile, [pile.add(orbits(torch.tensor(part), features=features), torch.tensor(part)) for part in parts]


def test_looks_come_back_in_the_order_in_which_they_were_taken_with_features_in_half_precision():
    pile, _ = piled([3, 1], [2, 3])
    looks = pile.looks()
    features = looks.orbits.evidence.features
    assert looks.image.tolist() == [3, 1, 2, 3]
    assert features is not None
    assert features.dtype == torch.float16
    assert features[:, 0, 0].tolist() == looks.orbits.evidence.logits[:, 1, 2].tolist() == [3, 1, 2, 3]


def test_features_lie_where_they_were_first_put():
    pile, _ = piled([3, 1], [2, 3])
    features = pile.looks().orbits.evidence.features
    assert features is not None
    assert pile.features is not None
    assert features.data_ptr() == pile.features.data_ptr()


@pytest.mark.parametrize("features", [True, False])
def test_a_pile_says_when_it_holds_as_much_as_it_may(features):
    width = 2 * (3 + 4 * features)  # numbers of one look
    pile, room = piled([1, 2], [3, 4], [5, 6], most=5 * width, features=features)
    assert room == [True, True, False]
    assert pile.looks().image.tolist() == [1, 2, 3, 4, 5, 6]


def test_features_too_large_for_half_precision_are_bounded():
    pile, _ = piled([10**7])
    features = pile.looks().orbits.evidence.features
    assert features is not None
    assert bool(features.isfinite().all())


def test_the_looks_at_some_images_and_one_look_at_each():
    looks = piled([3, 1, 2], [2, 3, 1])[0].looks()
    some = torch.tensor([3, 2])
    assert looks.rows(some).tolist() == [0, 2, 3, 4]
    assert looks.of(some).image.tolist() == [3, 2, 2, 3]
    assert looks.once(some).image.tolist() == [2, 3]
    assert looks.once(torch.tensor([1])).orbits.evidence.logits[:, 0, 0].tolist() == [1]
