"""Pictures of searches and of measurements; needs the extra ``headtilt[plot]``, which is imported on first use only.

Every function returns a `matplotlib.figure.Figure` of its own: nothing here touches pyplot, a display or global state.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headtilt.confidence import Confidence, Orbit, resolve
from headtilt.errors import MissingExtraError, OptionError, ShapeError, at_least
from headtilt.evidence import Evidence
from headtilt.groups import Group, Reflection, decompose
from headtilt.result import LevelTrace, SearchResult
from headtilt.warp import check_images, warp
from headtilt.wrapper import ITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[Any]]
Start = tuple[float, float, float]  # of a hypothesis's line: x, y, and the height of the lane it takes

INK, FAINT, PALE, BAND = "#222222", "#767676", "#B8BEC6", "#F3F4F6"
# Okabe and Ito's palette, told apart by every kind of colour vision; their yellow is too light for lines on white.
VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY = PALETTE = "#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
LINES = ("-", "--", "-.", ":")
COLORMAP = "viridis"


def tree(result: SearchResult, index: int = 0, *, names: Sequence[str] | None = None, max_views: int = 9) -> Figure:
    """Return the search tree of one image: a row of views per level and hypothesis, from the input to the canonical.

    Frames show the confidence, scaled within each level. A bold outline and a badge mark the views that were kept;
    a line in the hypothesis's colour leads from each of them to the row that expands it.

    Args:
        result: What `ITS.search` returned.
        index: Which of its images.
        names: Class names, by label.
        max_views: Views per row; those kept and the identity are always among them.
    """
    at_least("max_views", max_views, 1)
    if not -len(result) <= index < len(result):
        raise OptionError(f"index must name one of the {len(result)} images; got {index}.")
    return _Tree(result, index % len(result), names, max_views).draw()


def orbit(
    robust: ITS, image: Tensor, group: Group | None = None, *, samples: int = 72, names: Sequence[str] | None = None
) -> Figure:
    """Return the confidence of one image along an orbit, by the paper's three measures, each scaled to 0 … 1.

    Dots mark each measure's best pose, a dotted line that of `robust`'s own; below lie the labels and some views.

    Args:
        robust: Whose classifier and options to use.
        image: (C, H, W), raw pixels.
        group: The group to walk along; None takes the first level of `robust`.
        samples: Views along the orbit; one more where a group that is not periodic needs an odd number.
        names: Class names, by label.
    """
    at_least("samples", samples, 3)
    group = robust.plan.levels[0] if group is None else group
    grid = group.grid(samples if group.periodic else samples | 1)
    seen = _evidence(robust, image, group.matrix(grid))
    at, axis, text = _natural(group, grid)

    def judge(measure: str | Confidence) -> Array:
        judged = resolve(measure, getattr(robust.plan, "width", None))
        return _scaled(_numpy(judged(seen.reshape(1, 1, len(grid)), Orbit(group, len(grid)))[0, 0]))

    best = int(judge(robust.plan.confidence).argmax())
    figure = _figure(8, 4.4)
    curve, strip, views = figure.subplots(3, 1, sharex=True, height_ratios=[3.2, 0.3, 0.9])
    for name, colour, line in zip(("energy", "bayesian", "group"), (BLUE, ORANGE, VERMILION), LINES, strict=False):
        values = judge(name)
        top = int(values.argmax())
        curve.plot(at, values, line, color=colour, lw=1.8, label=name, zorder=3)
        curve.plot(at[top], values[top], "o", color=colour, ms=7, mec="white", mew=1.2, zorder=4)
    curve.axvline(at[best], color=INK, lw=1, ls=":", zorder=2)
    _say(curve, at[best], 1.1, f" best pose {text(at[best])} ", ha="right" if best > 0.75 * len(grid) else "left")
    _style(curve, ylabel="confidence, scaled", title=f"Confidence along {axis.split(' (')[0]}", grid="both")
    curve.set(ylim=(-0.04, 1.17), yticks=[0, 0.5, 1])
    curve.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)
    middles = (at[1:] + at[:-1]) / 2
    edges = np.concatenate([[2 * at[0] - middles[0]], middles, [2 * at[-1] - middles[-1]]])
    _label_strip(strip, edges, seen.labels.tolist(), names)
    _views_at(views, at, _views(robust, image, group.matrix(grid)), best)
    _style(views, xlabel=axis)
    views.set(xlim=edges[[0, -1]].tolist(), ylim=(0, 1), yticks=[])
    _natural_ticks(views, at, text, group)
    for upper in (curve, strip):
        upper.tick_params(axis="x", labelbottom=False)
    return figure


def surface(
    robust: ITS,
    image: Tensor,
    first: Group,
    second: Group,
    *,
    samples: int = 25,
    confidence: str | Confidence = "energy",
) -> Figure:
    """Return the confidence of one image over two groups as a heat map; identity and maximum are marked.

    Args:
        robust: Whose classifier and options to use.
        image: (C, H, W), raw pixels.
        first: The group done first, along x.
        second: The group done after it, along y; "group" confidence is the curvature in this direction.
        samples: Samples along each group.
        confidence: "energy", "bayesian", "group", or a callable (Evidence, Orbit) → (B, K, N).
    """
    at_least("samples", samples, 3)
    for group in (first, second):
        group.check_samples(samples)
        if isinstance(group, Reflection):
            raise OptionError("surface needs two continuous groups; reflection has four elements only. Use orbit.")
    poses = second.orbit(samples) @ first.orbit(samples)[:, None]
    seen = _evidence(robust, image, poses.flatten(0, 1)).reshape(1, samples, samples)
    measure = resolve(confidence, getattr(robust.plan, "width", None))
    heat = _numpy(measure(seen, Orbit(second, samples))[0]).T
    x, x_axis, x_text = _natural(first, first.grid(samples))
    y, y_axis, y_text = _natural(second, second.grid(samples))
    row, column = np.unravel_index(int(heat.argmax()), heat.shape)
    middle = samples // 2
    figure = _figure(6.2, 4.8)
    axes = figure.subplots()
    mesh = axes.pcolormesh(x, y, heat, cmap=COLORMAP, shading="gouraud", rasterized=True)
    if np.ptp(heat) > 0:
        axes.contour(x, y, heat, levels=8, colors="white", linewidths=0.6, linestyles="solid", alpha=0.6)
    best = f"maximum: {x_text(x[column])}, {y_text(y[row])}"
    axes.plot(x[middle], y[middle], "o", label="identity", clip_on=False, ms=9, mfc="none", mec="white", mew=1.8)
    axes.plot(x[column], y[row], "*", label=best, clip_on=False, ms=15, mfc=VERMILION, mec="white")
    _style(axes, xlabel=x_axis, ylabel=y_axis)
    _natural_ticks(axes, x, x_text, first)
    axes.yaxis.set_major_formatter(lambda value, _: y_text(value))
    legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False, borderaxespad=0.2)
    legend.get_lines()[0].set_markeredgecolor(INK)
    bar = figure.colorbar(mesh, ax=axes, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    _style(bar.ax, ylabel=f"{confidence if isinstance(confidence, str) else 'own'} confidence")
    return figure


def before_after(
    result: SearchResult,
    *,
    count: int = 8,
    names: Sequence[str] | None = None,
    truth: Tensor | Sequence[int] | None = None,
) -> Figure:
    """Return inputs above their canonical images, with what the model alone and the search said of each.

    Args:
        result: What `ITS.search` returned.
        count: How many of its images to show, from the first; fewer where there are fewer.
        names: Class names, by label.
        truth: True labels; right answers are then marked ✓ in green and wrong ones ✗ in red.

    Convention:
        ↻ and ↺ say how the input was turned, clockwise or counter-clockwise, to give the canonical image.
    """
    at_least("count", count, 1)
    count = min(count, len(result))
    true = None if truth is None else torch.as_tensor(truth).tolist()
    if true is not None and len(true) < count:
        raise OptionError(f"truth must hold a label for each of the {count} images shown; got {len(true)}.")
    width, height = _thumb_size(result)
    pitch, drop, left = max(width, 0.8) + 0.18, height + 0.8, 1.05
    figure, axes = _canvas(left + count * pitch, drop + height + 0.4, 0.9)
    turns = decompose(result.pose[:count].double()).rotation.rad2deg().tolist()
    rows = ("input", result.images, _root_labels(result)), ("canonical", result.canonical(), result.labels.tolist())
    for row, (word, images, answers) in enumerate(rows):
        top, low, pixels = -0.05 - row * drop, -0.05 - row * drop - height, _pixels(images[:count])
        _say(axes, left - 0.12, top - height / 2, word, 9, ha="right", weight="bold")
        for number, answer in enumerate(answers[:count]):
            middle = left + (number + 0.5) * pitch
            _thumb(axes, pixels[number], (middle - width / 2, top), (width, height), (0.02, PALE))
            right = None if true is None else answer == true[number]
            sign, colour = {None: ("", INK), True: (" ✓", GREEN), False: (" ✗", VERMILION)}[right]
            _say(axes, middle, low - 0.18, _name(names, answer, 12) + sign, 9, colour)
            if row == 0:
                arrow = "↻" if turns[number] >= 0 else "↺"
                _say(axes, middle, low - 0.53, f"{arrow} {abs(turns[number]):.0f}°", 8, FAINT)
    return figure


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
    figure = _figure(7, 0.95 + 0.36 * len(table))
    axes = figure.subplots()
    diamond: dict[str, Any] = {"ms": 6, "mfc": "white", "mec": VERMILION, "mew": 1.5, "label": "upright images"}
    for place, (method, entry) in enumerate(table.items()):
        accuracy, spread, upright = (
            _percent(entry.get(key), f"{key} of {method!r}") for key in ("accuracy", "accuracy_std", "upright_accuracy")
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
            _say(axes, x, place, text, 9, ha=side, transform=axes.get_yaxis_transform(), **weight)
    _style(axes, xlabel=xlabel, title=title, grid="x")
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
    figure = _figure(5.6, 5.4) if polar else _figure(7, 3.6)
    axes = figure.add_subplot(projection="polar" if polar else None)
    for number, (method, (degrees, accuracies)) in enumerate(curves.items()):
        if not 0 < len(degrees) == len(accuracies):
            raise OptionError(
                f"curves[{method!r}] must hold as many accuracies as angles, and at least one; "
                f"got {len(degrees)} angles and {len(accuracies)} accuracies."
            )
        angles = np.asarray(degrees, dtype=float)
        values = np.array([_percent(float(value), f"accuracy of {method!r}") for value in accuracies], dtype=float)
        if polar:
            # A full turn without its end point is closed; an arc stays open.
            whole = len(angles) > 2 and np.ptp(angles) + 1.5 * (angles[1] - angles[0]) >= 360
            angles, values = (np.append(one, one[: int(whole)]) for one in (np.radians(angles), values))
        axes.plot(angles, values, LINES[number % len(LINES)], color=_hue(number), lw=2, label=method, zorder=3)
    _style(axes, title=title, grid="both")
    if polar:
        shares, turns = (25, 50, 75, 100), range(0, 360, 45)
        axes.set(theta_zero_location="N", theta_direction=-1, ylim=(0, 100), yticks=shares, yticklabels=[])
        axes.set_xticks(np.radians(turns), [f"{turn}°" for turn in turns])
        for share in shares:
            paper = {"fc": "white", "ec": "none", "pad": 1}
            _say(axes, math.radians(157.5), share, f"{share} %", 7, FAINT, bbox=paper, zorder=4)
    else:
        low, high = axes.dataLim.intervalx.tolist()
        step = next((step for step in (1, 5, 10, 15, 30, 45) if high - low <= 9 * step), 90)
        ticks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
        axes.set(ylim=(0, 101), xlabel="angle of the input", ylabel="accuracy (%)")
        axes.set_xticks(ticks, [f"{tick}°".replace("-", "−") for tick in ticks])
        axes.margins(x=0.01)
    figure.legend(loc="outside lower center", ncols=min(len(curves), 3), frameon=False, fontsize=9)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG or SVG, whole or not at all, and return its path; missing folders are made."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise OptionError(f"path must end in .png or .svg; got {path.name!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        figure.savefig(unfinished, format=kind, dpi=figure.dpi, metadata={"Date": None} if kind == "svg" else None)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


class _Tree:
    """The picture of one image's search, on a canvas whose unit is the longer side of a thumbnail."""

    def __init__(self, result: SearchResult, index: int, names: Sequence[str] | None, limit: int) -> None:
        self.result, self.index, self.names = result, index, names
        self.alone = _root_labels(result)[index]
        self.trace = [level for level in result.trace if isinstance(level, LevelTrace)]
        if len(self.trace) < len(result.trace):
            raise OptionError("result must come from search='tree' to be drawn as one. Use before_after instead.")
        self.rows = [
            (depth, slot, *_shown(level, index, slot, limit))
            for depth, level in enumerate(self.trace)
            for slot in level.active[index].nonzero()[:, 0].tolist()
        ]
        self.width, self.height = _thumb_size(result)
        self.pitch = max(self.width, 0.75) + 0.28
        self.gutter = 0.6 + 0.13 * result.hypotheses.active.shape[1]
        self.left = 1.2 + self.gutter
        # Six columns at least: the input's text and the colour bar lie side by side above them.
        self.right = self.left + self.pitch * max([6, *(len(shown) for _, _, shown, _ in self.rows)])

    def draw(self) -> Figure:
        """Return the figure: places first, since its height depends on them, then row by row."""
        tops, lows, before = [], [-max(self.height, 0.8) - 0.15], -1
        for depth, _, _, kept in self.rows:
            tops.append(lows[-1] - (0.7 if depth != before else 0.38))
            lows.append(tops[-1] - self.height - 0.42 - 0.13 * (len(kept) if depth + 1 < len(self.trace) else 1))
            before = depth
        end = lows[-1] - 0.4
        figure, self.axes = _canvas(self.right + self.gutter, max(self.height, 0.8) + 0.1 - end, 0.7)
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
        _say(self.axes, 0.15, top - 0.1, f"level {depth + 1}", 7, FAINT, ha="left")
        _say(self.axes, 0.15, top - 0.36, _title(self.trace[depth].group), 9, ha="left", weight="bold")

    def _ends(self, end: float, first: float) -> None:
        """Draw the input above, the canonical image below, what is said of them, and the colour bar."""
        result, index, half = self.result, self.index, self.height / 2
        label = int(result.labels[index])
        tilt = decompose(result.perturbation[index].double()).describe()
        found = "the gate kept the model's own answer" if bool(result.gated[index]) else f"perturbation undone: {tilt}"
        sure = f"canonical: {_name(self.names, label, 32)} ({float(result.probabilities[index, label]):.0%})"
        poses = torch.stack([torch.eye(3), result.pose[index].cpu().float()])
        pixels = _views(result, result.images[index], poses)
        ends = (
            (-0.06, pixels[0], f"input: {_name(self.names, self.alone, 20)}", "the answer without a search"),
            (end, pixels[1], sure, f"{found}; {int(result.views[index])} views"),
        )
        for top, picture, title, note in ends:
            _thumb(self.axes, picture, (self.left, top), (self.width, self.height), (0.03, INK))
            x = self.left + self.width + 0.25
            _say(self.axes, x, top - half + 0.16, title, 11, ha="left", weight="bold")
            _say(self.axes, x, top - half - 0.2, note, 8, FAINT, ha="left")
        x, y = self.left - 0.3, -0.06 - half
        self._line([(self.left, y), (x, y), (x, first - half), (self.left - 0.16, first - half)], FAINT)
        self.axes.plot(self.left - 0.16, first - half, ">", color=FAINT, ms=5)
        x = self.right + self.gutter - 2.4
        bar = self.axes.inset_axes((x, -0.48, 2.0, 0.14), transform=self.axes.transData)
        bar.imshow(np.linspace(0, 1, 256)[None], cmap=COLORMAP, aspect="auto", extent=(0, 1, 0, 1))
        _style(bar)
        bar.set(xticks=[0, 1], xticklabels=["lowest", "highest"], yticks=[])
        _say(self.axes, x + 1, -0.18, "confidence within a level")

    def _row(
        self, depth: int, slot: int, shown: list[int], kept: dict[int, int], top: float, starts: dict[int, Start]
    ) -> None:
        """Draw the views of one hypothesis, and note where the lines of those that are kept start."""
        from matplotlib import colormaps

        level, low = self.trace[depth], top - self.height
        pixels = _views(self.result, self.result.images[self.index], level.poses()[self.index, slot, shown])
        confidence = _numpy(level.confidence[self.index])
        shade = colormaps[COLORMAP](_scaled(np.where(np.isfinite(confidence), confidence, np.nan))[slot])
        at, _, text = _natural(level.group, level.parameters)
        for column, sample in enumerate(shown):
            x, chosen, rims = self.left + column * self.pitch, kept.get(sample), [(0.055, shade[sample])]
            middle = x + self.width / 2
            if chosen is not None:
                rims = [(0.12, _hue(chosen)), (0.075, "white"), *rims]
                self._badge(x - 0.02, top + 0.02, chosen)
                # Nearer the side to which lines leave means a higher lane, so that they do not cross on their way.
                nearer = [other for other in kept if (other < sample if self._from_left(depth + 1) else other > sample)]
                lane = len(nearer) if depth + 1 < len(self.trace) else 0
                starts[chosen] = (middle, low - 0.34, low - 0.46 - 0.13 * lane)
            _thumb(self.axes, pixels[column], (x, top), (self.width, self.height), *rims)
            _say(self.axes, middle, top + 0.24, text(at[sample]), 6.5, FAINT if level.parameters[sample] else INK)
            word = _name(self.names, int(level.labels[self.index, slot, sample]), 11)
            _say(self.axes, middle, low - 0.22, word, 7.5, weight="normal" if chosen is None else "bold")

    def _from_left(self, depth: int) -> bool:
        """Return whether lines reach a level from the left: sides alternate, and the canonical image lies left."""
        return (len(self.trace) - depth) % 2 == 0

    def _arrive(self, start: Start, depth: int, slot: int, top: float, right: float) -> None:
        """Draw the line of a hypothesis from the view that was kept to the row (or the image) it leads to."""
        (x, y, lane), middle, away = start, top - self.height / 2, 0.5 + 0.13 * slot
        edge, side = self.left - 0.3, self.left - away
        if not self._from_left(depth):
            edge, side = right + 0.1, self.right + away
        self._line([(x, y), (x, lane), (side, lane), (side, middle), (edge, middle)], _hue(slot))
        self._badge(edge, middle, slot)

    def _line(self, points: list[tuple[float, float]], colour: str) -> None:
        """Draw a polyline with round corners."""
        corners = np.array(points)
        path = [corners[0]]
        for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
            reach = [min(0.09 / max(np.abs(end - corner).sum(), 1e-9), 0.5) for end in (before, after)]
            start, stop = corner + (before - corner) * reach[0], corner + (after - corner) * reach[1]
            path += [(1 - t) ** 2 * start + 2 * t * (1 - t) * corner + t**2 * stop for t in np.linspace(0, 1, 9)]
        self.axes.plot(*np.array([*path, corners[-1]]).T, color=colour, lw=1.6, zorder=1)

    def _badge(self, x: float, y: float, slot: int) -> None:
        box = {"boxstyle": "round,pad=0.25", "fc": _hue(slot), "ec": "white", "lw": 0.8}
        _say(self.axes, x, y, f"H{slot}", 6, "white", weight="bold", bbox=box, zorder=6)


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure of that many inches, bound to no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def _canvas(width: float, height: float, inches: float) -> tuple[Figure, Axes]:
    """Return a figure with bare axes from (0, −height) to (width, 0), whose unit is that many inches."""
    figure = _figure(width * inches + 0.1, height * inches + 0.1)
    axes = figure.add_subplot(xlim=(0, width), ylim=(-height, 0), aspect="equal", autoscale_on=False)
    axes.axis("off")
    return figure, axes


def _style(axes: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "", grid: str = "") -> None:
    """Give axes the one look of all figures: no box, a light grid behind the data, small quiet labels."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, weight="bold", pad=8)
    axes.set_xlabel(xlabel, fontsize=9, color=INK)
    axes.set_ylabel(ylabel, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if grid:
        axes.grid(axis=grid, color="#E3E5E8", lw=0.8)  # type: ignore[arg-type]
        axes.set_axisbelow(True)


def _hue(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _say(axes: Axes, x: float, y: float, text: str, size: float = 8, color: str = INK, **more: Any) -> None:
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, "color": color, **more})


def _thumb(
    axes: Axes, pixels: Array, corner: tuple[float, float], size: tuple[float, float], *rims: tuple[float, Any]
) -> None:
    """Draw pixels from their upper left corner, on rims of some width and colour, the outermost first."""
    (x, y), (width, height) = corner, size
    for rim, colour in rims:
        axes.fill_between([x - rim, x + width + rim], y - height - rim, y + rim, color=colour, lw=0, zorder=2)
    axes.imshow(pixels, extent=(x, x + width, y - height, y), interpolation="nearest", zorder=3)


def _label_strip(axes: Axes, edges: Array, labels: list[int], names: Sequence[str] | None) -> None:
    """Draw which label holds where along an orbit; a label too long for all of its stretches goes to a legend."""
    starts = [place for place in range(len(labels)) if place == 0 or labels[place] != labels[place - 1]]
    colours = {label: _hue(place) for place, label in enumerate(dict.fromkeys(labels))}
    unnamed: dict[str, Any] = {}
    for start, stop in zip(starts, [*starts[1:], len(labels)], strict=True):
        low, high, word = edges[start], edges[stop], _name(names, labels[start], 16)
        bar = axes.barh(0, high - low, left=low, height=1, color=colours[labels[start]], ec="white", lw=1)
        unnamed.setdefault(word, bar)
        if (high - low) / (edges[-1] - edges[0]) > 0.0115 * len(word):
            _say(axes, (low + high) / 2, 0, word, 8, "white", weight="bold")
            unnamed[word] = None
    rest = {word: bar for word, bar in unnamed.items() if bar is not None}
    if rest:
        where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1.4), "frameon": False, "fontsize": 7}
        axes.legend(list(rest.values()), list(rest), **where)
    _style(axes)
    axes.set(ylim=(-0.5, 0.5), yticks=[0], yticklabels=["label"])


def _views_at(axes: Axes, at: Array, pixels: Array, best: int) -> None:
    """Draw some views under their places on the x axis, evenly from the best one, which is framed."""
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    wanted = [at[best] + step * np.ptp(at) / 9 for step in range(-9, 10)]
    for place in sorted({int(abs(at - want).argmin()) for want in wanted if at[0] <= want <= at[-1]}):
        picture = OffsetImage(pixels[place], zoom=40 / max(pixels.shape[1:3]), interpolation="nearest")
        frame = {"edgecolor": VERMILION if place == best else PALE, "lw": 2 if place == best else 0.6}
        axes.add_artist(AnnotationBbox(picture, (at[place], 0.5), pad=0.08, bboxprops=frame))


def _natural(group: Group, parameters: Tensor) -> tuple[Array, str, Callable[[float], str]]:
    """Return parameters in units that people use, what to write on their axis, and how to write one of them."""
    values, unit = _numpy(parameters), "°" if group.name == "rotation" else ""

    def signed(value: float) -> str:
        text = format(value, "+.0f" if unit else "+.2f")
        return (text[1:] if float(text) == 0 else text.replace("-", "−")) + unit

    if group.name == "rotation":
        return np.degrees(values), "rotation (degrees, clockwise)", signed
    if group.name == "scale":
        return np.exp(values), "scale (factor)", lambda value: f"×{value:.2f}"
    if isinstance(group, Reflection):
        return values, group.name, lambda value: ("as is", "↔", "↕", "↔↕")[int(value)]
    return values, _title(group) + (" (half sides)" if group.name.startswith("translate") else ""), signed


def _natural_ticks(axes: Axes, at: Array, text: Callable[[float], str], group: Group) -> None:
    if isinstance(group, Reflection):
        axes.set_xticks(at)
    elif group.name == "rotation" and np.ptp(at) > 180:
        axes.set_xticks([tick for tick in range(-180, 181, 45) if at[0] <= tick <= at[-1]])
    axes.xaxis.set_major_formatter(lambda value, _: text(value))


def _title(group: Group) -> str:
    return group.name.replace("_", " ")


def _name(names: Sequence[str] | None, label: int, longest: int | None = None) -> str:
    if names is not None and label >= len(names):
        raise OptionError(f"names must hold a name for every label; got {len(names)} names and label {label}.")
    name = str(label) if names is None else names[label]
    return name if longest is None or len(name) <= longest else name[: longest - 1] + "…"


def _percent(fraction: float | None, name: str) -> float | None:
    if fraction is not None and not 0 <= fraction <= 1:
        raise OptionError(f"{name} must be a fraction between 0 and 1; got {fraction!r}. Divide percentages by 100.")
    return None if fraction is None else 100 * fraction


def _evidence(robust: ITS, image: Tensor, poses: Tensor) -> Evidence:
    """Return what `robust`, calibrated where it is, says of one image (C, H, W) under poses (V, 3, 3)."""
    if image.ndim != 3:
        raise ShapeError(f"image must be one image (C, H, W); got {tuple(image.shape)}. Pick one: images[0].")
    check_images(image[None], "image[None]")
    device, dtype = robust.predictor.device_and_dtype(image)
    index = torch.zeros(len(poses), dtype=torch.long, device=device)
    options: dict[str, Any] = {"padding": robust.padding, "interpolation": robust.interpolation}
    seen = robust.predictor.views(image[None].to(device), index, poses.to(device, dtype), **options)
    return robust.calibrator(seen) if callable(robust.calibrator) else seen


def _views(source: ITS | SearchResult, image: Tensor, poses: Tensor) -> Array:
    """Return the pixels (V, H, W, 3) of one image (C, H, W) under poses (V, 3, 3), padded as in the search."""
    return _pixels(warp(image[None], poses.to(image), padding=source.padding, interpolation=source.interpolation))


def _root_labels(result: SearchResult) -> list[int]:
    """Return what was said of the images as they came: of the identity, or at once where an image was not searched."""
    if not result.trace:
        return [int(label) for label in result.labels]
    first = result.trace[0]
    poses, labels = (
        (first.poses()[:, 0], first.labels[:, 0]) if isinstance(first, LevelTrace) else (first.poses, first.labels)
    )
    nearest = (poses - torch.eye(3).to(poses)).flatten(-2).norm(dim=-1).argmin(dim=-1, keepdim=True)
    found = labels.gather(1, nearest)[:, 0]
    return [int(label) for label in torch.where(found < 0, result.labels, found)]


def _shown(level: LevelTrace, index: int, slot: int, limit: int) -> tuple[list[int], dict[int, int]]:
    """Return which samples of a hypothesis's orbit to show, and which of them became which hypothesis."""
    samples = len(level.parameters)
    chosen = enumerate(level.chosen[index].tolist())
    kept = {place % samples: number for number, place in chosen if place >= 0 and place // samples == slot}
    return _subsample(samples, {*kept, int(level.parameters.abs().argmin())}, limit), kept


def _subsample(count: int, keep: Collection[int], limit: int) -> list[int]:
    """Return `limit` indices spread evenly over `count`; those to keep replace their neighbours, or come on top."""
    shown = {round(place) for place in np.linspace(0, count - 1, min(limit, count))}
    for index in sorted(set(keep) - shown):
        others = sorted(shown - set(keep), key=lambda other: abs(other - index))
        shown = shown.difference(others[:1]) | {index}
    return sorted(shown)


def _scaled(values: Array) -> Array:
    """Return values moved and stretched to 0 … 1; zeros where they are all the same."""
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _thumb_size(result: SearchResult) -> tuple[float, float]:
    height, width = result.images.shape[-2:]
    return width / max(height, width), height / max(height, width)


def _pixels(images: Tensor) -> Array:
    """Return images (B, C, H, W) as (B, H, W, 3) in [0, 1]; pixels of another range are scaled to it, all together."""
    pixels = _numpy(images).transpose(0, 2, 3, 1)
    if pixels.min() < 0 or pixels.max() > 1:
        pixels = _scaled(pixels)
    return pixels if pixels.shape[-1] == 3 else pixels.mean(-1, keepdims=True).repeat(3, axis=-1)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().cpu().double().numpy()
