"""The picture of the benchmark: four ways on six sets, tilted and upright; it holds the figures that it shows."""

from __future__ import annotations

import hashlib
import json
import re

from figures import ROOT, brief

PICTURE = ROOT / "docs" / "images" / "benchmark.svg"
LOOKS = (("o", "#9AA1AB"), ("s", "#E69F00"), ("D", "#0072B2"), ("^", "#56B4E9"))  # of README's rows, in their order


def figures_shown() -> str:
    """Return a digest of all figures that the picture shows."""
    return hashlib.sha256(json.dumps(brief(), ensure_ascii=False).encode()).hexdigest()


def is_current() -> bool:
    """Return whether the picture shows the figures of the stored results."""
    return PICTURE.exists() and figures_shown() in PICTURE.read_text(encoding="utf-8")


def draw() -> None:
    """Draw it."""
    from headtilt.plot.style import INK, PALE, new_figure, style_axes

    found = brief()
    titles = list(found)
    figure = new_figure(7.4, 3.7)
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
        style_axes(axes, title=words, xlabel="right answers, %", grid="x")
        axes.set(xlim=(0, 101), yticks=range(len(titles)), yticklabels=titles[::-1])
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    for text in legend.get_texts():
        text.set_color(INK)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, format="svg", metadata={"Date": None, "Description": figures_shown()})
