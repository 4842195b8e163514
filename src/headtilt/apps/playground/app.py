"""The playground: tilt an image in the browser and watch the classifier tilt its head back; offline, no telemetry."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtilt import plot
from headtilt.apps.playground.methods import Example, Stage
from headtilt.apps.playground.page import CSS, HEADER, alert, cards_html, cards_of, figure_html, labels_of, picture_of
from headtilt.errors import DataError, MissingExtraError
from headtilt.geometry.groups import rotation, scale, shear_x
from headtilt.geometry.warp import warp
from headtilt.result import SearchResult
from headtilt.search.found import LevelTrace
from headtilt.sources.decoders import Decoders
from headtilt.sources.health import unlike
from headtilt.sources.images import size_of

FIRST = 120  # degrees by which the first example is turned
MOST_PIXELS, MOST_SECONDS = 50_000_000, 10.0  # of an uploaded image
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Ubuntu", "sans-serif"]


class Play:
    """What happens behind the page; every function takes what the page holds and returns what it shows.

    Args:
        stage: Model, methods and examples.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.decoders = Decoders(1, seconds=MOST_SECONDS, most_pixels=MOST_PIXELS)  # end with this process
        adapted = stage.adapted
        with torch.no_grad():
            device = next(adapted.model.parameters(), torch.zeros(1)).device
            blank = torch.zeros(1, adapted.channels, adapted.size, adapted.size, device=device)
            classes = adapted.model(blank).shape[-1]
        # The last image that was searched: another method to look inside, or a slider let go, costs nothing.
        self.last: tuple[bytes, dict[str, SearchResult]] | None = None
        self.names = list(adapted.labels or map(str, range(classes)))

    def tilted(self, example: Example, degrees: float, factor: float, slant: float) -> Tensor:
        """Return an example (1, C, H, W) turned, scaled and sheared."""
        turn, size, lean = (torch.tensor(value) for value in (math.radians(degrees), math.log(factor), float(slant)))
        pose = rotation().matrix(turn) @ scale(0.5).matrix(size) @ shear_x(0.5).matrix(lean)
        return warp(example.image[None], pose[None], padding=self.stage.adapted.padding)

    def show(self, example: Example, degrees: float, factor: float, slant: float, method: str) -> tuple[str, str]:
        """Return the cards of all methods, and the very search of one of them: each is computed once."""
        image = self.tilted(example, degrees, factor, slant)
        key = image.numpy().tobytes()
        if self.last is None or self.last[0] != key:
            self.last = key, {name: robust.search(image) for name, robust in self.stage.methods.items()}
        results = self.last[1]
        passes = {name: robust.predictor.passes for name, robust in self.stage.methods.items()}
        cards = cards_of(results, self.names, example.truth, self.stage.notes, method, passes)
        return cards_html(cards), self.inside(method, results)

    def inside(self, method: str, results: dict[str, SearchResult]) -> str:
        """Return a picture of the search that gave a method's card: its tree, or all views with their evidence."""
        result = results[method]
        walked = bool(result.trace) and all(isinstance(level, LevelTrace) for level in result.trace)
        if walked:
            return figure_html(
                plot.tree(result, 0, names=self.names, first=labels_of(results)), f"search tree, {method}"
            )
        drawn = plot.views(result, 0, names=self.names, first=labels_of(results))
        return figure_html(drawn, f"views seen, {method}")

    def first(self) -> Example:
        """Return the first example that the bare model gets wrong when it is turned and the last method right."""
        robust = list(self.stage.methods.values())[-1]
        for example in [known for known in self.stage.examples if known.truth is not None][:9]:
            result = robust.search(self.tilted(example, FIRST, 1, 0))
            if int(result.labels[0]) == example.truth != int(result.bare[0].argmax()):
                return example
        return self.stage.examples[0]

    def take(self, number: int, degrees: float, factor: float, slant: float, method: str) -> tuple[Any, ...]:
        """Return an example, tilted as the sliders stand, and what is shown of it."""
        example = self.stage.examples[number]
        return example, alert(""), *self.show(example, degrees, factor, slant, method)

    def receive(self, path: str | None, before: Example, method: str) -> tuple[Any, ...]:
        """Return an uploaded image, upright, and what is shown of it; what is none is told, and what was there stays.

        An image that is plainly not of the kind that the model knows comes with a hint.
        """
        said, example = "", before
        if path:
            name = Path(path).name
            try:
                adapted = self.stage.adapted
                example = Example(self.decoders.square_of(Path(path), adapted), name)
                colours = self.decoders.submit(Path(path), replace(adapted.square, channels=3)).result()
                said = unlike(size_of(Path(path)), colours, adapted) or ""
            except DataError as error:
                said = f"{str(error).replace(path, name)} Try a PNG or JPEG file."
        return example, alert(said), 0, 1, 0, *self.show(example, 0, 1, 0, method)

    def tilt(self, example: Example, method: str) -> tuple[Any, ...]:
        """Return a random tilt for the sliders, and what is shown under it."""
        sliders = at_random()
        return *sliders, *self.show(example, *sliders, method)

    def straighten(self, example: Example, method: str) -> tuple[Any, ...]:
        """Return the sliders at rest, and what is shown then."""
        return 0, 1, 0, *self.show(example, 0, 1, 0, method)


def at_random() -> tuple[float, float, float]:
    """Return a random rotation in degrees, a factor and a shear."""
    return round(random.uniform(-180, 180)), round(random.uniform(0.75, 1.33), 2), round(random.uniform(-0.25, 0.25), 2)


def make_page(stage: Stage) -> Any:
    """Return the page as gradio's `Blocks`; see `options` for how to launch it."""
    gradio = _gradio()
    play = Play(stage)
    methods = list(stage.methods)
    with gradio.Blocks(title="headtilt", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        example = gradio.State(play.first())
        gradio.HTML(HEADER)
        with gradio.Row(equal_height=False, elem_id="ht-main"):
            with gradio.Column(scale=3, min_width=300):
                controls = _controls(gradio, stage)
            with gradio.Column(scale=8, min_width=320):
                cards = gradio.HTML(elem_id="ht-cards")
                method = gradio.Radio(methods, value=methods[-1], label="Look inside", elem_id="ht-method")
                search = gradio.HTML(elem_id="ht-tree")
        gallery, drop, message, turn, factor, slant, tilt, upright = controls
        sliders, shown = [turn, factor, slant], [cards, search]
        # Whatever is done calls one function once: `input` is somebody's hand, and not the sliders that a button moves.
        last: dict[str, Any] = {"trigger_mode": "always_last", "api_visibility": "private", "show_progress": "hidden"}
        # One after the other: a slider that is moved before a chosen example is there would show the one before it.
        last |= {"concurrency_id": "play", "concurrency_limit": 1}
        hands = [page.load, method.input, *(one for slider in sliders for one in (slider.input, slider.release))]
        gradio.on(hands, play.show, [example, *sliders, method], shown, **last)
        gallery.select(_chosen(gradio, play), [*sliders, method], [example, message, *shown], **last)
        drop.upload(play.receive, [drop, example, method], [example, message, *sliders, *shown], **last)
        tilt.click(play.tilt, [example, method], [*sliders, *shown], **last)
        upright.click(play.straighten, [example, method], [*sliders, *shown], **last)
    return page


def _controls(gradio: Any, stage: Stage) -> tuple[Any, ...]:
    """Return what the left side holds: examples, a place to drop files, sliders and buttons."""
    shown = [(picture_of(example.image, 84), None) for example in stage.examples]
    gallery = gradio.Gallery(
        shown,
        show_label=False,
        columns=5,
        height="auto",
        allow_preview=False,
        interactive=False,
        object_fit="contain",
        buttons=[],
        format="png",
        elem_id="ht-examples",
    )
    turn = gradio.Slider(-180, 180, FIRST, step=1, label="Rotation in degrees", elem_id="ht-turn", buttons=[])
    factor = gradio.Slider(0.75, 1.33, 1, step=0.01, label="Scale", elem_id="ht-scale", buttons=[])
    slant = gradio.Slider(-0.25, 0.25, 0, step=0.01, label="Shear", elem_id="ht-shear", buttons=[])
    with gradio.Row():
        upright = gradio.Button("Upright", elem_id="ht-upright", min_width=100)
        tilt = gradio.Button("Tilt at random", variant="primary", elem_id="ht-random", min_width=140)
    drop = gradio.File(show_label=False, height=132, elem_id="ht-drop")
    message = gradio.HTML(elem_id="ht-message")
    gradio.HTML(
        f'<p class="ht-hint">Model: {stage.adapted.name}. Everything runs on this machine. Nothing is sent.</p>'
    )
    return gallery, drop, message, turn, factor, slant, tilt, upright


def _chosen(gradio: Any, play: Play) -> Callable[..., Any]:
    """Return what happens when an example is chosen; gradio reads the kind of event from the annotation."""

    def choose(degrees: float, factor: float, slant: float, method: str, event: Any) -> tuple[Any, ...]:
        return play.take(event.index, degrees, factor, slant, method)

    choose.__annotations__["event"] = gradio.SelectData
    return choose


def options() -> dict[str, Any]:
    """Return how to launch a page: its looks, no link to anywhere, no telemetry."""
    gradio = _gradio()
    plain = {
        "block_title_background_fill": "none",
        "block_title_padding": "0",
        "block_border_width": "1px",
        "block_radius": "14px",
    }
    plain |= {"block_shadow": "none", "body_background_fill": "*neutral_50"}
    ink = {"block_title_text_color": "*body_text_color", "block_border_color": "*neutral_200"}
    theme = gradio.themes.Soft(
        primary_hue="blue", neutral_hue="slate", font=FONTS, font_mono=["ui-monospace", "monospace"]
    )
    return {
        "theme": theme.set(**plain, **ink),
        "css": CSS,
        "share": False,
        "quiet": True,
        "ssr_mode": False,
        "footer_links": [],
        "max_file_size": "30mb",
        "enable_monitoring": False,
    }


def _gradio() -> Any:
    # Before the import, since gradio reads it there; whoever wants it can still set it.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise MissingExtraError("gradio", "playground") from error
    return gradio
