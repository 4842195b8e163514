"""Measurements as bars and curves."""

import math

import pytest

import headtilt as ht
from headtilt import plot
from headtilt.plot import style

from .toys import check_nothing_is_cut_off, texts


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

    def test_a_number_is_rounded_as_it_is_where_per_cents_are_counted(self):
        axes = plot.bars({"TTA, mean": {"accuracy": 27.25 / 100}}, title="t").axes[0]
        assert texts(axes) == ["TTA, mean", f"{27.25:.1f}"]

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
