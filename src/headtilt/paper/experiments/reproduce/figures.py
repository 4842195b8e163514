"""What several figures share: bars with marks beside them, curves with bands, heat maps, strips of images."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headtilt.plot.style import BLUE, FAINT, GREEN, INK, LINES, PALE, VERMILION, draw_thumbnail, hue, say, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "ms": 4.5, "mec": FAINT, "mew": 1.2},
    {"marker": "D", "ms": 5, "mec": VERMILION, "mew": 1.5},
)


def bar_table(
    axes: Axes,
    bars: Mapping[str, Mapping[str, float | None]],
    beside: Mapping[str, Mapping[str, float | None]],
    *,
    title: str,
    xlabel: str,
    limit: float | None = None,
    ours: Collection[str] = (),
    named: bool = True,
) -> dict[str, Any]:
    """Draw a row for each name: a bar for the mean, its spread, marks for other values; return the marks for a legend.

    Args:
        axes: Where to draw.
        bars: "mean" and "std" by name, from top to bottom; a mean of None leaves the row empty.
        beside: Values to mark in the rows, by what they are and by name; two kinds at most.
        title: Above the axes.
        xlabel: Below them.
        limit: End of the axis; None goes beyond everything drawn.
        ours: Names in another colour.
        named: Whether the names are written at the left.
    """
    marks: dict[str, Any] = {}
    largest = 0.0
    for place, (name, entry) in enumerate(bars.items()):
        mean, std = entry["mean"], entry["std"] or 0.0
        if mean is not None:
            axes.barh(place, mean, height=0.64, color=GREEN if name in ours else BLUE, alpha=0.85, zorder=2)
            axes.errorbar(mean, place, xerr=std, color=INK, lw=1, capsize=2, zorder=4)
            largest = max(largest, mean + std)
            say(axes, 1.02, place, f"{mean:.1f}", 7.5, ha="left", transform=axes.get_yaxis_transform())
        for (what, values), look in zip(beside.items(), MARKS, strict=False):
            value = values.get(name)
            if value is not None:
                largest = max(largest, value)
                marks[what] = axes.plot(value, place, mfc="white", ls="", zorder=5, clip_on=False, **look)[0]
    style_axes(axes, title=title, xlabel=xlabel, grid="x")
    reach = limit if limit is not None else 5 * math.ceil(1.05 * max(largest, 1.0) / 5)
    axes.set(xlim=(0, reach), ylim=(len(bars) - 0.5, -0.5))
    axes.set_yticks(range(len(bars)), list(bars) if named else [""] * len(bars))
    return marks


def curves(
    axes: Axes,
    at: Sequence[float],
    lines: Mapping[str, tuple[Sequence[float], Sequence[float] | None]],
    *,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Draw curves over common places, each with its name for a legend and a band of its spread where it has one."""
    for number, (name, (values, band)) in enumerate(lines.items()):
        colour = (colours or {}).get(name, hue(number))
        axes.plot(at, values, LINES[number % len(LINES)], color=colour, lw=1.9, label=name, zorder=3)
        if band is not None and any(band):
            low, high = np.subtract(values, band), np.add(values, band)
            axes.fill_between(at, low, high, color=colour, alpha=0.15, lw=0, zorder=2)


def heat_map(
    axes: Axes,
    values: Any,
    *,
    rows: Sequence[Any],
    columns: Sequence[Any],
    title: str,
    xlabel: str = "",
    ylabel: str = "",
    limits: tuple[float, float],
    cmap: str,
    form: str = "",
) -> Any:
    """Draw a heat map with its first row at the bottom, numbers in its cells where a form is given; return it."""
    table = np.array(values, dtype=float)
    low, high = limits
    drawn = axes.imshow(table, cmap=cmap, vmin=low, vmax=high, aspect="auto", origin="lower", interpolation="nearest")
    style_axes(axes, title=title, xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    if form:
        for row, column in np.ndindex(*table.shape):
            shade = drawn.cmap(drawn.norm(table[row, column]))
            light = 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] > 0.55
            say(axes, column, row, form.format(table[row, column]), 8.5, INK if light else "white")
    return drawn


def strip(
    axes: Axes, views: Sequence[tuple[Any, str, str]], left: float, top: float, pitch: float, rims: Collection[int] = ()
) -> None:
    """Draw images of side 1 in a row, each with a word below in its colour.

    Args:
        axes: From `headtilt.plot.style.canvas`.
        views: Pixels (H, W, 3), word and colour of each.
        left: Where the first begins.
        top: Upper edge.
        pitch: From one to the next.
        rims: Which of them are framed in their colour.
    """
    for number, (pixels, word, colour) in enumerate(views):
        x = left + pitch * number
        frame = (0.05, colour) if number in rims else (0.015, PALE)
        draw_thumbnail(axes, pixels, (x, top), (1, 1), frame)
        short = word if len(word) <= 15 else word[:14] + "…"
        say(axes, x + 0.5, top - 1.15, short, 7 if len(short) > 9 else 8, colour)
