"""The equivariant transformer with its authors' architecture: what it sees, and what a pose means."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headtilt.geometry.groups import decompose, rotation
from headtilt.geometry.warp import warp
from headtilt.paper.baselines.etn_official import OfficialETN, PoseNetwork, centroid


def test_the_architecture_is_two_strided_convolutions_with_batch_normalisation_and_a_softmax() -> None:
    net = PoseNetwork(3, across=True, down=True, circular=True)
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    assert [(layer.stride, layer.kernel_size, layer.bias) for layer in convolutions] == [((2, 2), (5, 5), None)] * 2
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in net.modules()) == 2
    assert sum(isinstance(layer, nn.Conv1d) for layer in net.modules()) == 2


def test_the_centroid_of_all_mass_in_one_place_is_that_place() -> None:
    weights = torch.eye(5)
    assert centroid(weights, 0.5).tolist() == pytest.approx([-1, -0.5, 0, 0.5, 1])
    around = centroid(weights, 0.5, circular=True)
    assert around[1:4].tolist() == pytest.approx([-0.5, 0, 0.5])
    # Half a turn either way is the same place, and mass on both sides of the cut lies there, not in the middle.
    both = centroid(torch.tensor([[0.5, 0, 0, 0, 0.5]]), 0.45, circular=True)
    assert abs(float(both)) == pytest.approx(1.0, abs=1e-6)


@torch.no_grad()
def test_the_pose_of_an_image_turned_by_a_stride_of_the_map_turns_back_by_it() -> None:
    """The map has an angle twice, at both of its ends, and is halved twice: so far the angle is followed."""
    torch.manual_seed(0)
    model = OfficialETN(nn.Flatten(), channels=1, size=29).eval()
    for convolution in (model.find_similarity.down, model.find_similarity.first, model.find_similarity.second):
        assert convolution is not None
        convolution.weight.mul_(6)  # an untrained softmax is flat
    line = (2 * torch.arange(29) + 1) / 29 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    image = torch.exp(-((x - 0.3) ** 2 + (y + 0.2) ** 2) / 0.05)[None, None]
    angle = 4 * 2 * math.pi / 28
    turned = warp(image, rotation().matrix(torch.tensor(angle))[None])
    before, after = (decompose(model.pose(each)).rotation for each in (image, turned))
    left = (after - before + angle + math.pi) % (2 * math.pi) - math.pi
    assert abs(float(left)) < 0.35 < angle


def test_the_pose_moves_the_content_by_the_inverse_of_what_the_maps_say() -> None:
    model = OfficialETN(nn.Flatten(), channels=1, size=28).eval()
    with torch.no_grad():
        for net in (model.find_similarity, model.find_shear):
            for conv in (net.across, net.down):
                if conv is not None:
                    conv.weight.zero_()  # flat marks: the centroid of a line is 0, and only the origin counts
        model.find_similarity.origins[0] = math.atanh(0.2)
        pose = decompose(model.pose(torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))))
    # Read at a larger radius, the content shrinks.
    assert float(pose.scale) == pytest.approx(math.exp(-0.2 * (math.log(10) + math.log(2) / 2) / 2), rel=1e-4)
    assert float(pose.shear) == pytest.approx(0, abs=1e-4)
