"""One picture that explains one answer: the image before and after, its orbit, and the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headtilt.errors import OptionError
from headtilt.geometry.groups import decompose
from headtilt.geometry.warp import invert
from headtilt.its import ITS
from headtilt.plot.search import before_after, orbit
from headtilt.plot.style import (
    FAINT,
    INK,
    PALE,
    PALETTE,
    class_name,
    in_natural_units,
    label_colours,
    natural_ticks,
    new_figure,
    say,
    style_axes,
    to_numpy,
    view_pixels,
)
from headtilt.plot.tree import tree
from headtilt.result import SearchResult
from headtilt.search.found import LatticeTrace, LevelTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOLD_APART = 5  # labels that get a colour of their own


def explain(robust: ITS, result: SearchResult, *, names: Sequence[str] | None = None, title: str = "") -> Figure:
    """Return all that explains the answer for one image, as one figure.

    Above, the image before and after beside its confidence along the first level; below, the tree of the search, or
    all views that a search over the whole group has seen.

    Args:
        robust: Who searched.
        result: What it found for a single image.
        names: Class names, by label.
        title: Written above.
    """
    if len(result) != 1:
        raise OptionError(f"result must be of one image; it is of {len(result)}.")
    walked = bool(result.trace) and all(isinstance(level, LevelTrace) for level in result.trace)
    width, low = 12.0, 3.9
    if walked:
        natural_width, natural_height = tree(result, names=names).get_size_inches()
        low = natural_height * width / natural_width
    figure = new_figure(width, 0.75 + 4.2 + low)
    parts: Any = figure.subfigures(3, 1, height_ratios=[0.75, 4.2, low])
    head, middle, foot = parts
    words = result.describe(0, names=names).partition("\n")[0]
    head.text(0.02, 0.68, title, ha="left", va="center", fontsize=12, color=INK, weight="bold")
    head.text(0.02, 0.25, words, ha="left", va="center", fontsize=10, color=FAINT)
    left, right = middle.subfigures(1, 2, width_ratios=[2.6, 9.4])
    first, turn = answered(result), float(decompose(result.pose[0].double()).rotation)
    found = turn if robust.plan.levels[0].name == "rotation" else None
    before_after(result, names=names, within=left)
    orbit(robust, result.images[0], names=names, first=first, found=found, within=right)
    if walked:
        tree(result, names=names, first=first, within=foot)
    else:
        views(result, names=names, first=first, within=foot)
    return figure


def answered(result: SearchResult) -> list[int]:
    """Return the labels of the first image that matter: the answer, the bare model's, the rivals'; as many as colours.

    All that is drawn of a search takes its colours from these, so that a colour means one label everywhere.
    """
    beam, trace = result.hypotheses, result.trace[0] if result.trace else None
    rivals = beam.labels[0][beam.active[0]].tolist()
    seen = [] if trace is None else Counter(trace.labels[0].flatten().tolist()).most_common()
    shown = (label for label, _ in seen if label >= 0)  # views that the model was not shown have −1
    found = [int(result.labels[0]), int(result.bare[0].argmax()), *rivals, *shown]
    return list(dict.fromkeys(found))[: len(PALETTE)]


def views(
    result: SearchResult,
    index: int = 0,
    *,
    names: Sequence[str] | None = None,
    first: Sequence[int] = (),
    within: Figure | None = None,
) -> Figure:
    """Return the confidence of every view that a search over the whole group has seen, with the best of each label.

    Args:
        result: What `ITS.search` returned, of a search that is no tree.
        index: Which of its images.
        names: Class names, by label.
        first: Labels that choose their colours first, so that they have the same in all pictures of a page.
        within: The part of a larger figure to draw in; None makes a figure.
    """
    if not -len(result) <= index < len(result):
        raise OptionError(f"index must name one of the {len(result)} images; got {index}.")
    if any(isinstance(level, LevelTrace) for level in result.trace):
        raise OptionError("result comes from search='tree'. Use tree instead.")
    figure = new_figure(12, 3.9) if within is None else within
    trace = result.trace[0] if result.trace else None
    if not isinstance(trace, LatticeTrace) or not bool(trace.confidence[index].isfinite().any()):
        axes = figure.subplots()
        axes.axis("off")
        say(axes, 0.5, 0.5, "The gate kept the model's own answer after a single view: nothing was searched.", 11)
        return figure
    cloud, best = figure.subplots(1, 2, width_ratios=[7.2, 4.8])
    colours = _cloud(cloud, trace, index, names, first)
    _best(best, result, index, names, colours)
    return figure


def _cloud(
    axes: Axes, trace: LatticeTrace, index: int, names: Sequence[str] | None, first: Sequence[int]
) -> dict[int, str]:
    """Draw the views along the first level, coloured by label, and return the labels' colours."""
    group, shown = trace.levels[0], trace.labels[index] >= 0
    at, axis, text = in_natural_units(group, trace.coordinates[index, shown, 0])
    confidence, labels = to_numpy(trace.confidence[index, shown]), trace.labels[index, shown].cpu().numpy()
    top = {int(label): float(confidence[labels == label].max()) for label in np.unique(labels)}
    ranked = sorted(top, key=lambda label: -top[label])
    every = label_colours([*first, *ranked[:TOLD_APART]])
    colours = {label: every[label] for label in ranked if label in every}
    rest = ~np.isin(labels, list(colours))
    if rest.any():
        others = len(top) - len(colours)
        word = f"{others} other{'s' if others > 1 else ''}"
        axes.scatter(at[rest], confidence[rest], s=18, color=PALE, label=word, lw=0)
    for label in reversed(list(colours)):
        here = labels == label
        axes.scatter(
            at[here],
            confidence[here],
            s=30,
            color=colours[label],
            label=class_name(names, label, 24),
            ec="white",
            lw=0.5,
        )
    folded = f", all {len(trace.levels)} levels" if len(trace.levels) > 1 else ""
    title = f"{len(at)} views seen{folded}"
    style_axes(axes, title=title, xlabel=axis, ylabel="confidence", grid="both")
    natural_ticks(axes, np.sort(at), text, group)
    handles, words = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], words[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return colours


def _best(axes: Axes, result: SearchResult, index: int, names: Sequence[str] | None, colours: dict[int, str]) -> None:
    """Draw the best view of each hypothesis, best first."""
    beam = result.hypotheses
    slots = beam.active[index].nonzero()[:, 0].tolist()
    pixels = view_pixels(result, result.images[index], beam.pose[index, slots])
    axes.set(xlim=(0, max(len(slots), 3)), ylim=(-1.75, 0), aspect="equal", anchor="NW")
    axes.axis("off")
    axes.set_title("best view of each label", loc="left", fontsize=10.5, color=INK, weight="bold", pad=8)
    answer = int(result.labels[index])
    for place, slot in enumerate(slots):
        label = int(beam.labels[index, slot])
        colour = colours.get(label, FAINT)
        axes.fill_between([place + 0.02, place + 0.94], -0.96, -0.04, color=colour, lw=0)
        axes.imshow(pixels[place], extent=(place + 0.05, place + 0.91, -0.93, -0.07), zorder=3)
        tilt = decompose(invert(beam.pose[index, slot].double())).describe()
        weight = "bold" if label == answer else "normal"
        say(axes, place + 0.48, -1.08, class_name(names, label, 16), 8.5, weight=weight)
        for line, part in enumerate([*tilt.split(", "), f"confidence {float(beam.confidence[index, slot]):.3g}"]):
            say(axes, place + 0.48, -1.22 - 0.12 * line, part, 7, FAINT)
    # `imshow` takes the limits over.
    axes.set(xlim=(0, max(len(slots), 3)), ylim=(-1.75, 0))
