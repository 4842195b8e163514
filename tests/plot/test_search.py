"""Orbits, surfaces, and images before and after."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt import plot
from headtilt.plot import style
from tests.toys import ungated

from .toys import LEVELS, NAMES, check_nothing_is_cut_off, network, pictures, texts


class TestOrbit:
    def test_the_three_curves_run_from_0_to_1_and_their_maxima_are_marked(self, robust):
        curve = plot.orbit(robust, pictures()[0], samples=24).axes[0]
        lines = {line.get_label(): line for line in curve.lines if len(line.get_xdata()) == 24}
        dots = [line for line in curve.lines if line.get_marker() == "o"]
        assert list(lines) == ["energy", "bayesian", "group"]
        for line, dot in zip(lines.values(), dots, strict=True):
            values = line.get_ydata()
            assert values.min() == 0
            assert values.max() == 1
            assert dot.get_xdata()[0] == line.get_xdata()[values.argmax()]

    def test_the_energy_curve_is_what_the_model_says_of_the_turned_images(self, robust):
        image = pictures()[0]
        curve = plot.orbit(robust, image, samples=24).axes[0]
        angles = np.arange(-12, 12) * 15.0
        with torch.no_grad():
            turned = ht.warp(
                image[None],
                ht.rotation().matrix(torch.tensor(angles).deg2rad()).float(),
                padding="auto",
                interpolation="bicubic",
            )
            found = robust.model(turned).logsumexp(-1).numpy()
        np.testing.assert_allclose(curve.lines[0].get_xdata(), angles, atol=1e-9)
        expected = (found - found.min()) / (found.max() - found.min())
        np.testing.assert_allclose(curve.lines[0].get_ydata(), expected, atol=1e-5)
        best = angles[expected.argmax()]
        assert texts(curve) == [f" best: turned back by {best:+.0f}° ".replace("-", "−")]
        assert plot.orbit(robust, image, samples=24).axes[2].get_xlabel() == "turned back by (degrees, clockwise)"

    def test_what_a_search_found_is_marked_where_it_lies(self, robust):
        curve, _, views = plot.orbit(robust, pictures()[0], samples=24, found=math.radians(-100)).axes
        (line,) = [line for line in curve.lines if line.get_linestyle() == ":"]
        assert line.get_xdata()[0] == pytest.approx(-100)
        assert texts(curve) == [" found: turned back by −100° "]
        framed = [box.xy[0] for box in views.artists if box.patch.get_linewidth() == 2]
        assert framed == [pytest.approx(-105)]

    def test_the_strip_changes_where_the_label_changes(self, robust):
        from matplotlib.legend import Legend

        image = pictures()[1]
        curve, strip, _ = plot.orbit(robust, image, samples=24, names=NAMES).axes
        turned = ht.warp(image[None], ht.rotation().orbit(24).float(), padding="auto", interpolation="bicubic")
        labels = robust.model(turned).argmax(-1).tolist()
        borders = [-187.5, *(-180 + 15 * place - 7.5 for place in range(1, 24) if labels[place] != labels[place - 1])]
        assert len(borders) > 2
        np.testing.assert_allclose([bar.get_x() for bar in strip.patches], borders)
        legends = [child for child in curve.get_children() if isinstance(child, Legend) and child != curve.legend_]
        named = texts(strip) + [text.get_text() for legend in legends for text in legend.get_texts()]
        assert set(named) == {NAMES[label] for label in labels}

    def test_some_views_lie_below_and_the_best_is_framed(self, robust):
        from matplotlib.offsetbox import AnnotationBbox

        curve, _, views = plot.orbit(robust, pictures()[0], samples=36).axes
        shown = [artist for artist in views.artists if isinstance(artist, AnnotationBbox)]
        assert 8 <= len(shown) <= 10
        best = curve.lines[0].get_xdata()[curve.lines[0].get_ydata().argmax()]
        framed = [box.xy[0] for box in shown if box.patch.get_linewidth() == 2]
        assert framed == [best]
        assert np.diff([box.xy[0] for box in shown]).min() >= 30

    @pytest.mark.parametrize(
        ("group", "count", "tick"),
        [(ht.scale(0.3), 25, "×1.00"), (ht.translate_x(0.3), 25, "0.00"), (ht.reflection(), 4, "↔")],
    )
    def test_other_groups_have_their_own_units(self, robust, group, count, tick):
        figure = plot.orbit(robust, pictures()[0], group, samples=24)
        assert len(figure.axes[0].lines[0].get_xdata()) == count
        check_nothing_is_cut_off(figure)
        assert tick in [label.get_text() for label in figure.axes[2].get_xticklabels()]

    def test_a_calibrator_is_part_of_what_is_drawn(self, robust):
        shifted = ungated(network(), LEVELS, calibrator=lambda seen: ht.Evidence(seen.logits * torch.arange(5.0)))
        image = pictures()[0]
        plain, calibrated = (plot.orbit(wrapper, image, samples=24).axes[0] for wrapper in (robust, shifted))
        assert np.abs(plain.lines[0].get_ydata() - calibrated.lines[0].get_ydata()).max() > 0.05

    def test_errors_name_the_argument(self, robust):
        with pytest.raises(ht.ShapeError, match=r"image must be one image \(C, H, W\); got \(3, 1, 12, 12\)"):
            plot.orbit(robust, pictures())
        with pytest.raises(ht.OptionError, match="samples must be a whole number of at least 3"):
            plot.orbit(robust, pictures()[0], samples=2)


class TestSurface:
    def test_heat_and_maximum_are_what_the_model_says_of_first_then_second(self, robust):
        image, first, second = pictures()[0], ht.shear_x(0.5), ht.translate_y(0.4)
        axes, bar = plot.surface(robust, image, first, second, samples=7).axes
        expected = torch.empty(7, 7)
        for row, down in enumerate(second.grid(7)):
            for column, along in enumerate(first.grid(7)):
                pose = ht.compose(first.matrix(along), second.matrix(down)).float()
                expected[row, column] = robust.model(
                    ht.warp(image[None], pose[None], padding="auto", interpolation="bicubic")
                ).logsumexp(-1)
        heat = axes.collections[0].get_array().reshape(7, 7)
        np.testing.assert_allclose(heat, expected.detach(), rtol=1e-4)
        identity, maximum = axes.lines
        row, column = np.unravel_index(heat.argmax(), heat.shape)
        assert (identity.get_xdata()[0], identity.get_ydata()[0]) == (0, 0)
        assert maximum.get_xdata()[0] == pytest.approx(float(first.grid(7)[column]))
        assert maximum.get_ydata()[0] == pytest.approx(float(second.grid(7)[row]))
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("shear x", "translate y (half sides)")
        assert bar.get_ylabel() == "energy confidence"

    def test_scales_are_factors_and_angles_degrees(self, robust):
        figure = plot.surface(robust, pictures()[0], ht.rotation(), ht.scale(0.5), samples=9, confidence="bayesian")
        axes = figure.axes[0]
        assert axes.get_xlim() == pytest.approx((-160, 160))
        assert axes.get_ylim() == pytest.approx((0.5, 2))
        assert axes.lines[0].get_ydata()[0] == pytest.approx(1)
        check_nothing_is_cut_off(figure)

    def test_errors_name_the_argument(self, robust):
        with pytest.raises(ht.OptionError, match="two continuous groups"):
            plot.surface(robust, pictures()[0], ht.rotation(), ht.reflection(), samples=5)
        with pytest.raises(ht.OptionError, match="samples must be odd for scale"):
            plot.surface(robust, pictures()[0], ht.rotation(), ht.scale(), samples=8)
        with pytest.raises(ht.OptionError, match="confidence must be one of"):
            plot.surface(robust, pictures()[0], ht.rotation(), ht.scale(), samples=5, confidence="vibes")


class TestBeforeAfter:
    def test_inputs_lie_above_their_canonical_images(self, result):
        axes = plot.before_after(result, count=2).axes[0]
        above, below = axes.images[:2], axes.images[2:]
        assert len(below) == 2
        for number, (before, after) in enumerate(zip(above, below, strict=True)):
            np.testing.assert_allclose(before.get_array()[..., 0], result.images[number, 0], atol=1e-6)
            np.testing.assert_allclose(after.get_array()[..., 0], result.canonical()[number, 0], atol=1e-6)
            assert before.get_extent()[:2] == after.get_extent()[:2]
            assert before.get_extent()[2] > after.get_extent()[3]

    def test_right_and_wrong_differ_in_sign_and_colour(self, result):
        alone = result.trace[0].labels[:, 0, 4].tolist()
        truth = [int(result.labels[0]), (int(result.labels[1]) + 1) % 5, int(result.labels[2])]
        axes = plot.before_after(result, names=NAMES, truth=truth).axes[0]
        marked = [text for text in axes.texts if text.get_text()[-1] in "✓✗"]
        for text, said, true in zip(marked, [*alone, *result.labels.tolist()], truth * 2, strict=True):
            right = said == true
            assert text.get_text() == f"{NAMES[said]} {'✓' if right else '✗'}"
            assert text.get_color() == (style.GREEN if right else style.VERMILION)

    @pytest.mark.parametrize(
        ("turn", "word"), [(40.0, "turned back\nby +40°"), (-75.0, "turned back\nby −75°"), (0.2, "as it came")]
    )
    def test_it_says_how_the_input_was_turned_back(self, result, turn, word):
        pose = ht.rotation().matrix(math.radians(turn)).float().expand(3, 3, 3)
        assert texts(plot.before_after(replace(result, pose=pose)).axes[0]).count(word) == 3

    def test_no_more_images_are_shown_than_there_are(self, result):
        assert len(plot.before_after(result, count=8).axes[0].images) == 6

    def test_a_search_over_the_whole_group_can_be_shown_too(self):
        robust = ungated(network(), LEVELS, search="joint", budget=20)
        result = robust.search(pictures())
        words = texts(plot.before_after(result, names=NAMES).axes[0])
        alone = robust.model(result.images).argmax(-1)
        assert [word for word in words if word in NAMES] == [NAMES[label] for label in [*alone, *result.labels]]

    def test_no_text_is_cut_off(self, result):
        check_nothing_is_cut_off(plot.before_after(result, names=["a very long name indeed"] * 5, truth=[0, 1, 2]))

    def test_too_few_true_labels_are_an_error(self, result):
        with pytest.raises(ht.OptionError, match="truth must hold a label for each of the 3 images shown; got 2"):
            plot.before_after(result, truth=[1, 2])

    def test_a_long_name_goes_on_two_lines_and_keeps_the_word_that_matters(self, result):
        axes = plot.before_after(result, names=["speed limit 100 for all trucks"] * 5).axes[0]
        assert texts(axes).count("speed limit\n100 for all…") == 6
