"""The picture of a benchmark: how the cost of a search grows, and what it costs beside the bare model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headtilt.plot.style import BLUE, FAINT, GREEN, INK, PALE, PALETTE, VERMILION, new_figure, save, style_axes


def draw_growth(report: dict[str, Any], path: Path) -> Path:
    """Write the picture of a report to `path`, and return it."""
    figure = new_figure(10.5, 6.4)
    panels = figure.subplots(2, 3).flatten()
    for colour, panel, (axis, points) in zip(PALETTE, panels, report["growth"]["milliseconds"].items(), strict=False):
        x = [float(at) for at in points]
        middle = [value["median"] for value in points.values()]
        panel.fill_between(
            x,
            [value["low"] for value in points.values()],
            [value["high"] for value in points.values()],
            color=colour,
            alpha=0.18,
            lw=0,
        )
        panel.plot(x, middle, "-o", color=colour, ms=4, lw=1.8)
        style_axes(panel, title=f"by {axis}", xlabel=axis, ylabel="milliseconds", grid="y")
        panel.set_ylim(0, 1.15 * max(value["high"] for value in points.values()))
        panel.set_xlim(0)
    _bars(panels[-1], report["networks"])
    where = report["machine"]["gpu"] or f"{report['machine']['cpu']}, {report['machine']['threads']} thread(s)"
    other = ", ".join(f"{name} = {value}" for name, value in report["growth"]["otherwise"].items())
    figure.suptitle(
        f"What a search costs: small CNN, 17 samples; {other} unless varied\n{where}, "
        f"torch {report['machine']['torch']}",
        fontsize=10.5,
        color=FAINT,
    )
    return save(figure, path)


def _bars(panel: Any, networks: dict[str, Any]) -> None:
    """Draw time per view over the bare model's, for each network and preset."""
    panel.axhline(1, color=PALE, lw=1.2, zorder=0)
    names = ("M=1", "fast")
    for place, found in enumerate(networks.values()):
        for number, (name, colour) in enumerate(zip(names, (BLUE, GREEN), strict=True)):
            value = found["over_bare"][name]
            at = place + 0.36 * number - 0.18
            panel.bar(at, value["median"], 0.32, color=colour, label=name if place == 0 else None)
            panel.plot([at, at], [value["low"], value["high"]], color=INK, lw=1)
    panel.axhline(1.35, color=VERMILION, lw=1, ls=":", zorder=0)
    style_axes(panel, title="beside the bare model", ylabel="time ÷ bare model, same views", grid="y")
    panel.set_xticks(range(len(networks)), list(networks))
    panel.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    highest = max(found["over_bare"][name]["high"] for found in networks.values() for name in names)
    panel.set_ylim(0, max(1.9, 1.25 * highest))  # the legend lies above the bars


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    chosen = parser.parse_args().json
    draw_growth(json.loads(chosen.read_text(encoding="utf-8")), chosen.with_suffix(".png"))
