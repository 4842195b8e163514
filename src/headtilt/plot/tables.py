"""Measurements as bars and curves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headtilt.errors import OptionError
from headtilt.plot.style import BLUE, FAINT, INK, LINES, PALE, VERMILION, hue, new_figure, say, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bars(
    table: Mapping[str, Mapping[str, float | None]],
    *,
    title: str,
    highlight: Collection[str] = (),
    xlabel: str = "accuracy (%)",
) -> Figure:
    """Return horizontal bars of accuracy per method, from top to bottom, with the numbers beside them.

    Args:
        table: Per method "accuracy", "accuracy_std" (spread over networks, drawn as an error bar) and
            "upright_accuracy" (drawn as a diamond), as fractions; any may be missing or None.
        title: Title of the picture.
        highlight: Methods to set off in colour; the others turn grey. Empty colours all.
        xlabel: What the bars measure.
    """
    if not table:
        raise OptionError("table must hold at least one method; it is empty.")
    figure = new_figure(7, 0.95 + 0.36 * len(table))
    axes = figure.subplots()
    diamond: dict[str, Any] = {"ms": 6, "mfc": "white", "mec": VERMILION, "mew": 1.5, "label": "upright images"}
    for place, (method, entry) in enumerate(table.items()):
        accuracy, spread, upright = (
            percent(entry.get(key), f"{key} of {method!r}") for key in ("accuracy", "accuracy_std", "upright_accuracy")
        )
        value = "–" if accuracy is None else f"{accuracy:.1f}" + ("" if spread is None else f" ± {spread:.1f}")
        if accuracy is not None:
            colour = PALE if highlight and method not in highlight else BLUE
            axes.barh(place, accuracy, height=0.62, color=colour, zorder=2)
            if spread is not None:
                axes.errorbar(accuracy, place, xerr=spread, color=INK, lw=1.2, capsize=3, zorder=4)
        if upright is not None:
            axes.plot(upright, place, "D", zorder=3, clip_on=False, **diamond)
        weight = {"weight": "bold" if method in highlight else "normal", "va": "center_baseline"}
        for x, text, side in ((-0.015, method, "right"), (1.02, value, "left")):
            say(axes, x, place, text, 9, ha=side, transform=axes.get_yaxis_transform(), **weight)
    style_axes(axes, xlabel=xlabel, title=title, grid="x")
    axes.set(xlim=(0, 100), ylim=(len(table) - 0.5, -0.5), yticks=[])
    marked = axes.get_legend_handles_labels()[0][:1]
    if marked:
        axes.legend(handles=marked, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    return figure


def angle_curve(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str, polar: bool = False
) -> Figure:
    """Return accuracy against the angle of the input, one curve per method.

    Args:
        curves: Per method the angles in degrees, ascending, and the accuracies (fractions) there.
        title: Title of the picture.
        polar: Draw around a circle, upright at the top and clockwise as the content turns.
    """
    if not curves:
        raise OptionError("curves must hold at least one method; it is empty.")
    figure = new_figure(5.6, 5.4) if polar else new_figure(7, 3.6)
    axes = figure.add_subplot(projection="polar" if polar else None)
    for number, (method, (degrees, accuracies)) in enumerate(curves.items()):
        if not 0 < len(degrees) == len(accuracies):
            raise OptionError(
                f"curves[{method!r}] must hold as many accuracies as angles, and at least one; "
                f"got {len(degrees)} angles and {len(accuracies)} accuracies."
            )
        angles = np.asarray(degrees, dtype=float)
        values = np.array([percent(float(value), f"accuracy of {method!r}") for value in accuracies], dtype=float)
        if polar:
            # A full turn without its end point is closed; an arc stays open.
            whole = len(angles) > 2 and np.ptp(angles) + 1.5 * (angles[1] - angles[0]) >= 360
            angles, values = (np.append(one, one[: int(whole)]) for one in (np.radians(angles), values))
        axes.plot(angles, values, LINES[number % len(LINES)], color=hue(number), lw=2, label=method, zorder=3)
    style_axes(axes, title=title, grid="both")
    if polar:
        shares, turns = (25, 50, 75, 100), range(0, 360, 45)
        axes.set(theta_zero_location="N", theta_direction=-1, ylim=(0, 100), yticks=shares, yticklabels=[])
        axes.set_xticks(np.radians(turns), [f"{turn}°" for turn in turns])
        for share in shares:
            paper = {"fc": "white", "ec": "none", "pad": 1}
            say(axes, math.radians(157.5), share, f"{share} %", 7, FAINT, bbox=paper, zorder=4)
    else:
        low, high = axes.dataLim.intervalx.tolist()
        step = next((step for step in (1, 5, 10, 15, 30, 45) if high - low <= 9 * step), 90)
        ticks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
        axes.set(ylim=(0, 101), xlabel="angle of the input", ylabel="accuracy (%)")
        axes.set_xticks(ticks, [f"{tick}°".replace("-", "−") for tick in ticks])
        axes.margins(x=0.01)
    figure.legend(loc="outside lower center", ncols=min(len(curves), 3), frameon=False, fontsize=9)
    return figure


def percent(fraction: float | None, name: str) -> float | None:
    """Return a checked fraction in percent."""
    if fraction is not None and not 0 <= fraction <= 1:
        raise OptionError(f"{name} must be a fraction between 0 and 1; got {fraction!r}. Divide percentages by 100.")
    return None if fraction is None else round(100 * fraction, 9)  # 0.2725 is 27.25 %, not 27.250000000000004 %
