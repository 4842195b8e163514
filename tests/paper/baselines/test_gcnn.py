"""The p4 network: what turns with the image, and what stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headtilt.errors import OptionError, ShapeError
from headtilt.paper.baselines.gcnn import GCNN, GroupConv, Lift, final_size
from headtilt.sources.zoo.cnn import SmallCNN


def turn(images: Tensor, quarters: int) -> Tensor:
    return torch.rot90(images, quarters, dims=(-2, -1))


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """Return the module with all weights and biases drawn at random, and dropout off."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return module.eval()


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), quarters=st.integers(0, 4), kernel=st.integers(1, 5))
def test_lifted_maps_turn_with_the_image_and_move_along_the_rotation_axis(
    seed: int, quarters: int, kernel: int
) -> None:
    layer = randomised(Lift(2, 3, kernel), seed)
    images = torch.rand(2, 2, 9, 9, generator=torch.Generator().manual_seed(seed))
    expected = turn(layer(images), quarters).roll(quarters, dims=2)
    torch.testing.assert_close(layer(turn(images, quarters)), expected, atol=1e-5, rtol=0)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), quarters=st.integers(0, 4), kernel=st.integers(1, 5))
def test_group_convolution_commutes_with_the_action_on_feature_maps(seed: int, quarters: int, kernel: int) -> None:
    layer = randomised(GroupConv(2, 3, kernel), seed)
    features = torch.rand(2, 2, 4, 9, 9, generator=torch.Generator().manual_seed(seed))
    moved = turn(features, quarters).roll(quarters, dims=2)
    expected = turn(layer(features), quarters).roll(quarters, dims=2)
    torch.testing.assert_close(layer(moved), expected, atol=1e-5, rtol=0)


def test_group_convolution_that_is_not_moved_along_the_rotation_axis_fails_that_test() -> None:
    layer = randomised(GroupConv(2, 3, 3), 0)
    features = torch.rand(2, 2, 4, 9, 9)
    assert (layer(turn(features, 1)) - turn(layer(features), 1)).abs().max() > 0.1


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_the_network_is_equivariant_inside_and_invariant_outside(quarters: int) -> None:
    model, images = randomised(GCNN(9), 1), torch.rand(3, 1, 28, 28)
    features = model.features(images)
    expected = turn(features, quarters).roll(quarters, dims=2)
    torch.testing.assert_close(model.features(turn(images, quarters)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(turn(images, quarters)), model(images), atol=1e-5, rtol=1e-5)
    # The maps are not constant along the axes on which the test turns them.
    assert (features - turn(features, quarters)).abs().max() > 0.1
    assert features.std(dim=2).max() > 0.1
    assert model(images).std(dim=0).max() > 1e-3


def test_a_plain_network_fails_both() -> None:
    model, images = randomised(SmallCNN(9), 1), torch.rand(3, 1, 28, 28)
    features = model.backbone[:-1]
    assert (features(turn(images, 1)) - turn(features(images), 1)).abs().max() > 0.1
    assert (model(turn(images, 1)) - model(images)).abs().max() > 0.1


def test_the_network_has_about_as_many_weights_as_the_small_one() -> None:
    count, plain = (sum(p.numel() for p in model.parameters()) for model in (GCNN(10), SmallCNN(10)))
    assert 0.8 < count / plain < 1.25


@pytest.mark.parametrize(("size", "expected"), [(20, 1), (28, 3), (32, 4)])
def test_the_last_convolution_covers_the_whole_map(size: int, expected: int) -> None:
    assert final_size(size) == expected
    model = randomised(GCNN(5, 3, size), 0)
    images = torch.rand(2, 3, size, size)
    torch.testing.assert_close(model(turn(images, 1)), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [16, 27, 30])
def test_sizes_that_pooling_cannot_halve_evenly_are_refused(size: int) -> None:
    with pytest.raises(OptionError, match=f"multiple of 4 and at least 20.*got {size}"):
        GCNN(9, size=size)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"must be \(B, 1, 28, 28\)"):
        GCNN(9)(torch.rand(1, 1, 32, 32))
