"""What the playground shows, as HTML: cards side by side, pictures, messages; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from headtilt.geometry.groups import decompose
from headtilt.paper.experiments.names import NAMES
from headtilt.plot.style import label_colours, pixels_of
from headtilt.result import SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image


@dataclass(frozen=True)
class Card:
    """What one method says.

    Attributes:
        name: Of the method.
        image: (C, H, W), as the method thinks it belongs.
        label: Of its answer.
        score: Probability of it.
        tilt: How it thinks the image was tilted.
        views: What it cost: how many views, and passes of each.
        note: What the method is.
        right: Whether the answer is right; None where nobody knows.
        chosen: Whether its search is drawn below.
        colour: Of its label, the same in every picture.
    """

    name: str
    image: Tensor
    label: str
    score: float
    tilt: str
    views: int
    note: str
    right: bool | None = None
    chosen: bool = False
    passes: int = 1
    colour: str = "#0072B2"


def cards_of(
    results: dict[str, SearchResult],
    names: Sequence[str],
    truth: int | None,
    notes: dict[str, str],
    chosen: str,
    passes: dict[str, int] | None = None,
) -> list[Card]:
    """Return a card for the bare model and one for each search of the first image.

    Args:
        results: What each method found.
        names: Class names, by label.
        truth: The right label, or None where nobody knows.
        notes: What each method is.
        chosen: Whose search is drawn below.
        passes: Of dropout for each view, by method; 1 where none are named.
    """
    first = next(iter(results.values()))
    bare = first.bare[0].softmax(dim=-1)
    label = int(bare.argmax())
    right = None if truth is None else label == truth
    note = "The classifier alone: one view."
    colours = label_colours(labels_of(results))
    seen = Card(NAMES["vanilla"], first.images[0], names[label], float(bare[label]), "as it came", 1, note, right)
    found = [replace(seen, colour=colours[label])]
    for name, result in results.items():
        label = int(result.labels[0])
        tilt = tilt_words(result)
        found.append(
            Card(
                name,
                result.canonical()[0],
                names[label],
                float(result.probabilities[0, label]),
                tilt,
                int(result.views[0]),
                notes.get(name, ""),
                None if truth is None else label == truth,
                name == chosen,
                (passes or {}).get(name, 1),
                colours[label],
            )
        )
    return found


def labels_of(results: dict[str, SearchResult]) -> list[int]:
    """Return the labels that are answered with, the recommended method's first: those that get a colour."""
    answers = [int(result.labels[0]) for result in reversed(results.values())]
    return [*answers, int(next(iter(results.values())).bare[0].argmax())]


def tilt_words(result: SearchResult) -> str:
    """Return how the first image was found tilted and what was undone: "turned by +100°, turned back by −100°"."""
    parts = decompose(result.perturbation[0].double())
    degrees = round(math.degrees(float(parts.rotation)))
    others = [part for part in parts.describe().split(", ") if not part.startswith(("turned by", "upright"))]
    said = [f"turned by {degrees:+d}°, turned back by {-degrees:+d}°"] if degrees else []
    words = ", ".join(said + others).replace("-", "−") or "found upright, left as it came"
    return f"{words}; the gate kept the model's answer" if bool(result.gated[0]) else words


def cards_html(cards: Sequence[Card]) -> str:
    """Return the cards side by side; on a narrow screen two by two."""
    return f'<div class="ht-cards">{"".join(map(_card, cards))}</div>'


def _card(card: Card) -> str:
    verdict = {None: "", True: "right", False: "wrong"}[card.right]
    sign = {None: "", True: "✓", False: "✗"}[card.right]
    label, name = html.escape(card.label), html.escape(card.name)
    size = ' class="long"' if len(card.label) > 7 else ""
    percent = f"{100 * card.score:.0f}"
    passes = f" × {card.passes} passes" if card.passes > 1 else ""
    classes = f"ht-card {verdict} {'chosen' if card.chosen else ''}"
    return (
        f'<article class="{classes}" data-method="{name}" title="{html.escape(card.note)}">'
        f"<h3>{name}</h3>"
        f'<img src="{data_uri(picture_of(card.image))}" alt="the image as {name} sees it">'
        f'<p class="ht-answer"><i class="ht-dot" style="background:{card.colour}"></i><b data-answer{size}>{label}</b> '
        f'<span class="ht-sign">{sign}</span></p>'
        f'<div class="ht-bar" aria-label="{percent} % sure"><i style="width:{percent}%"></i></div>'
        f'<p class="ht-small">{percent} % sure</p>'
        f'<p class="ht-small ht-tilt">{html.escape(card.tilt)}</p>'
        f'<p class="ht-views"><b>{card.views}</b> view{"" if card.views == 1 else "s"}{passes}</p></article>'
    )


def picture_of(image: Tensor, side: int = 168) -> Image:
    """Return an image (C, H, W) at least `side` pixels wide, its own pixels kept sharp."""
    from PIL import Image as Pillow

    pixels = (pixels_of(image[None])[0] * 255).round().astype(np.uint8)
    times = max(1, round(side / pixels.shape[1]))
    return Pillow.fromarray(pixels.repeat(times, 0).repeat(times, 1))


def data_uri(image: Image) -> str:
    """Return an image as text that a page can hold."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def figure_html(figure: Figure, title: str) -> str:
    """Return a figure as part of the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return f'<figure class="ht-figure"><img src="{uri}" alt="{html.escape(title)}"></figure>'


def alert(message: str) -> str:
    """Return a message that cannot be overlooked; nothing for an empty one."""
    return f'<div class="ht-alert" role="alert">{html.escape(message)}</div>' if message else ""


HEADER = """
<header class="ht-header">
  <div class="ht-logo" aria-hidden="true">7</div>
  <div><h1>headtilt</h1>
  <p>Tilt an image, and see the classifier tilt its head back.</p></div>
</header>
"""

CSS = """
.gradio-container {width: 100% !important; max-width: min(1340px, 100vw) !important; margin: 0 auto !important;
  padding: 0 20px 24px !important; box-sizing: border-box;}
.gradio-container > .main, .gradio-container .wrap, .gradio-container main, .gradio-container .column {max-width: 100%;}
.gradio-container > .main {padding: 0 !important;}
.gradio-container {background: var(--body-background-fill) !important;}
.gradio-container .html-container {padding: 0 !important;}
#ht-main > .column {min-width: 0 !important;}
footer {display: none !important;}
.ht-header {display: flex; align-items: center; gap: 16px; padding: 20px 0 8px;}
.ht-header h1 {font-size: 1.7rem; font-weight: 750; letter-spacing: -.02em; margin: 0; line-height: 1.1;
  color: var(--body-text-color);}
.ht-header p {margin: 4px 0 0; color: var(--body-text-color); opacity: .72; font-size: .98rem;}
.ht-logo {width: 46px; height: 46px; border-radius: 13px; background: linear-gradient(135deg, #0072b2, #56b4e9);
  color: #fff; font-weight: 800; font-size: 27px; display: grid; place-items: center; transform: rotate(-18deg);
  flex: none; transition: transform .5s;}
.ht-header:hover .ht-logo {transform: none;}
.ht-cards {display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px;}
.ht-card {--mark: transparent; background: var(--block-background-fill); border: 1px solid rgba(120, 130, 150, .28);
  border-radius: 14px; padding: 14px 12px 11px; display: flex; flex-direction: column; align-items: center;
  text-align: center; position: relative; overflow: hidden;}
.ht-card::before {content: ""; position: absolute; inset: 0 0 auto; height: 4px; background: var(--mark);}
.ht-card.right {--mark: #009e73;}
.ht-card.wrong {--mark: #d55e00;}
.ht-card.chosen {border-color: #0072b2; box-shadow: 0 0 0 1px #0072b2;}
.ht-card h3 {font-size: .87rem; font-weight: 650; margin: 0 0 9px; color: var(--body-text-color); white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; max-width: 100%;}
.ht-card img {width: 100%; max-width: 150px; aspect-ratio: 1; border-radius: 9px; object-fit: contain;
  background: #000; margin: 0;}
.ht-answer {margin: 10px 0 6px; line-height: 1.1; max-width: 100%; overflow: hidden; text-overflow: ellipsis;
  display: -webkit-box; -webkit-line-clamp: 2; -webkit-box-orient: vertical; color: var(--body-text-color);}
.ht-answer b {font-size: 1.5rem; font-weight: 750;}
.ht-answer b.long {font-size: 1rem;}
.ht-dot {display: inline-block; width: .62em; height: .62em; border-radius: 50%; margin-right: .4em;}
.ht-sign {font-weight: 800; font-size: 1.1rem;}
.right .ht-sign, .right .ht-answer b {color: #00785a;}
.wrong .ht-sign, .wrong .ht-answer b {color: #b84e00;}
.dark .right .ht-sign, .dark .right .ht-answer b {color: #3fd0a8;}
.dark .wrong .ht-sign, .dark .wrong .ht-answer b {color: #ff9350;}
.ht-bar {height: 6px; width: 100%; border-radius: 3px; background: rgba(120, 130, 150, .25); overflow: hidden;}
.ht-bar i {display: block; height: 100%; background: #0072b2;}
.ht-small {font-size: .77rem; margin: 5px 0 0; color: var(--body-text-color); opacity: .74; line-height: 1.35;}
.ht-tilt {min-height: 2.7em;}
.ht-views {margin: auto 0 0; font-size: .82rem; padding-top: 7px; color: var(--body-text-color);}
.ht-figure {margin: 0; background: #fff; border-radius: 14px; border: 1px solid rgba(120, 130, 150, .28);
  padding: 16px; text-align: center; overflow-x: auto;}
.ht-figure img {width: 100%; max-width: 860px; height: auto; margin: 0 auto; display: block;}
.ht-alert {background: #fdf0e7; color: #8a3a00; border: 1px solid #d55e00; border-radius: 11px; padding: 10px 14px;
  font-weight: 550; font-size: .92rem; overflow-wrap: anywhere;}
.ht-hint {color: var(--body-text-color); opacity: .68; font-size: .83rem; margin: 0; padding: 0 4px;}
#ht-examples {height: auto !important; overflow: visible;}
#ht-examples .gallery-container, #ht-examples .grid-wrap {height: auto !important; max-height: none !important;
  min-height: 0 !important; overflow: visible; padding: 0 !important;}
#ht-examples .grid-container {grid-template-columns: repeat(5, minmax(0, 1fr)) !important; gap: 8px !important;
  padding: 12px !important; height: auto !important; grid-template-rows: none !important;
  grid-auto-rows: auto !important; align-items: start;}
#ht-examples .gallery-item {height: auto !important;}
#ht-examples .thumbnail-item {width: 100% !important; height: auto !important; aspect-ratio: 1;}
#ht-drop button, #ht-drop .wrap {font-size: .9rem; line-height: 1.35;}
#ht-random, #ht-upright {white-space: nowrap; font-size: .95rem;}
@media (max-width: 860px) {
  #ht-main {flex-direction: column; flex-wrap: nowrap;}
  #ht-main > .column {width: 100%; flex: none !important;}
}
@media (max-width: 640px) {
  .gradio-container {padding: 0 10px 16px !important;}
  .ht-cards {grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 9px;}
  .ht-card:last-child:nth-child(odd) {grid-column: 1 / -1;}
  .ht-card img {max-width: 124px;}
  .ht-tilt {min-height: 0;}
  .ht-figure {padding: 8px;}
  #ht-tree .ht-figure img {width: 680px; max-width: none;}
}
"""
