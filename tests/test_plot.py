import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import headtilt as ht
from core.toys import ungated
from headtilt import plot
from headtilt.gate import Gate
from headtilt.plot import style
from headtilt.plot.style import pixels_of
from headtilt.plot.tree import shown, subsample

pytest.importorskip("matplotlib")

NAMES = ("ant", "bee", "cat", "dog", "elk")
LEVELS = (ht.rotation(), ht.scale(0.25), ht.shear_x(0.25))


def network(channels=1, size=12):
    """Return an untrained network that gives many different labels: it looks at pixels relative to their mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 16), nn.GELU(), nn.Linear(16, 5, bias=False))
    with torch.no_grad():
        model[1].weight *= 8
        model[1].bias.copy_(-model[1].weight.sum(1) * 0.4)
    return model.eval()


def pictures(count=3, channels=1, size=12):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def robust():
    return ungated(network(), LEVELS, samples=9, confidence="energy")


@pytest.fixture(scope="module")
def result(robust):
    return robust.search(pictures())


def texts(axes):
    return [text.get_text() for text in axes.texts]


def check_nothing_is_cut_off(figure):
    figure.draw_without_rendering()
    seen, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(seen.x0, seen.y0) >= -0.01, "something lies left of the figure or below it"
    assert seen.x1 <= width + 0.01, "something lies right of the figure"
    assert seen.y1 <= height + 0.01, "something lies above the figure"


class TestTheModule:
    def test_importing_it_does_not_import_matplotlib_and_using_it_does_not_import_pyplot(self):
        code = (
            "import sys, headtilt.plot as plot\n"
            "assert 'matplotlib' not in sys.modules\n"
            "plot.bars({'a': {'accuracy': 0.5}}, title='t')\n"
            "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_without_matplotlib_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ht.MissingExtraError, match=r"matplotlib .* pip install 'headtilt\[plot\]'"):
            plot.bars({"a": {"accuracy": 0.5}}, title="t")

    def test_drawing_leaves_the_style_of_the_caller_alone(self, result):
        import matplotlib

        before = dict(matplotlib.rcParams)
        plot.before_after(result)
        plot.tree(result)
        assert dict(matplotlib.rcParams) == before


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
        expected = ht.warp(result.images[:1], level.poses()[0, 0])
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
        assert f"perturbation undone: {tilt}; {int(result.views[0])} views" in words

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
        result = ungated(network(), LEVELS[:1], samples=9, gate=1e9).search(pictures())
        assert bool(result.gated.all())
        words = texts(plot.tree(result, 0).axes[0])
        assert "the gate kept the model's own answer; 9 views" in words

    def test_an_image_that_left_before_the_search_has_no_rows(self):
        gate = Gate(0.0, exit_at=0.5, detector=lambda root: torch.tensor([1.0, 0.0, 0.0]))
        result = ungated(network(), LEVELS[:1], samples=9, gate=gate).search(pictures())
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
            turned = ht.warp(image[None], ht.rotation().matrix(torch.tensor(angles).deg2rad()).float())
            found = robust.model(turned).logsumexp(-1).numpy()
        np.testing.assert_allclose(curve.lines[0].get_xdata(), angles, atol=1e-9)
        expected = (found - found.min()) / (found.max() - found.min())
        np.testing.assert_allclose(curve.lines[0].get_ydata(), expected, atol=1e-5)
        best = angles[expected.argmax()]
        assert texts(curve) == [f" best pose {best:+.0f}° ".replace("-", "−")]

    def test_the_strip_changes_where_the_label_changes(self, robust):
        from matplotlib.legend import Legend

        image = pictures()[1]
        curve, strip, _ = plot.orbit(robust, image, samples=24, names=NAMES).axes
        turned = ht.warp(image[None], ht.rotation().orbit(24).float())
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
                expected[row, column] = robust.model(ht.warp(image[None], pose[None])).logsumexp(-1)
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

    @pytest.mark.parametrize(("turn", "word"), [(40.0, "↻ 40°"), (-75.0, "↺ 75°")])
    def test_the_arrow_says_how_the_input_was_turned(self, result, turn, word):
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


class TestBars:
    TABLE = {  # noqa: RUF012
        "vanilla": {"accuracy": 0.412, "accuracy_std": 0.011, "upright_accuracy": 0.989},
        "search": {"accuracy": 0.75, "accuracy_std": None, "upright_accuracy": None},
        "unknown": {"accuracy": None},
    }

    def test_bars_error_bars_markers_and_numbers_are_those_of_the_table(self):
        axes = plot.bars(self.TABLE, title="Digits").axes[0]
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([41.2, 75])
        assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == pytest.approx([0, 1])
        (errors,) = [lines for lines in axes.collections if hasattr(lines, "get_segments")]
        assert errors.get_segments()[0][:, 0].tolist() == pytest.approx([40.1, 42.3])
        diamonds = [line for line in axes.lines if line.get_marker() == "D"]
        assert [diamond.get_xdata()[0] for diamond in diamonds] == pytest.approx([98.9])
        assert texts(axes) == ["vanilla", "41.2 ± 1.1", "search", "75.0", "unknown", "–"]
        assert axes.get_title(loc="left") == "Digits"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["upright images"]

    def test_the_first_method_is_on_top_and_bars_start_at_zero(self):
        axes = plot.bars(self.TABLE, title="t").axes[0]
        assert axes.get_ylim() == (2.5, -0.5)
        assert axes.get_xlim() == (0, 100)

    def test_highlighted_methods_keep_their_colour_and_the_others_turn_grey(self):
        from matplotlib.colors import to_hex

        axes = plot.bars(self.TABLE, title="t", highlight=["search"]).axes[0]
        assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [style.PALE.lower(), style.BLUE.lower()]
        bold = [text.get_text() for text in axes.texts if text.get_weight() == "bold"]
        assert bold == ["search", "75.0"]

    def test_without_upright_accuracies_there_is_no_legend(self):
        assert plot.bars({"a": {"accuracy": 0.5}}, title="t").axes[0].get_legend() is None

    def test_no_text_is_cut_off(self):
        table = {f"a method with a rather long name, {number}": self.TABLE["vanilla"] for number in range(9)}
        check_nothing_is_cut_off(plot.bars(table, title="Digits"))

    def test_errors_name_the_argument(self):
        with pytest.raises(ht.OptionError, match="table must hold at least one method"):
            plot.bars({}, title="t")
        with pytest.raises(ht.OptionError, match=r"accuracy of 'a' must be a fraction .* got 94.2. Divide percentages"):
            plot.bars({"a": {"accuracy": 94.2}}, title="t")


class TestAngleCurve:
    CURVES = {"a": (range(-180, 180, 30), [0.5] * 11 + [0.25]), "b": ([-90, 0, 90], [0.1, 0.9, 0.3])}  # noqa: RUF012

    def test_curves_are_drawn_in_percent_against_degrees(self):
        figure = plot.angle_curve(self.CURVES, title="t")
        first, second = figure.axes[0].lines
        assert second.get_xdata().tolist() == [-90, 0, 90]
        assert second.get_ydata().tolist() == pytest.approx([10, 90, 30])
        assert first.get_linestyle() != second.get_linestyle()
        assert first.get_color() != second.get_color()
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
        labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert labels == ["−180°", "−135°", "−90°", "−45°", "0°", "45°", "90°", "135°"]
        check_nothing_is_cut_off(figure)

    def test_around_a_circle_a_full_turn_is_closed_and_an_arc_is_not(self):
        axes = plot.angle_curve(self.CURVES, title="t", polar=True).axes[0]
        turn, arc = axes.lines
        assert len(turn.get_xdata()) == 13
        assert turn.get_xdata()[-1] == turn.get_xdata()[0] == pytest.approx(-math.pi)
        assert turn.get_ydata()[-1] == turn.get_ydata()[0] == 50
        assert len(arc.get_xdata()) == 3
        # Upright is at the top, and positive angles go clockwise: a quarter turn lies on the right.
        assert (axes.get_theta_offset(), axes.get_theta_direction()) == (math.pi / 2, -1)

    def test_errors_name_the_argument(self):
        with pytest.raises(ht.OptionError, match="curves must hold at least one method"):
            plot.angle_curve({}, title="t")
        with pytest.raises(ht.OptionError, match=r"curves\['a'\] .* got 2 angles and 1 accuracies"):
            plot.angle_curve({"a": ([0, 90], [0.5])}, title="t")
        with pytest.raises(ht.OptionError, match="accuracy of 'a' must be a fraction"):
            plot.angle_curve({"a": ([0], [50])}, title="t")


class TestSave:
    @pytest.fixture
    def figure(self):
        return plot.bars({"a": {"accuracy": 0.5}}, title="t")

    def test_png_and_svg_are_written_into_a_new_folder_and_nothing_else_is(self, figure, tmp_path):
        png = plot.save(figure, tmp_path / "new" / "deep" / "picture.PNG")
        svg = plot.save(figure, os.fspath(tmp_path / "new" / "deep" / "picture.svg"))
        assert png.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in svg.read_text(encoding="utf-8")
        assert sorted(path.name for path in png.parent.iterdir()) == ["picture.PNG", "picture.svg"]

    def test_the_picture_has_150_dots_per_inch(self, figure, tmp_path):
        path = plot.save(figure, tmp_path / "picture.png")
        width, height = (int.from_bytes(path.read_bytes()[start : start + 4], "big") for start in (16, 20))
        assert (width, height) == (7 * 150, round((0.95 + 0.36) * 150 - 0.01))

    def test_the_old_picture_is_replaced_at_once_and_not_written_over(self, figure, tmp_path):
        (tmp_path / "picture.png").write_bytes(b"old")
        os.link(tmp_path / "picture.png", tmp_path / "other name of the old one")
        plot.save(figure, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "other name of the old one").read_bytes() == b"old"

    def test_a_failure_leaves_the_old_picture_and_no_remains(self, figure, tmp_path, monkeypatch):
        path = tmp_path / "picture.png"
        path.write_bytes(b"old")

        def fail(target, **options):
            target.write_bytes(b"half a pict")
            raise OSError("disk full")

        monkeypatch.setattr(figure, "savefig", fail)
        with pytest.raises(OSError, match="disk full"):
            plot.save(figure, path)
        assert path.read_bytes() == b"old"
        assert [one.name for one in tmp_path.iterdir()] == ["picture.png"]

    @pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.png.gz"])
    def test_another_suffix_is_an_error_and_makes_no_folder(self, figure, tmp_path, name):
        with pytest.raises(ht.OptionError, match=r"path must end in \.png or \.svg; got 'picture"):
            plot.save(figure, tmp_path / "new" / name)
        assert not (tmp_path / "new").exists()


def test_pixels_within_0_and_1_are_shown_as_they_are_and_others_are_scaled():
    grey = torch.tensor([[0.2, 0.6]])[None, None]
    np.testing.assert_allclose(pixels_of(grey)[0, 0], [[0.2] * 3, [0.6] * 3], rtol=1e-6)
    np.testing.assert_allclose(pixels_of(grey * 10 - 4)[0, 0], [[0] * 3, [1] * 3], atol=1e-6)
    colour = torch.rand(2, 3, 4, 5)
    np.testing.assert_allclose(pixels_of(colour), colour.permute(0, 2, 3, 1), rtol=1e-6)
    assert pixels_of(torch.rand(1, 4, 2, 2)).shape == (1, 2, 2, 3)
