"""The spatial transformer and what the other transformers borrow from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headtilt.errors import ShapeError
from headtilt.geometry.warp import warp
from headtilt.paper.baselines.stn import STN, Localisation, affine
from headtilt.sources.zoo.cnn import SmallCNN


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_a_fresh_transformer_is_the_identity(images: torch.Tensor) -> None:
    torch.manual_seed(0)
    backbone = SmallCNN(9)
    model = STN(backbone).eval()
    torch.testing.assert_close(model.pose(images), torch.eye(3).expand(3, 3, 3))
    torch.testing.assert_close(model.canonical(images), images)
    torch.testing.assert_close(model(images), backbone(images))


def test_the_regressed_matrix_says_where_to_sample_and_the_pose_is_its_inverse(images: torch.Tensor) -> None:
    model = STN(SmallCNN(9)).eval()
    offsets = torch.tensor([-0.2, 0.1, 0.3, -0.1, 0.1, -0.2])
    with torch.no_grad():
        model.localise.regress.bias.copy_(offsets)
    sampling = affine(offsets[None]).expand(3, 3, 3)
    torch.testing.assert_close(model.pose(images) @ sampling, torch.eye(3).expand(3, 3, 3))
    grid = F.affine_grid(sampling[:, :2], list(images.shape), align_corners=False)
    torch.testing.assert_close(model.canonical(images), F.grid_sample(images, grid, align_corners=False))


def test_the_canonical_images_are_the_images_moved_by_the_pose(images: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = STN(SmallCNN(9))
    nn.init.normal_(model.localise.regress.weight, std=0.3)
    assert (model.pose(images) - torch.eye(3)).abs().max() > 0.01
    torch.testing.assert_close(model.canonical(images), warp(images, model.pose(images)))


def test_the_loss_reaches_the_localisation_network_through_the_warp(images: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = STN(SmallCNN(9)).eval()
    F.cross_entropy(model(images), torch.tensor([0, 1, 2])).backward()
    gradient = model.localise.regress.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 1e-6


def test_affine_adds_the_offsets_to_the_first_two_rows_of_the_identity() -> None:
    expected = [[1.0, 1.0, 2.0], [3.0, 5.0, 5.0], [0.0, 0.0, 1.0]]
    assert affine(torch.arange(6.0)[None])[0].tolist() == expected


def test_localisation_names_the_size_it_was_made_for() -> None:
    with pytest.raises(ShapeError, match=r"must be \(B, 1, 28, 28\).*got \(2, 3, 32, 32\)"):
        Localisation(6)(torch.rand(2, 3, 32, 32))
