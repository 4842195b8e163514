"""What all pictures share: canvas, colours, words, thumbnails, and writing to disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from headtilt.errors import MissingExtraError, OptionError
from headtilt.geometry.groups import FiniteGroup, Group
from headtilt.geometry.warp import warp
from headtilt.io.files import written_whole
from headtilt.its import ITS
from headtilt.result import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[Any]]
Start = tuple[float, float, float, str]  # of a hypothesis's line: x, y, the height of the lane it takes, its colour

INK, FAINT, PALE, BAND = "#222222", "#767676", "#B8BEC6", "#F3F4F6"
# Okabe and Ito's palette, told apart by every kind of colour vision; their yellow is too light for lines on white.
VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY = PALETTE = "#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
LINES = ("-", "--", "-.", ":")
COLORMAP = "viridis"
ELEMENTS = {"reflection": ("as is", "↔", "↕", "↔↕"), "quarter_turns": ("0°", "90°", "180°", "270°")}


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG or SVG, whole or not at all, and return its path; missing folders are made."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise OptionError(f"path must end in .png or .svg; got {path.name!r}.")
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, format=kind, dpi=figure.dpi, metadata={"Date": None} if kind == "svg" else None)
    return path


def need_matplotlib() -> None:
    """Raise `MissingExtraError` where plots could not be drawn: better before a long measurement than after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that many inches, bound to no display."""
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def canvas(width: float, height: float, inches: float, within: Figure | None = None) -> tuple[Figure, Axes]:
    """Return a figure with bare axes from (0, −height) to (width, 0), whose unit is that many inches.

    Args:
        width: In units.
        height: In units.
        inches: Of a unit.
        within: The part of a larger figure to draw in, at whatever size it has; None makes a figure.
    """
    figure = new_figure(width * inches + 0.1, height * inches + 0.1) if within is None else within
    axes = figure.add_subplot(xlim=(0, width), ylim=(-height, 0), aspect="equal", autoscale_on=False)
    axes.axis("off")
    return figure, axes


def style_axes(axes: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "", grid: str = "") -> None:
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


def hue(number: int) -> str:
    """Return the colour of the number-th hypothesis or curve."""
    return PALETTE[number % len(PALETTE)]


def label_colours(labels: Sequence[int]) -> dict[int, str]:
    """Return a colour for each label, none twice: the first come first, and none is left for those after the sixth."""
    found: dict[int, str] = {}
    for label in list(dict.fromkeys(labels))[: len(PALETTE)]:
        free = [colour for colour in PALETTE if colour not in found.values()]
        found[label] = hue(label) if hue(label) in free else free[0]
    return found


def turned_back(degrees: float) -> str:
    """Return in words by how much an image is turned back, clockwise if positive: "turned back by −100°"."""
    return f"turned back by {degrees:+.0f}°".replace("-", "−") if round(degrees) else "as it came"


def say(axes: Axes, x: float, y: float, text: str, size: float = 8, color: str = INK, **more: Any) -> None:
    """Write text centred at a point."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, "color": color, **more})


def draw_thumbnail(
    axes: Axes, pixels: Array, corner: tuple[float, float], size: tuple[float, float], *rims: tuple[float, Any]
) -> None:
    """Draw pixels from their upper left corner, on rims of some width and colour, the outermost first."""
    (x, y), (width, height) = corner, size
    for rim, colour in rims:
        axes.fill_between([x - rim, x + width + rim], y - height - rim, y + rim, color=colour, lw=0, zorder=2)
    axes.imshow(pixels, extent=(x, x + width, y - height, y), interpolation="nearest", zorder=3)


def in_natural_units(group: Group, parameters: Tensor) -> tuple[Array, str, Callable[[float], str]]:
    """Return parameters in units that people use, what to write on their axis, and how to write one of them."""
    values, unit = to_numpy(parameters), "°" if group.name == "rotation" else ""

    def signed(value: float) -> str:
        text = format(value, "+.0f" if unit else "+.2f")
        return (text[1:] if float(text) == 0 else text.replace("-", "−")) + unit

    if group.name == "rotation":
        return np.degrees(values), "turned back by (degrees, clockwise)", signed
    if group.name == "scale":
        return np.exp(values), "scale (factor)", lambda value: f"×{value:.2f}"
    if isinstance(group, FiniteGroup):
        return values, group_title(group), lambda value: ELEMENTS[group.name][int(value)]
    return values, group_title(group) + (" (half sides)" if group.name.startswith("translate") else ""), signed


def natural_ticks(axes: Axes, at: Array, text: Callable[[float], str], group: Group) -> None:
    """Set ticks in the units that people read: degrees, factors, names of flips."""
    if isinstance(group, FiniteGroup):
        axes.set_xticks(at)
    elif group.name == "rotation" and np.ptp(at) > 180:
        axes.set_xticks([tick for tick in range(-180, 181, 45) if at[0] <= tick <= at[-1]])
    axes.xaxis.set_major_formatter(lambda value, _: text(value))


def group_title(group: Group) -> str:
    """Return the name of a group as a heading."""
    return group.name.replace("_", " ")


def class_name(names: Sequence[str] | None, label: int, longest: int | None = None) -> str:
    """Return the name of a label, shortened where asked."""
    if names is not None and label >= len(names):
        raise OptionError(f"names must hold a name for every label; got {len(names)} names and label {label}.")
    name = str(label) if names is None else names[label]
    return name if longest is None or len(name) <= longest else name[: longest - 1] + "…"


def scaled(values: Array) -> Array:
    """Return values moved and stretched to 0 … 1; zeros where they are all the same."""
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def pixels_of(images: Tensor) -> Array:
    """Return images (B, C, H, W) as (B, H, W, 3) in [0, 1]; pixels of another range are scaled to it, all together."""
    pixels = to_numpy(images).transpose(0, 2, 3, 1)
    if pixels.min() < 0 or pixels.max() > 1:
        pixels = scaled(pixels)
    return pixels if pixels.shape[-1] == 3 else pixels.mean(-1, keepdims=True).repeat(3, axis=-1)


def to_numpy(tensor: Tensor) -> Array:
    """Return a tensor as a float64 array."""
    return tensor.detach().cpu().double().numpy()


def view_pixels(source: ITS | SearchResult, image: Tensor, poses: Tensor) -> Array:
    """Return the pixels (V, H, W, 3) of one image (C, H, W) under poses (V, 3, 3), padded as in the search."""
    return pixels_of(warp(image[None], poses.to(image), padding=source.padding, interpolation=source.interpolation))


def thumb_size(result: SearchResult) -> tuple[float, float]:
    """Return width and height of a thumbnail whose longer side is 1."""
    height, width = result.images.shape[-2:]
    return width / max(height, width), height / max(height, width)
