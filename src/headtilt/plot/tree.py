"""The search tree of one image as a picture."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headtilt.errors import OptionError, at_least
from headtilt.geometry.groups import decompose
from headtilt.plot.style import (
    BAND,
    COLORMAP,
    FAINT,
    INK,
    Start,
    canvas,
    class_name,
    draw_thumbnail,
    group_title,
    in_natural_units,
    label_colours,
    say,
    scaled,
    style_axes,
    thumb_size,
    to_numpy,
    view_pixels,
)
from headtilt.result import SearchResult
from headtilt.search.found import LevelTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tree(
    result: SearchResult,
    index: int = 0,
    *,
    names: Sequence[str] | None = None,
    max_views: int = 9,
    first: Sequence[int] = (),
    within: Figure | None = None,
) -> Figure:
    """Return the search tree of one image: a row of views per level and hypothesis, from the input to the canonical.

    Frames show the confidence, scaled within each level. A bold outline and a badge mark the views that were kept;
    a line in the colour of its label leads from each of them to the row that expands it.

    Args:
        result: What `ITS.search` returned.
        index: Which of its images.
        names: Class names, by label.
        max_views: Views per row; those kept and the identity are always among them.
        first: Labels that choose their colours first, so that they have the same in all pictures of a page.
        within: The part of a larger figure to draw in; None makes a figure.
    """
    at_least("max_views", max_views, 1)
    if not -len(result) <= index < len(result):
        raise OptionError(f"index must name one of the {len(result)} images; got {index}.")
    return TreePicture(result, index % len(result), names, max_views, first).draw(within)


class TreePicture:
    """The picture of one image's search, on a canvas whose unit is the longer side of a thumbnail."""

    def __init__(
        self, result: SearchResult, index: int, names: Sequence[str] | None, limit: int, first: Sequence[int] = ()
    ) -> None:
        self.result, self.index, self.names = result, index, names
        self.alone = int(result.bare[index].argmax())
        self.trace = [level for level in result.trace if isinstance(level, LevelTrace)]
        if len(self.trace) < len(result.trace):
            raise OptionError("result must come from search='tree' to be drawn as one. Use before_after instead.")
        self.rows = [
            (depth, slot, *shown(level, index, slot, limit))
            for depth, level in enumerate(self.trace)
            for slot in level.active[index].nonzero()[:, 0].tolist()
        ]
        kept = [
            int(level.labels[index].flatten()[place])
            for level in reversed(self.trace)
            for place in level.chosen[index].tolist()
            if place >= 0
        ]
        self.colours = label_colours([*first, int(result.labels[index]), self.alone, *kept])
        self.width, self.height = thumb_size(result)
        self.pitch = max(self.width, 0.75) + 0.28
        self.gutter = 0.6 + 0.13 * result.hypotheses.active.shape[1]
        self.left = 1.2 + self.gutter
        # Six columns at least: the input's text and the colour bar lie side by side above them.
        self.right = self.left + self.pitch * max([6, *(len(shown) for _, _, shown, _ in self.rows)])

    def draw(self, within: Figure | None = None) -> Figure:
        """Return the figure: places first, since its height depends on them, then row by row."""
        tops, lows, before = [], [-max(self.height, 0.8) - 0.15], -1
        for depth, _, _, kept in self.rows:
            tops.append(lows[-1] - (0.7 if depth != before else 0.38))
            lows.append(tops[-1] - self.height - 0.42 - 0.13 * (len(kept) if depth + 1 < len(self.trace) else 1))
            before = depth
        end = lows[-1] - 0.4
        figure, self.axes = canvas(self.right + self.gutter, max(self.height, 0.8) + 0.1 - end, 0.7, within)
        self._ends(end, [*tops, end][0])
        starts: list[dict[int, Start]] = [{} for _ in self.trace]
        for top, (depth, slot, shown, kept) in zip(tops, self.rows, strict=True):
            if slot == 0:
                own = [low for low, row in zip(lows[1:], self.rows, strict=True) if row[0] == depth]
                self._band(depth, top, min(own))
            if depth and slot in starts[depth - 1]:
                self._arrive(starts[depth - 1][slot], depth, slot, top, self.left + len(shown) * self.pitch)
            self._row(depth, slot, shown, kept, top, starts[depth])
        for slot, start in starts[-1].items() if starts else ():
            place = self.trace[-1].chosen[self.index, slot]
            pose = self.trace[-1].poses()[self.index].flatten(0, 1)[place]
            if torch.allclose(pose, self.result.pose[self.index], atol=1e-5):
                self._arrive(start, len(self.trace), slot, end, 0)
        return figure

    def _band(self, depth: int, top: float, low: float) -> None:
        self.axes.fill_between([0, self.right + self.gutter], low, top + 0.4, color=BAND, lw=0, zorder=0)
        say(self.axes, 0.15, top - 0.1, f"level {depth + 1}", 7, FAINT, ha="left")
        group = self.trace[depth].group
        say(self.axes, 0.15, top - 0.36, group_title(group), 9, ha="left", weight="bold")
        if group.name == "rotation":
            say(self.axes, 0.15, top - 0.6, "turned back by", 7, FAINT, ha="left")

    def _ends(self, end: float, first: float) -> None:
        """Draw the input above, the canonical image below, what is said of them, and the colour bar."""
        result, index, half = self.result, self.index, self.height / 2
        label = int(result.labels[index])
        tilt = decompose(result.perturbation[index].double()).describe()
        undone = "found upright" if tilt == "upright" else f"found {tilt}; undone here"
        found = "the gate kept the model's own answer" if bool(result.gated[index]) else undone
        sure = f"canonical: {class_name(self.names, label, 32)} ({float(result.probabilities[index, label]):.0%})"
        poses = torch.stack([torch.eye(3), result.pose[index].cpu().float()])
        pixels = view_pixels(result, result.images[index], poses)
        ends = (
            (-0.06, pixels[0], f"input: {class_name(self.names, self.alone, 20)}", "the answer without a search"),
            (end, pixels[1], sure, f"{found}; {int(result.views[index])} views"),
        )
        for top, picture, title, note in ends:
            draw_thumbnail(self.axes, picture, (self.left, top), (self.width, self.height), (0.03, INK))
            x = self.left + self.width + 0.25
            say(self.axes, x, top - half + 0.16, title, 11, ha="left", weight="bold")
            say(self.axes, x, top - half - 0.2, note, 8, FAINT, ha="left")
        x, y = self.left - 0.3, -0.06 - half
        self._line([(self.left, y), (x, y), (x, first - half), (self.left - 0.16, first - half)], FAINT)
        self.axes.plot(self.left - 0.16, first - half, ">", color=FAINT, ms=5)
        x = self.right + self.gutter - 2.4
        bar = self.axes.inset_axes((x, -0.48, 2.0, 0.14), transform=self.axes.transData)
        bar.imshow(np.linspace(0, 1, 256)[None], cmap=COLORMAP, aspect="auto", extent=(0, 1, 0, 1))
        style_axes(bar)
        bar.set(xticks=[0, 1], xticklabels=["lowest", "highest"], yticks=[])
        say(self.axes, x + 1, -0.18, "confidence within a level")

    def _row(
        self, depth: int, slot: int, shown: list[int], kept: dict[int, int], top: float, starts: dict[int, Start]
    ) -> None:
        """Draw the views of one hypothesis, and note where the lines of those that are kept start."""
        from matplotlib import colormaps

        level, low = self.trace[depth], top - self.height
        pixels = view_pixels(self.result, self.result.images[self.index], level.poses()[self.index, slot, shown])
        confidence = to_numpy(level.confidence[self.index])
        shade = colormaps[COLORMAP](scaled(np.where(np.isfinite(confidence), confidence, np.nan))[slot])
        at, _, text = in_natural_units(level.group, level.parameters)
        for column, sample in enumerate(shown):
            x, chosen, rims = self.left + column * self.pitch, kept.get(sample), [(0.055, shade[sample])]
            middle = x + self.width / 2
            label = int(level.labels[self.index, slot, sample])
            if chosen is not None:
                colour = self.colours.get(label, FAINT)
                rims = [(0.12, colour), (0.075, "white"), *rims]
                self._badge(x - 0.02, top + 0.02, chosen, colour)
                # Nearer the side to which lines leave means a higher lane, so that they do not cross on their way.
                nearer = [other for other in kept if (other < sample if self._from_left(depth + 1) else other > sample)]
                lane = len(nearer) if depth + 1 < len(self.trace) else 0
                starts[chosen] = (middle, low - 0.34, low - 0.46 - 0.13 * lane, colour)
            draw_thumbnail(self.axes, pixels[column], (x, top), (self.width, self.height), *rims)
            say(self.axes, middle, top + 0.24, text(at[sample]), 6.5, FAINT if level.parameters[sample] else INK)
            word = class_name(self.names, label, 11)
            say(self.axes, middle, low - 0.22, word, 7.5, weight="normal" if chosen is None else "bold")

    def _from_left(self, depth: int) -> bool:
        """Return whether lines reach a level from the left: sides alternate, and the canonical image lies left."""
        return (len(self.trace) - depth) % 2 == 0

    def _arrive(self, start: Start, depth: int, slot: int, top: float, right: float) -> None:
        """Draw the line of a hypothesis from the view that was kept to the row (or the image) it leads to."""
        (x, y, lane, colour), middle, away = start, top - self.height / 2, 0.5 + 0.13 * slot
        edge, side = self.left - 0.3, self.left - away
        if not self._from_left(depth):
            edge, side = right + 0.1, self.right + away
        self._line([(x, y), (x, lane), (side, lane), (side, middle), (edge, middle)], colour)
        self._badge(edge, middle, slot, colour)

    def _line(self, points: list[tuple[float, float]], colour: str) -> None:
        """Draw a polyline with round corners."""
        corners = np.array(points)
        path = [corners[0]]
        for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
            reach = [min(0.09 / max(np.abs(end - corner).sum(), 1e-9), 0.5) for end in (before, after)]
            start, stop = corner + (before - corner) * reach[0], corner + (after - corner) * reach[1]
            path += [(1 - t) ** 2 * start + 2 * t * (1 - t) * corner + t**2 * stop for t in np.linspace(0, 1, 9)]
        self.axes.plot(*np.array([*path, corners[-1]]).T, color=colour, lw=1.6, zorder=1)

    def _badge(self, x: float, y: float, slot: int, colour: str) -> None:
        box = {"boxstyle": "round,pad=0.25", "fc": colour, "ec": "white", "lw": 0.8}
        say(self.axes, x, y, f"H{slot}", 6, "white", weight="bold", bbox=box, zorder=6)


def shown(level: LevelTrace, index: int, slot: int, limit: int) -> tuple[list[int], dict[int, int]]:
    """Return which samples of a hypothesis's orbit to show, and which of them became which hypothesis."""
    samples = len(level.parameters)
    chosen = enumerate(level.chosen[index].tolist())
    kept = {place % samples: number for number, place in chosen if place >= 0 and place // samples == slot}
    return subsample(samples, {*kept, int(level.parameters.abs().argmin())}, limit), kept


def subsample(count: int, keep: Collection[int], limit: int) -> list[int]:
    """Return `limit` indices spread evenly over `count`; those to keep replace their neighbours, or come on top."""
    shown = {round(place) for place in np.linspace(0, count - 1, min(limit, count))}
    for index in sorted(set(keep) - shown):
        others = sorted(shown - set(keep), key=lambda other: abs(other - index))
        shown = shown.difference(others[:1]) | {index}
    return sorted(shown)
