"""How the images of a source arrive: shares of turns with their intervals, and votes for all eight orientations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headtilt.plot.style import BLUE, FAINT, INK, PALE, VERMILION, new_figure, say, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def audit(found: Mapping[str, Any]) -> Figure:
    """Return a picture of what an audit found.

    Args:
        found: What `headtilt.apps.audit.Audit.as_dict` gives.
    """
    angles = found["angles"]
    figure = new_figure(7.5, 4.6 if angles is None else 6.6)
    panels = figure.subplots(2 if angles is None else 3, 1, height_ratios=[4, 8] if angles is None else [4, 8, 5])
    _shares(panels[0], found)
    _votes(panels[1], found)
    if angles is not None:
        _angles(panels[2], angles)
    kind = "fitted head" if found["fitted"] else "the model's own confidence"
    figure.suptitle(found["sentence"], x=0.01, ha="left", fontsize=11.5, weight="bold", color=INK, wrap=True)
    figure.supxlabel(f"{found['images']} images, {kind}", x=0.99, ha="right", fontsize=8, color=FAINT)
    return figure


def _shares(axes: Axes, found: Mapping[str, Any]) -> None:
    for place, (name, share) in enumerate(found["shares"].items()):
        low, middle, high = (100 * share[key] for key in ("low", "share", "high"))
        colour = BLUE if place == 0 else VERMILION
        axes.barh(place, middle, height=0.6, color=colour, zorder=2)
        axes.plot([low, high], [place, place], color=INK, lw=1.4, zorder=3, marker="|", ms=6)
        _row(axes, place, name, f"{middle:.0f} %")
    style_axes(axes, title="share of images, mirrored or not (line: 95 % interval)", grid="x")
    axes.set(xlim=(0, 100), ylim=(len(found["shares"]) - 0.5, -0.5), yticks=[])


def _votes(axes: Axes, found: Mapping[str, Any]) -> None:
    for place, (name, count) in enumerate(found["votes"].items()):
        axes.barh(place, count, height=0.6, color=PALE if place else BLUE, zorder=2)
        _row(axes, place, name, str(count))
    style_axes(axes, title="votes: how each image seems to arrive", grid="x")
    axes.set(ylim=(len(found["votes"]) - 0.5, -0.5), yticks=[])


def _angles(axes: Axes, counts: tuple[int, ...]) -> None:
    axes.bar(range(len(counts)), counts, width=0.8, color=[BLUE, *[VERMILION] * (len(counts) - 1)], zorder=2)
    style_axes(axes, title="any angle: turned clockwise by", grid="y")
    axes.set_xticks(range(len(counts)), [f"{30 * place}°" for place in range(len(counts))])


def _row(axes: Axes, place: int, name: str, value: str) -> None:
    for x, text, side in ((-0.015, name, "right"), (1.02, value, "left")):
        say(axes, x, place, text, 8.5, ha=side, transform=axes.get_yaxis_transform())
