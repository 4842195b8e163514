"""What lies beyond labels: back to the original image, exact quarter turns, embeddings, and heads of other kinds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.errors import OptionError, ShapeError
from headtilt.model.outputs import two_classes
from tests.toys import TEMPLATES, TemplateMatcher, TinyNet, its, render, tiny_images


def posed(height: int, width: int, pose: torch.Tensor):
    """A search result whose images are blank and whose poses are given."""
    net = TinyNet(size=12)
    result = its(net, samples=3).search(tiny_images(len(pose)))
    return replace(result, images=torch.zeros(len(pose), 1, height, width), pose=pose)


def random_pose(angle: float, size: float, slant: float, shift: float) -> torch.Tensor:
    parts = [ht.shear_x().matrix(slant), ht.scale().matrix(size), ht.rotation().matrix(angle)]
    return ht.compose(*parts, ht.translate(0.3, 1.0).matrix(shift))[None]


# --- back to the original ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(40, 40), (48, 96), (95, 40)])
@given(
    angle=st.floats(-3.1, 3.1),
    size=st.floats(-0.2, 0.2),
    slant=st.floats(-0.25, 0.25),
    shift=st.floats(-0.1, 0.1),
    x=st.floats(-0.1, 0.1),
    y=st.floats(-0.1, 0.1),
)
def test_the_corners_of_a_box_on_the_canonical_image_lie_where_their_dots_lie_on_the_original(
    height, width, angle, size, slant, shift, x, y
):
    pose, half = random_pose(angle, size, slant, shift), max(height, width) / 2
    corners = torch.tensor([[x - 0.15, y - 0.1], [x + 0.15, y - 0.1], [x + 0.15, y + 0.1], [x - 0.15, y + 0.1]])
    pixels = corners * half + torch.tensor([width / 2, height / 2])
    box = torch.cat([pixels[0], pixels[2]])[None, None]
    found = posed(height, width, pose).invert(boxes=box, corners=True)[0, 0]
    for corner, seen in zip(corners.tolist(), found, strict=True):
        # The dot is drawn on the canonical image and, by the formula, on the original; nothing is resampled.
        drawn = render([(*corner, 0.06, 1.0)], torch.linalg.inv(pose[0].double()), height, width)
        total, rows, columns = drawn.sum(), torch.arange(height) + 0.5, torch.arange(width) + 0.5
        centre = torch.stack([(drawn.sum(0) * columns).sum(), (drawn.sum(1) * rows).sum()]) / total
        inside = bool(((centre - 8 > 0) & (centre + 8 < torch.tensor([width, height]))).all())
        if inside:  # a dot cut by the edge has its centre elsewhere
            assert (seen - centre).abs().max() < 0.5


def test_points_go_back_to_where_the_warp_took_them_from():
    image = torch.zeros(1, 1, 30, 50)
    image[0, 0, 10, 35] = 1
    pose = ht.rotation().matrix(torch.tensor([math.pi / 2]))
    row, column = divmod(int(ht.warp(image, pose, interpolation="nearest").flatten().argmax()), 50)
    back = posed(30, 50, pose).invert(points=torch.tensor([[[column + 0.5, row + 0.5]]]))
    assert_close(back, torch.tensor([[[35.5, 10.5]]]), atol=1e-4, rtol=0)


def test_a_box_comes_back_as_the_upright_box_around_its_corners():
    result = posed(40, 40, ht.rotation().matrix(torch.tensor([math.pi / 4, 0.0])))
    box = torch.tensor([10.0, 10.0, 30.0, 30.0]).expand(2, 1, 4)
    around = result.invert(boxes=box)
    reach = 10 * math.sqrt(2)
    assert_close(around[0, 0], torch.tensor([20 - reach, 20 - reach, 20 + reach, 20 + reach]))
    assert_close(around[1, 0], box[1, 0])
    assert result.invert(boxes=box, corners=True).shape == (2, 1, 4, 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32], ids=str)
def test_masks_come_back_to_the_pixels_they_came_from(dtype):
    masks = torch.zeros(4, 2, 20, 20, dtype=dtype)
    masks[:, 0, 3:9, 5:16] = 1
    masks[:, 1, 12:, :4] = 1
    quarters = ht.quarter_turns().matrix(torch.arange(4.0))
    canonical = torch.stack([torch.rot90(mask, -turn, (-2, -1)) for turn, mask in enumerate(masks)])
    back = posed(20, 20, quarters).invert(masks=canonical)
    assert back.dtype == dtype
    assert torch.equal(back, masks)


def test_invert_says_what_it_takes():
    result = posed(20, 20, torch.eye(3)[None])
    with pytest.raises(OptionError, match="exactly one"):
        result.invert()
    with pytest.raises(OptionError, match="exactly one"):
        result.invert(points=torch.zeros(1, 1, 2), boxes=torch.zeros(1, 1, 4))
    with pytest.raises(ShapeError, match=r"boxes must be \(B, N, 4\) with B = 1"):
        result.invert(boxes=torch.zeros(3, 4))
    with pytest.raises(ShapeError, match="points must be a tensor"):
        result.invert(points=[[1, 2]])


# --- quarter turns ----------------------------------------------------------------------------------------------------


def test_quarter_turns_are_the_cyclic_group_of_four():
    orbit = ht.quarter_turns().orbit()
    for first in range(4):
        for second in range(4):
            assert torch.equal(orbit[first] @ orbit[second], orbit[(first + second) % 4])
    assert torch.equal(
        ht.quarter_turns().inverse(torch.arange(4.0)).double() @ orbit, torch.eye(3).double().expand(4, 3, 3)
    )
    assert_close(orbit[1], ht.rotation().matrix(torch.tensor(math.pi / 2, dtype=torch.float64)))


def test_the_documents_preset_turns_pixels_exactly_and_reads_the_turn():
    matcher = TemplateMatcher(TEMPLATES, 32, 32)
    pages = torch.stack([render(blobs, torch.eye(3)) for blobs in TEMPLATES])[:, None]
    robust = ht.ITS(matcher, **ht.documents(), gate=None)
    for turns in range(4):
        turned = torch.rot90(pages, -turns, (-2, -1))
        result = robust.search(turned)
        assert result.quarters.tolist() == [-turns % 4] * 3
        assert torch.equal(result.canonical(), pages)
        assert torch.equal(result.pose, ht.quarter_turns().matrix(result.quarters))
        assert result.views.tolist() == [4] * 3


# --- embeddings and the ways of scikit-learn --------------------------------------------------------------------------


def test_an_embedding_is_what_the_last_layer_reads_of_the_canonical_view():
    net, images = TinyNet().eval(), tiny_images(5)
    robust = its(net, samples=7, confidence="energy")
    canonical = robust.search(images).canonical()
    embedded = robust.embed(images)
    assert_close(embedded, net.trunk(canonical).detach())
    assert not torch.allclose(embedded, net.trunk(images))
    with pytest.raises(OptionError, match="embed needs"):
        ht.ITS(lambda views: views.flatten(1)[:, :3]).embed(images)


def test_predict_gives_arrays_and_abstains_where_the_probability_is_low():
    robust, images = its(TinyNet(), samples=7), tiny_images(9)
    result = robust.search(images)
    top = result.probabilities.amax(1)
    threshold = float(top.median())
    labels, chances = robust.predict(images.numpy()), robust.predict_proba(images)
    assert isinstance(labels, np.ndarray)
    assert labels.tolist() == result.labels.tolist()
    assert_close(torch.from_numpy(chances), result.probabilities)
    cautious = robust.predict(images, abstain=threshold)
    assert cautious.tolist() == torch.where(top >= threshold, result.labels, -1).tolist()
    assert -1 in cautious
    with pytest.raises(OptionError, match="abstain must be a probability"):
        robust.predict(images, abstain=60)


# --- heads of other kinds ---------------------------------------------------------------------------------------------


class Difference(nn.Module):
    """One logit: how much more the image looks like the first template than like the second."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher = TemplateMatcher(TEMPLATES[:2], 32, 32)

    def forward(self, images):
        scores = self.matcher(images)
        return scores[:, 1:] - scores[:, :1]


def planted(angles) -> torch.Tensor:
    """The first two templates in turn, each turned by its angle."""
    turns = ht.rotation().matrix(torch.tensor(angles, dtype=torch.float64))
    return torch.stack([render(TEMPLATES[place % 2], turn) for place, turn in enumerate(turns)])[:, None]


def test_a_single_logit_is_no_and_yes_inside_and_one_logit_outside():
    grid = ht.rotation().grid(16)
    images = planted([float(grid[place]) for place in (2, 5, 11, 14)])
    robust = its(Difference(), samples=16, confidence="energy", gate=None)
    result = robust.search(images)
    assert robust(images).shape == (4, 1)
    assert result.labels.tolist() == [0, 1, 0, 1]
    assert_close(result.perturbation, ht.rotation().matrix(grid[[2, 5, 11, 14]].float()), atol=1e-4, rtol=0)
    assert_close(result.probabilities[:, 1:], result.logits.sigmoid())
    assert robust.predict_proba(images).shape == (4, 2)
    assert result.bare.shape == (4, 1)
    assert "label 0" in result.describe(0)


@given(z=st.floats(-30, 30))
def test_the_two_classes_of_a_logit_have_its_sigmoid_and_do_not_favour_yes(z):
    one = torch.tensor([[z]], dtype=torch.float64)
    both = two_classes(one)
    assert_close(both.softmax(-1)[:, 1:], one.sigmoid())
    assert_close(both.logsumexp(-1), two_classes(-one).logsumexp(-1))


class Presence(nn.Module):
    """Two logits, each whether its template is there: high on its template, low on anything else."""

    def __init__(self) -> None:
        super().__init__()
        drawn = [[*TEMPLATES[0], *TEMPLATES[1]], TEMPLATES[0], TEMPLATES[1]]
        self.matcher = TemplateMatcher(drawn, 32, 32, sharpness=60.0)

    def forward(self, images):
        both, first, second = self.matcher(images).unbind(1)
        return torch.stack([torch.logaddexp(both, first) - 55, torch.logaddexp(both, second) - 55], dim=1)


def test_several_labels_are_found_together_at_the_pose_where_both_are_sure():
    turn = ht.rotation().grid(16)[[4, 12]]
    scene = [*TEMPLATES[0], *TEMPLATES[1]]
    images = torch.stack([render(scene, ht.rotation().matrix(angle)) for angle in turn])[:, None]
    robust = its(Presence(), samples=16, confidence="multilabel")
    assert robust.gate is None
    result = robust.search(images)
    assert result.labels.tolist() == [[True, True], [True, True]]
    assert not (Presence()(images) > 0).any()
    assert_close(result.probabilities, result.logits.sigmoid())
    assert_close(result.perturbation, ht.rotation().matrix(turn.float()), atol=1e-4, rtol=0)
    assert robust(images).shape == (2, 2)
    assert robust.predict(images, abstain=0.0).dtype == bool


def test_several_labels_refuse_what_assumes_one():
    for options in ({"readout": "marginal"}, {"gate": 1.0}, {"calibrator": "batch"}):
        with pytest.raises(OptionError, match="multilabel"):
            its(TinyNet(), confidence="multilabel", **options)
    with pytest.raises(OptionError, match="multilabel"):
        its(TinyNet(), confidence="multilabel").fit(tiny_images(20))
    robust = its(TinyNet(), confidence="multilabel")
    for name, value in (("gate", 1.0), ("calibrator", "batch")):
        with pytest.raises(OptionError, match="multilabel"):
            setattr(robust, name, value)


# --- what it says on the way ------------------------------------------------------------------------------------------


def test_a_search_says_nothing_unless_asked(caplog, capfd):
    robust, images = its(TinyNet(), samples=5, gate=0.0), tiny_images(3)
    with caplog.at_level("INFO"):
        robust.search(images)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")
    with caplog.at_level("DEBUG", logger="headtilt"):
        result = robust.search(images)
    kept = int(result.gated.sum())
    assert caplog.messages == [f"searched 3 images: {int(result.views.sum())} views, {kept} kept by the gate"]
