"""Orbits, surfaces and before/after strips."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headtilt.errors import OptionError, ShapeError, at_least
from headtilt.geometry.groups import FiniteGroup, Group, decompose
from headtilt.geometry.warp import check_images
from headtilt.its import ITS
from headtilt.model.evidence import Evidence
from headtilt.plot.style import (
    COLORMAP,
    FAINT,
    GREEN,
    INK,
    LINES,
    PALE,
    VERMILION,
    Array,
    canvas,
    class_name,
    draw_thumbnail,
    group_title,
    in_natural_units,
    label_colours,
    natural_ticks,
    new_figure,
    pixels_of,
    say,
    scaled,
    style_axes,
    thumb_size,
    to_numpy,
    turned_back,
    view_pixels,
)
from headtilt.result import SearchResult
from headtilt.search.confidence import Confidence, Orbit, resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHERS = "others"
LINE = 14  # letters below a thumbnail


def orbit(
    robust: ITS,
    image: Tensor,
    group: Group | None = None,
    *,
    samples: int = 72,
    names: Sequence[str] | None = None,
    first: Sequence[int] = (),
    found: float | None = None,
    within: Figure | None = None,
) -> Figure:
    """Return the confidence of one image along an orbit, by the paper's three measures, each scaled to 0 … 1.

    Dots mark each measure's best pose, a dotted line what a search found, or the best pose by `robust`'s own measure;
    below lie the labels and some views.

    Args:
        robust: Whose classifier and options to use.
        image: (C, H, W), raw pixels.
        group: The group to walk along; None takes the first level of `robust`.
        samples: Views along the orbit; one more where a group that is not periodic needs an odd number.
        names: Class names, by label.
        first: Labels that choose their colours first, so that they have the same in all pictures of a page.
        found: The parameter that a search found, in the group's own units; None marks the best along the orbit.
        within: The part of a larger figure to draw in; None makes a figure.
    """
    at_least("samples", samples, 3)
    group = robust.plan.levels[0] if group is None else group
    grid = group.grid(samples if group.periodic else samples | 1)
    seen = view_evidence(robust, image, group.matrix(grid))
    at, axis, text = in_natural_units(group, grid)

    def judge(measure: str | Confidence) -> Array:
        judged = resolve(measure, getattr(robust.plan, "width", None))
        return scaled(to_numpy(judged(seen.reshape(1, 1, len(grid)), Orbit(group, len(grid)))[0, 0]))

    best = int(judge(robust.plan.confidence).argmax() if found is None else (grid - found).abs().argmin())
    mark = at[best] if found is None else in_natural_units(group, torch.tensor([found]))[0][0]
    figure = new_figure(8, 4.4) if within is None else within
    curve, strip, views = figure.subplots(3, 1, sharex=True, height_ratios=[3.2, 0.3, 0.9])
    # Greys: a colour is a label's.
    for name, colour, line in zip(("energy", "bayesian", "group"), (INK, FAINT, "#9AA1AB"), LINES, strict=False):
        values = judge(name)
        top = int(values.argmax())
        curve.plot(at, values, line, color=colour, lw=1.8, label=name, zorder=3)
        curve.plot(at[top], values[top], "o", color=colour, ms=7, mec="white", mew=1.2, zorder=4)
    curve.axvline(mark, color=INK, lw=1, ls=":", zorder=2)
    words = turned_back(mark) if group.name == "rotation" else text(mark)
    words = f" {'best' if found is None else 'found'}: {words} "
    say(curve, mark, 1.1, words, ha="right" if best > 0.6 * len(grid) else "left")
    style_axes(curve, ylabel="confidence, scaled", title=f"Confidence along {group_title(group)}", grid="both")
    curve.set(ylim=(-0.04, 1.17), yticks=[0, 0.5, 1])
    curve.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)
    middles = (at[1:] + at[:-1]) / 2
    edges = np.concatenate([[2 * at[0] - middles[0]], middles, [2 * at[-1] - middles[-1]]])
    label_strip(strip, edges, seen.labels.tolist(), names, curve, first)
    views_at(views, at, view_pixels(robust, image, group.matrix(grid)), best)
    style_axes(views, xlabel=axis)
    views.set(xlim=edges[[0, -1]].tolist(), ylim=(0, 1), yticks=[])
    natural_ticks(views, at, text, group)
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
        if isinstance(group, FiniteGroup):
            raise OptionError(f"surface needs two continuous groups; {group.name} has four elements only. Use orbit.")
    poses = second.orbit(samples) @ first.orbit(samples)[:, None]
    seen = view_evidence(robust, image, poses.flatten(0, 1)).reshape(1, samples, samples)
    measure = resolve(confidence, getattr(robust.plan, "width", None))
    heat = to_numpy(measure(seen, Orbit(second, samples))[0]).T
    x, x_axis, x_text = in_natural_units(first, first.grid(samples))
    y, y_axis, y_text = in_natural_units(second, second.grid(samples))
    row, column = np.unravel_index(int(heat.argmax()), heat.shape)
    middle = samples // 2
    figure = new_figure(6.2, 4.8)
    axes = figure.subplots()
    mesh = axes.pcolormesh(x, y, heat, cmap=COLORMAP, shading="gouraud", rasterized=True)
    if np.ptp(heat) > 0:
        axes.contour(x, y, heat, levels=8, colors="white", linewidths=0.6, linestyles="solid", alpha=0.6)
    best = f"maximum: {x_text(x[column])}, {y_text(y[row])}"
    axes.plot(x[middle], y[middle], "o", label="identity", clip_on=False, ms=9, mfc="none", mec="white", mew=1.8)
    axes.plot(x[column], y[row], "*", label=best, clip_on=False, ms=15, mfc=VERMILION, mec="white")
    style_axes(axes, xlabel=x_axis, ylabel=y_axis)
    natural_ticks(axes, x, x_text, first)
    axes.yaxis.set_major_formatter(lambda value, _: y_text(value))
    legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False, borderaxespad=0.2)
    legend.get_lines()[0].set_markeredgecolor(INK)
    bar = figure.colorbar(mesh, ax=axes, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    style_axes(bar.ax, ylabel=f"{confidence if isinstance(confidence, str) else 'own'} confidence")
    return figure


def before_after(
    result: SearchResult,
    *,
    count: int = 8,
    names: Sequence[str] | None = None,
    truth: Tensor | Sequence[int] | None = None,
    within: Figure | None = None,
) -> Figure:
    """Return inputs above their canonical images, with what the model alone and the search said of each.

    Args:
        result: What `ITS.search` returned.
        count: How many of its images to show, from the first; fewer where there are fewer.
        names: Class names, by label.
        truth: True labels; right answers are then marked ✓ in green and wrong ones ✗ in red.
        within: The part of a larger figure to draw in; None makes a figure.

    Convention:
        "turned back by −100°" says what was done to the input, counter-clockwise, to give the canonical image.
    """
    at_least("count", count, 1)
    count = min(count, len(result))
    true = None if truth is None else torch.as_tensor(truth).tolist()
    if true is not None and len(true) < count:
        raise OptionError(f"truth must hold a label for each of the {count} images shown; got {len(true)}.")
    width, height = thumb_size(result)
    pitch, drop, left = max(width, 0.8) + 0.18, height + 0.83, 1.05
    figure, axes = canvas(left + count * pitch, drop + height + 0.45, 0.9, within)
    turns = decompose(result.pose[:count].double()).rotation.rad2deg().tolist()
    rows = (
        ("input", result.images, result.bare.argmax(1).tolist()),
        ("canonical", result.canonical(), result.labels.tolist()),
    )
    lengths = [len(class_name(names, answer)) for _, _, answers in rows for answer in answers[:count]]
    size = 9 if max(lengths, default=0) < LINE else 7.5
    for row, (word, images, answers) in enumerate(rows):
        top, low, pixels = -0.05 - row * drop, -0.05 - row * drop - height, pixels_of(images[:count])
        say(axes, left - 0.12, top - height / 2, word, 9, ha="right", weight="bold")
        for number, answer in enumerate(answers[:count]):
            middle = left + (number + 0.5) * pitch
            draw_thumbnail(axes, pixels[number], (middle - width / 2, top), (width, height), (0.02, PALE))
            right = None if true is None else answer == true[number]
            sign, colour = {None: ("", INK), True: (" ✓", GREEN), False: (" ✗", VERMILION)}[right]
            word = two_lines(class_name(names, answer)) + sign
            say(axes, middle, low - 0.09, word, size, colour, va="top", linespacing=1.05)
            if row == 0:
                say(axes, middle, low - 0.58, turned_back(turns[number]).replace(" by ", "\nby "), 7.5, FAINT)
    return figure


def two_lines(name: str) -> str:
    """Return a name on up to two lines of a thumbnail's width, its end left out where that is not enough."""
    lines = textwrap.wrap(name, LINE) or [""]
    return "\n".join(lines[:2]) + ("…" if len(lines) > 2 else "")


def label_strip(
    axes: Axes, edges: Array, labels: list[int], names: Sequence[str] | None, beside: Axes, first: Sequence[int] = ()
) -> None:
    """Draw which label holds where along an orbit; one too long for all of its stretches goes to a legend `beside`.

    As many labels as there are colours are told apart, `first` and then those that hold longest; all others are grey.
    """
    starts = [place for place in range(len(labels)) if place == 0 or labels[place] != labels[place - 1]]
    colours = label_colours([*first, *(label for label, _ in Counter(labels).most_common())])
    unnamed: dict[str, Any] = {}
    for start, stop in zip(starts, [*starts[1:], len(labels)], strict=True):
        low, high = edges[start], edges[stop]
        word = class_name(names, labels[start], 16) if labels[start] in colours else OTHERS
        bar = axes.barh(0, high - low, left=low, height=1, color=colours.get(labels[start], PALE), ec="white", lw=1)
        unnamed.setdefault(word, bar)
        if word != OTHERS and (high - low) / (edges[-1] - edges[0]) > 0.0115 * len(word):
            say(axes, (low + high) / 2, 0, word, 8, "white", weight="bold")
            unnamed[word] = None
    rest = {word: bar for word, bar in unnamed.items() if bar is not None}
    if rest:
        from matplotlib.legend import Legend

        where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False, "fontsize": 8}
        legend = Legend(beside, list(rest.values()), list(rest), **where)
        legend.set_clip_on(False)  # or else no room is made for it
        beside.add_artist(legend)
        legend.set_clip_path(None)
    style_axes(axes)
    axes.set(ylim=(-0.5, 0.5), yticks=[0], yticklabels=["label"])


def views_at(axes: Axes, at: Array, pixels: Array, best: int) -> None:
    """Draw some views under their places on the x axis, evenly from the best one, which is framed."""
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    wanted = [at[best] + step * np.ptp(at) / 9 for step in range(-9, 10)]
    for place in sorted({int(abs(at - want).argmin()) for want in wanted if at[0] <= want <= at[-1]}):
        picture = OffsetImage(pixels[place], zoom=40 / max(pixels.shape[1:3]), interpolation="nearest")
        frame = {"edgecolor": INK if place == best else PALE, "lw": 2 if place == best else 0.6}
        axes.add_artist(AnnotationBbox(picture, (at[place], 0.5), pad=0.08, bboxprops=frame))


def view_evidence(robust: ITS, image: Tensor, poses: Tensor) -> Evidence:
    """Return what `robust`, calibrated where it is, says of one image (C, H, W) under poses (V, 3, 3)."""
    if image.ndim != 3:
        raise ShapeError(f"image must be one image (C, H, W); got {tuple(image.shape)}. Pick one: images[0].")
    check_images(image[None], "image[None]")
    device, dtype = robust.predictor.device_and_dtype(image)
    index = torch.zeros(len(poses), dtype=torch.long, device=device)
    options: dict[str, Any] = {"padding": robust.padding, "interpolation": robust.interpolation}
    seen = robust.predictor.views(image[None].to(device), index, poses.to(device, dtype), **options)
    return robust.calibrator(seen) if callable(robust.calibrator) else seen
