"""Draw the pictures of the start page, the limits and the architecture: ``python docs/pictures.py``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import headtilt as ht
from headtilt import plot
from headtilt.calibration.head import HeadRecipe
from headtilt.paper.data import load
from headtilt.paper.data.perturb import draw, perturb_dataset
from headtilt.presets import affine_levels
from headtilt.sources import zoo

IMAGES = Path(__file__).parent / "images"
INK, FAINT, WRONG, RIGHT = "#1f2328", "#6b7280", "#d55e00", "#009e73"
MANY = 10  # views around the circle
TURNED = 100  # degrees, of the digit


def fitted() -> ht.ITS:
    """Return the digits network with a search fitted on unlabelled upright digits."""
    robust = ht.ITS(zoo.load("digits"), **ht.accurate(affine_levels()))
    recipe = HeadRecipe(hidden=128)
    return robust.fit(load("digits", "fit").floats(), promise=None, recipe=recipe)


def idea(robust: ht.ITS, tilted: Tensor, degrees: int, angles: Tensor, names: Sequence[str]) -> Figure:
    """Return the picture that explains the method: a tilted image, its orbit, the upright answer.

    Args:
        robust: A fitted wrapper.
        tilted: (1, C, H, W).
        degrees: By which it was turned.
        angles: (V,), of the views that are shown.
        names: Class names, by label.
    """
    poses = ht.rotation().matrix(angles)
    views = ht.warp(tilted, poses, padding=robust.padding)
    evidence = robust.predictor(views)
    scores = robust.calibrator(evidence).logits.logsumexp(1)
    confidence = (scores - scores.min()) / (scores.max() - scores.min())
    result, labels = robust.search(tilted), evidence.labels
    figure = Figure(figsize=(11, 4.6), dpi=150, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 11), ylim=(0, 4.6))
    axes.axis("off")

    def show(pixels: Tensor, x: float, y: float, side: float, colour: object, rim: float = 0.06) -> None:
        half = side / 2
        axes.fill_between([x - half - rim, x + half + rim], y - half - rim, y + half + rim, color=colour, lw=0)
        shown = pixels.expand(3, -1, -1).permute(1, 2, 0)
        axes.imshow(shown, extent=(x - half, x + half, y - half, y + half), zorder=3)

    def say(x: float, y: float, text: str, size: float, colour: str = INK, weight: str = "normal") -> None:
        axes.text(x, y, text, ha="center", va="center", fontsize=size, color=colour, weight=weight)

    bare = names[int(result.bare.argmax(1)[0])]
    back = math.degrees(float(ht.decompose(result.pose.double()).rotation[0]))
    show(tilted[0], 1.45, 2.35, 2.0, WRONG)
    say(1.45, 3.85, f"turned by {degrees:+d}°", 15, FAINT)
    say(1.45, 0.85, f"“{bare}”", 24, WRONG, "bold")
    say(1.45, 0.35, "the classifier alone", 13, FAINT)
    count, few = len(angles), len(angles) < MANY
    for place in range(count):
        turn = math.pi / 2 - 2 * math.pi * place / count
        wide, high = (1.7, 1.42) if few else (1.95, 1.78)
        x, y = 5.5 + wide * math.cos(turn), (2.5 if few else 2.3) + high * math.sin(turn)
        best = int(confidence.argmax()) == place
        side = 0.9 if few else 0.7
        show(views[place], x, y, side, colormaps["viridis"](float(confidence[place])), 0.12 if best else 0.07)
        word, colour = names[int(labels[place])], INK if best else FAINT
        if few:  # there is room for whole words below
            say(x, y - 0.68, word, 11, colour, "bold")
        else:
            say(5.5 + 1.32 * math.cos(turn), 2.3 + 1.15 * math.sin(turn), word, 12, colour, "bold")
    say(5.5, 2.47 if few else 2.45, "which view looks", 13)
    say(5.5, 2.14 if few else 2.12, "most familiar?", 13)
    show(result.canonical()[0], 9.55, 2.35, 2.0, RIGHT)
    say(9.55, 3.85, plot.style.turned_back(back), 15, FAINT)
    say(9.55, 0.85, f"“{names[int(result.labels[0])]}”", 24, RIGHT, "bold")
    say(9.55, 0.35, "the same, with headtilt", 13, FAINT)
    for start, end in ((2.62, 3.0), (8.0, 8.38)):
        axes.annotate("", (end, 2.35), (start, 2.35), arrowprops={"arrowstyle": "-|>", "lw": 2.2, "color": FAINT})
    axes.set(xlim=(0, 11), ylim=(0, 4.6))
    return figure


def turned_digit() -> Tensor:
    """Return a three (1, 1, 28, 28), turned."""
    test = load("digits", "test")
    image = test.floats()[int((test.labels == 3).nonzero()[0])][None]
    return ht.warp(image, ht.rotation().matrix(torch.tensor([math.radians(TURNED)])))


def digit(robust: ht.ITS) -> Figure:
    """Return the idea, shown on a digit."""
    angles = torch.linspace(-math.pi, math.pi, MANY + 1)[:-1]
    return idea(robust, turned_digit(), TURNED, angles, load("digits", "test").classes)


def tree(robust: ht.ITS) -> Figure:
    """Return the tree that the same digit makes when it is searched level by level, by balanced energy."""
    walking = ht.ITS(robust.model, levels=affine_levels(), search=ht.Tree(confidence="energy"), gate=None)
    walking.fit(load("digits", "fit").floats(), method="balance", promise=None)
    return plot.tree(walking.search(turned_digit()), names=load("digits", "test").classes)


def photograph() -> Figure:
    """Return the idea, shown on a free photograph on its side; model and fit images lie in HEADTILT_DATA."""
    from sklearn.datasets import load_sample_image

    data = Path(os.environ["HEADTILT_DATA"])
    robust = ht.from_pretrained(f"hf:{data}/mobilenet_v2_imagenet", **ht.documents())
    files = sorted((data / "imagenet-mini" / "fit").rglob("*.jpg"))
    robust.fit(robust.read(*files[::5]))
    tilted = robust.read(load_sample_image("china.jpg")).rot90(-1, (-2, -1))
    return idea(robust, tilted, 90, torch.arange(4) * math.pi / 2, robust.names or ())


def failures(robust: ht.ITS) -> Figure:
    """Return the first tilted test digits that the fitted search gets wrong."""
    test = load("digits", "test")
    tilted = perturb_dataset(test, draw("affine", len(test)))
    result = robust.search(tilted.images)
    wrong = (result.labels != tilted.labels).nonzero()[:, 0][:8]
    again = robust.search(tilted.images[wrong])
    return plot.before_after(again, names=test.classes, truth=tilted.labels[wrong])


ROOMS = {  # name: (what it does, column, row), as they lie in the picture
    "geometry": ("groups, matrices, warp", 0, 0),
    "model": ("asks the classifier,\nleaves it as it was", 1, 0),
    "search": ("plans, and the one run", 2, 0),
    "calibration": ("head, gate, fit", 3, 0),
    "io": ("bundles, weights, export", 4, 0),
    "its.py": ("the wrapper: ITS", 5, 0),
    "sources": ("models and images\nfrom elsewhere", 1, 1),
    "plot": ("pictures", 2, 1),
    "paper": ("data, zoo, baselines,\nexperiments", 3, 1),
    "apps": ("batch, serve,\nplayground", 4, 1),
    "cli": ("the command line", 5, 1),
}


def rooms() -> Figure:
    """Return the rooms of the package in the order of their imports."""
    figure = Figure(figsize=(11, 3.3), dpi=150, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 11), ylim=(0, 3.3))
    axes.axis("off")
    for name, (words, column, row) in ROOMS.items():
        x, y = 0.2 + 1.8 * column, 2.0 - 1.6 * row
        colour = ("#e8f1fa", "#f2f2ee")[row]
        axes.add_patch(Rectangle((x, y), 1.6, 1.05, facecolor=colour, edgecolor=FAINT, lw=0.8))
        axes.text(x + 0.8, y + 0.78, name, ha="center", va="center", fontsize=13, color=INK, weight="bold")
        axes.text(x + 0.8, y + 0.35, words, ha="center", va="center", fontsize=8.5, color=FAINT)
        if (column, row) not in ((5, 0), (5, 1)):
            arrow = {"arrowstyle": "-|>", "lw": 1.2, "color": FAINT, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x + 1.62, y + 0.52), (x + 1.8, y + 0.52), arrowprops=arrow)
    axes.text(0.2, 1.62, "the core: torch and numpy alone", fontsize=10, color=FAINT, va="center")
    axes.text(
        2.0,
        0.16,
        "around it: each behind an extra; an arrow points to what may be imported, directly or further left",
        fontsize=10,
        color=FAINT,
        va="center",
    )
    return figure


def main() -> None:
    """Draw all of them."""
    torch.set_num_threads(1)
    plot.save(rooms(), IMAGES / "rooms.png")
    robust = fitted()
    plot.save(digit(robust), IMAGES / "idea.png")
    plot.save(tree(robust), IMAGES / "tree.png")
    plot.save(failures(robust), IMAGES / "failures.png")
    if "HEADTILT_DATA" in os.environ:
        plot.save(photograph(), IMAGES / "photograph.png")


if __name__ == "__main__":
    main()
