"""What a search is worth against what it costs: one curve over the views that it may spend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headtilt.plot.style import BLUE, FAINT, INK, PALE, VERMILION, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cost(found: Mapping[str, Any]) -> Figure:
    """Return a picture of what budgets cost and are worth.

    Args:
        found: What `headtilt.cost.Costs.as_dict` gives.
    """
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    rows = found["rows"]
    for kind, colour in (("tilted", VERMILION), ("upright", BLUE)):
        views, agreement = [row[f"views_{kind}"] for row in rows], [row[f"agreement_{kind}"] for row in rows]
        axes.plot(views, agreement, color=colour, marker="o", ms=4, lw=1.4, zorder=2, label=f"{kind} images")
    chosen = next(row for row in rows if row["chosen"])
    for kind in ("tilted", "upright"):
        axes.plot(chosen[f"views_{kind}"], chosen[f"agreement_{kind}"], "o", ms=10, mfc="none", mec=INK, zorder=3)
    axes.axvline(1, color=PALE, lw=0.8, zorder=1)
    axes.annotate(
        "the bare model",
        (1, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color=FAINT,
    )
    style_axes(axes, title="answers that are the model's own to the image upright, %", grid="y")
    axes.set_xlabel("views per image", fontsize=9, color=INK)
    axes.set_ylim(min(row["agreement_tilted"] for row in rows) - 4, 101)
    axes.legend(frameon=False, fontsize=9, loc="center right")
    took = (
        f"this wrapper: {chosen['milliseconds_upright']:.1f} ms upright, {chosen['milliseconds_tilted']:.1f} ms tilted"
    )
    figure.supxlabel(
        f"circled is {took}; {found['images']} images on {found['device']}", x=0.99, ha="right", fontsize=8, color=FAINT
    )
    return figure
