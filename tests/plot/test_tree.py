"""The tree of a search as a picture."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt import plot
from headtilt.calibration.gate import Gate
from headtilt.model.evidence import Evidence
from headtilt.plot.tree import shown, subsample
from tests.toys import ungated

from .toys import LEVELS, NAMES, check_nothing_is_cut_off, network, pictures, texts


class TestTree:
    def test_every_row_has_its_views_and_both_ends_are_there(self, result):
        figure = plot.tree(result, 1, max_views=5)
        rows = sum(int(level.active[1].sum()) for level in result.trace)
        assert rows == 1 + 3 + 3
        more = 0  # rows that keep more than five views, or whose kept views leave no room
        for level in result.trace:
            for slot in level.active[1].nonzero()[:, 0].tolist():
                more += len(shown(level, 1, slot, 5)[0]) - 5
        assert len(figure.axes[0].images) == rows * 5 + more + 2

    def test_the_first_picture_is_the_input_and_the_second_the_canonical_image(self, result):
        images = plot.tree(result, 2).axes[0].images
        np.testing.assert_allclose(images[0].get_array()[..., 0], result.images[2, 0], atol=1e-6)
        np.testing.assert_allclose(images[1].get_array()[..., 0], result.canonical()[2, 0], atol=1e-6)

    def test_views_lie_in_the_order_of_the_trace(self, result):
        images = plot.tree(result, 0, max_views=9).axes[0].images
        level = result.trace[0]
        expected = ht.warp(result.images[:1], level.poses()[0, 0], padding=result.padding, interpolation="bicubic")
        for view in range(9):
            np.testing.assert_allclose(images[2 + view].get_array()[..., 0], expected[view, 0], atol=1e-5)

    def test_views_are_named_with_parameter_and_label(self, result):
        words = texts(plot.tree(result, 0, names=NAMES, max_views=9).axes[0])
        assert [word for word in words if word.endswith("°")] == [
            "−160°", "−120°", "−80°", "−40°", "0°", "+40°", "+80°", "+120°", "+160°"
        ]  # fmt: skip
        labels = [NAMES[label] for level in result.trace for label in level.labels[0][level.active[0]].flatten()]
        assert sorted(word for word in words if word in NAMES) == sorted(labels)
        assert words.count("×1.00") == 3
        assert {"level 1", "rotation", "level 2", "scale", "level 3", "shear x"} <= set(words)

    def test_both_ends_say_what_was_found(self, result):
        words = texts(plot.tree(result, 0, names=NAMES).axes[0])
        first = result.trace[0]
        assert f"input: {NAMES[first.labels[0, 0, 4]]}" in words
        label = int(result.labels[0])
        assert f"canonical: {NAMES[label]} ({float(result.probabilities[0, label]):.0%})" in words
        tilt = ht.decompose(result.perturbation[0].double()).describe()
        assert f"found {tilt}; undone here; {int(result.views[0])} views" in words

    def test_badges_mark_what_was_kept_and_where_it_leads(self, result):
        words = texts(plot.tree(result, 0).axes[0])
        kept = [int((level.chosen[0] >= 0).sum()) for level in result.trace]
        assert kept == [3, 3, 3]
        # Each hypothesis has a badge where it is kept and one at the row it leads to; of the last three one goes on.
        assert sum(word in ("H0", "H1", "H2") for word in words) == 3 + 3 + 3 + 3 + 3 + 1

    def test_the_line_into_the_canonical_image_is_that_of_the_hypothesis_that_won(self):
        robust = ungated(network(), LEVELS[:2], samples=9, confidence="energy", ranking="support")
        result = robust.search(pictures(40))
        last = result.trace[-1]
        winners = []
        for index in range(40):
            chosen = last.poses()[index].flatten(0, 1)[last.chosen[index]]
            winners.append(int((chosen - result.pose[index]).abs().amax((1, 2)).argmin()))
        assert {0, 1} <= set(winners)
        for winner in set(winners):
            badge = plot.tree(result, winners.index(winner)).axes[0].texts[-1]
            assert badge.get_text() == f"H{winner}"

    def test_frames_show_the_confidence_scaled_within_the_level(self, result):
        from matplotlib import colormaps

        axes = plot.tree(result, 0, max_views=9).axes[0]
        faces = [tuple(patch.get_facecolor()[0]) for patch in axes.collections]
        confidence = result.trace[0].confidence[0, 0].double().numpy()
        scaled = (confidence - confidence.min()) / (confidence.max() - confidence.min())
        expected = [tuple(colormaps["viridis"](value)) for value in scaled]
        assert [face for face in faces if face in set(expected)][:9] == expected

    def test_views_that_were_kept_and_the_identity_are_always_shown(self):
        assert subsample(17, [], 5) == [0, 4, 8, 12, 16]
        assert subsample(17, [7, 8], 5) == [0, 7, 8, 12, 16]
        assert subsample(17, [1, 2, 8], 1) == [1, 2, 8]
        assert subsample(4, [0, 3], 9) == [0, 1, 2, 3]
        for keep in combinations(range(9), 3):
            shown = subsample(9, keep, 4)
            assert set(keep) <= set(shown)
            assert len(shown) == 4

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_no_text_is_cut_off_or_lies_on_another(self, result, index):
        figure = plot.tree(result, index, names=[f"{name} with a very long name" for name in NAMES])
        check_nothing_is_cut_off(figure)
        places = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts]
        for (one, box), (other, place) in combinations(places, 2):
            assert not box.padded(-1).overlaps(place.padded(-1)), f"{one!r} lies on {other!r}"

    def test_colour_wide_and_tall_images_keep_their_shape(self):
        for height, width in ((8, 14), (14, 8)):
            model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 14, 5))
            result = ungated(model, [ht.rotation(), ht.reflection()], samples=5, hypotheses=2).search(
                torch.rand(1, 3, height, width)
            )
            figure = plot.tree(result)
            left, right, bottom, top = figure.axes[0].images[0].get_extent()
            assert (top - bottom) / (right - left) == pytest.approx(height / width)
            assert figure.axes[0].images[0].get_array().shape == (height, width, 3)
            check_nothing_is_cut_off(figure)

    def test_an_answer_that_the_gate_kept_is_said_to_be(self):
        result = ungated(network(), LEVELS[:1], samples=9, gate=float("inf")).search(pictures())
        assert bool(result.gated.all())
        words = texts(plot.tree(result, 0).axes[0])
        assert "the gate kept the model's own answer; 9 views" in words

    def test_an_image_that_left_before_the_search_has_no_rows(self):
        first = network()(pictures())[:1]

        def told(evidence):  # knows the first image again, where it has come as it is
            known = (evidence.logits - first).abs().amax(-1, keepdim=True) < 1e-5
            return Evidence(evidence.logits, upright=known.float())

        gate = Gate(0.0, exit_at=0.5)
        result = ungated(network(), LEVELS[:1], samples=9, gate=gate, calibrator=told).search(pictures())
        counts = [len(plot.tree(result, index).axes[0].images) for index in range(3)]
        assert counts == [2, 9 + 2, 9 + 2]
        check_nothing_is_cut_off(plot.tree(result, 0))
        label = NAMES[network()(pictures()).argmax(-1)[0]]
        assert texts(plot.before_after(result, count=1, names=NAMES).axes[0]).count(label) == 2
        assert len(plot.tree(replace(result, trace=()), 0).axes[0].images) == 2

    def test_errors_name_the_argument(self, result):
        with pytest.raises(ht.OptionError, match="index must name one of the 3 images; got 3"):
            plot.tree(result, 3)
        with pytest.raises(ht.OptionError, match="max_views must be a whole number of at least 1"):
            plot.tree(result, max_views=0)
        with pytest.raises(ht.OptionError, match="names must hold a name for every label; got 1 names"):
            plot.tree(result, names=["one"])
        joint = ungated(network(), LEVELS, search="joint", budget=20).search(pictures())
        with pytest.raises(ht.OptionError, match="search='tree'"):
            plot.tree(joint)
