"""The picture of the benchmark: accuracy, speed and cost on one screen; it holds the figures that it shows."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from figures import NAMES, ROOT, brief, stored

PICTURE = ROOT / "docs" / "images" / "benchmark.svg"
GREY, ORANGE, BLUE, SKY, RED, GREEN = "#9AA1AB", "#E69F00", "#0072B2", "#56B4E9", "#D55E00", "#009E73"
LOOKS = (("o", GREY), ("s", ORANGE), ("D", BLUE), ("^", SKY))  # of README's rows, in their order
# What the peers of results/peers.json are called, and how they look; headtilt's own have the colours that it has above.
PEERS = {
    "bare": (NAMES["vanilla"], "o", GREY),
    "ttach": ("ttach, quarter turns", "v", ORANGE),
    "loop": ("a loop over 36 rotations", "P", ORANGE),
    "public": (f"{NAMES['paper3']}, public code", "X", RED),
    "unfitted": (NAMES["default"], "h", SKY),
    "fast": (NAMES["fast+gate"], "s", BLUE),
    "accurate": (NAMES["accurate+gate"], "D", BLUE),
    "oracle": (NAMES["oracle"], "*", GREEN),
}
TITLES = {"digits": "digits", "fashion-mnist": "Fashion-MNIST"}
DEVICES = {"benchmark-cpu": ("one CPU core", SKY), "benchmark-gpu": ("GPU", BLUE)}


def peers() -> dict[str, dict[str, tuple[float, float]]]:
    """Return images per second and accuracy on turned images of every peer, by data set."""
    sets: dict[str, dict[str, Any]] = (stored("peers") or {"sets": {}})["sets"]
    return {
        name: {peer: (row["images_per_second"], row["tilted"]) for peer, row in rows.items() if peer in PEERS}
        for name, rows in sets.items()
        if name in TITLES
    }


def costs() -> dict[str, dict[str, float]]:
    """Return what a view of the fast search costs over a view of the bare model, by device and network."""
    found = {}
    for name in DEVICES:
        networks: dict[str, Any] = (stored(name) or {"networks": {}})["networks"]
        found[name] = {network: one["over_bare"]["fast"]["median"] for network, one in networks.items()}
    return found


def figures_shown() -> str:
    """Return a digest of all figures that the picture shows."""
    shown = [brief(), peers(), costs()]
    return hashlib.sha256(json.dumps(shown, ensure_ascii=False).encode()).hexdigest()


def is_current() -> bool:
    """Return whether the picture shows the figures of the stored results."""
    return PICTURE.exists() and figures_shown() in PICTURE.read_text(encoding="utf-8")


def draw() -> None:
    """Draw it."""
    from headtilt.plot.style import new_figure

    figure = new_figure(10.4, 6.6)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.05, 1))
    _accuracy(upper)
    panels = lower.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for axes, (name, rows) in zip(panels, peers().items(), strict=False):
        _speed(axes, name, rows)
    _cost(panels[-1])
    _legend(lower, *panels[0].get_legend_handles_labels(), columns=4)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, format="svg", metadata={"Date": None, "Description": figures_shown()})


def _accuracy(figure: Any) -> None:
    """Draw four ways on six sets, tilted and upright."""
    from headtilt.plot.style import PALE, style_axes

    found = brief()
    titles = list(found)
    panels = figure.subplots(1, 2, sharey=True)
    for side, (axes, words) in enumerate(zip(panels, ("tilted images", "upright images"), strict=True)):
        for height, title in enumerate(reversed(titles)):
            pairs = [pair for pair in found[title].values() if pair is not None]
            values = [float(pair[side]) for pair in pairs]
            axes.plot([min(values), max(values)], [height, height], color=PALE, lw=2, zorder=1)
        for number, row in enumerate(found[titles[0]]):
            points = [(found[title][row], height) for height, title in enumerate(reversed(titles))]
            known = [(float(pair[side]), height) for pair, height in points if pair is not None]
            marker, colour = LOOKS[number]
            label = re.sub(r"\*", "", row)
            axes.plot(*zip(*known, strict=True), marker, color=colour, ms=8, mec="white", label=label, zorder=3 - side)
        style_axes(axes, title=f"Accuracy, {words}, %", grid="x")
        axes.set(xlim=(0, 101), yticks=range(len(titles)), yticklabels=titles[::-1])
    _legend(figure, *panels[0].get_legend_handles_labels(), columns=4)


def _speed(axes: Any, name: str, rows: dict[str, tuple[float, float]]) -> None:
    """Draw accuracy against speed, for headtilt and what one would use instead."""
    from headtilt.plot.style import style_axes

    for peer, (speed, accuracy) in rows.items():
        label, marker, colour = PEERS[peer]
        axes.plot(speed, accuracy, marker, color=colour, ms=12 if marker == "*" else 9, mec="white", label=label)
    style_axes(axes, title=f"{TITLES[name]}, turned: accuracy, %", xlabel="images per second, one core", grid="both")
    axes.set(xscale="log", ylim=(0, 101))


def _cost(axes: Any) -> None:
    """Draw what a view costs over the bare model."""
    from headtilt.plot.style import INK, style_axes

    found = costs()
    networks = list(next(iter(found.values()), {}))
    for number, (name, rows) in enumerate(found.items()):
        words, colour = DEVICES[name]
        places = [height + 0.38 * number for height in range(len(rows))]
        axes.barh(places, list(rows.values()), 0.34, color=colour, label=words)
    axes.axvline(1, color=INK, lw=1, ls="--")
    style_axes(axes, title="Time per view, bare model = 1", xlabel="below 1: faster than the bare model", grid="x")
    axes.set(yticks=[height + 0.19 for height in range(len(networks))], yticklabels=networks, ylim=(-0.3, 3.2))
    axes.legend(loc="upper left", ncols=2, frameon=False, fontsize=8)


def _legend(figure: Any, handles: Any, labels: Any, *, columns: int) -> None:
    """Draw a legend below a row of panels."""
    from headtilt.plot.style import INK

    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_color(INK)
