"""The inverse compositional transformer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headtilt.errors import OptionError
from headtilt.geometry.warp import invert, warp
from headtilt.paper.baselines.icstn import ICSTN
from headtilt.paper.baselines.stn import STN, affine
from headtilt.sources.zoo.cnn import SmallCNN

OFFSETS = torch.tensor([-0.1, 0.2, 0.05, -0.15, 0.1, -0.1])


class Scripted(nn.Module):
    """Answers a fixed list of offsets, one at each call, whatever it sees."""

    def __init__(self, *offsets: list[float]) -> None:
        super().__init__()
        self.offsets = list(offsets)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tensor(self.offsets.pop(0)).expand(len(images), 6)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_a_fresh_transformer_is_the_identity(images: Tensor) -> None:
    torch.manual_seed(0)
    backbone = SmallCNN(9)
    model = ICSTN(backbone).eval()
    torch.testing.assert_close(model.pose(images), torch.eye(3).expand(2, 3, 3))
    torch.testing.assert_close(model(images), backbone(images))


def test_three_equal_steps_compose_to_the_third_power(images: Tensor) -> None:
    model = ICSTN(SmallCNN(9))
    with torch.no_grad():
        model.localise.regress.bias.copy_(OFFSETS)
    step = invert(affine(OFFSETS[None]))[0]
    torch.testing.assert_close(model.pose(images), (step @ step @ step).expand(2, 3, 3))


def test_a_later_step_follows_an_earlier_one(images: Tensor) -> None:
    shift = [0.0, 0.0, -0.5, 0.0, 0.0, 0.0]  # the content moves right by 0.5
    shrink = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]  # then everything halves, the shift too
    model = ICSTN(SmallCNN(9), steps=2)
    model.localise = Scripted(shift, shrink)
    expected = torch.tensor([[0.5, 0.0, 0.25], [0.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(model.pose(images), expected.expand(2, 3, 3))


def test_each_step_looks_at_the_image_under_the_pose_so_far(images: Tensor) -> None:
    torch.manual_seed(0)
    model = ICSTN(SmallCNN(9))
    nn.init.normal_(model.localise.regress.weight, std=0.3)
    pose = torch.eye(3).expand(2, 3, 3)
    for _ in range(3):
        pose = invert(affine(model.localise(warp(images, pose)))) @ pose
    assert (pose - torch.eye(3)).abs().max() > 0.01
    torch.testing.assert_close(model.pose(images), pose)


def test_pixels_pushed_out_of_sight_by_one_step_come_back_with_the_next(images: Tensor) -> None:
    out, back = [0.0, 0.0, 1.5, 0.0, 0.0, 0.0], [0.0, 0.0, -1.5, 0.0, 0.0, 0.0]
    model = ICSTN(SmallCNN(9), steps=2)
    model.localise = Scripted(out, back)
    torch.testing.assert_close(model.canonical(images), images)


def test_one_step_is_the_plain_spatial_transformer(images: Tensor) -> None:
    torch.manual_seed(0)
    model = ICSTN(SmallCNN(9), steps=1)
    nn.init.normal_(model.localise.regress.weight, std=0.3)
    plain = STN(SmallCNN(9))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.pose(images), plain.pose(images))


def test_zero_steps_are_refused() -> None:
    with pytest.raises(OptionError, match="steps must be a whole number of at least 1"):
        ICSTN(SmallCNN(9), steps=0)
