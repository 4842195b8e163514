"""What a user would do instead of searching: the augmentation is that of the test sets, for every kind of network."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from headtilt.geometry.groups import decompose
from headtilt.paper.data.perturb import parameters, schedule
from headtilt.paper.experiments import retrain


@pytest.fixture
def poses(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The poses of 20,000 augmented images."""
    seen = []
    monkeypatch.setattr(retrain, "warp", lambda images, pose: seen.append(pose) or images)
    retrain.augment(torch.zeros(20_000, 1, 1, 1), torch.Generator().manual_seed(0))
    return seen[0]


def test_the_augmentation_draws_scale_evenly_in_the_factor_as_the_test_sets_do(poses):
    factor = poses[:, :2, :2].double().det().sqrt()  # rotation and shear keep areas
    assert 0.75 <= float(factor.min()) < 0.7505
    assert 1.2495 < float(factor.max()) <= 1.25001
    # Drawn evenly in its logarithm, the factor would have the median 0.968 and three eighths above 1.04.
    assert_close(
        factor.quantile(torch.tensor([0.25, 0.5, 0.75]).double()),
        torch.tensor([0.875, 1, 1.125]).double(),
        rtol=0,
        atol=0.008,
    )


def test_the_augmentation_turns_and_shears_over_the_whole_range(poses):
    parts = decompose(poses.double())
    assert float(parts.rotation.abs().max()) > 0.999 * math.pi
    assert 0.24 < float(parts.shear.abs().max()) < 0.2501


def test_a_draw_is_a_parameter_of_the_range_or_of_the_grid():
    turn, size, slant = schedule("affine").drawn
    unit = torch.tensor([0.0, 0.5, 0.75])
    assert_close(parameters(size, unit).exp(), torch.tensor([0.75, 1.0, 1.125]))
    assert_close(parameters(slant, unit), torch.tensor([-0.25, 0.0, 0.125]))
    assert_close(parameters(turn, unit.double(), 4), turn.grid(4)[[0, 2, 3]])
