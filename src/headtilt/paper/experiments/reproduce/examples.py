"""The worked figures: a confidence surface, the algorithm's example, a turned cut-out, a focus failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from headtilt.errors import DataError
from headtilt.geometry.groups import Group, decompose, rotation, scale, shear_x, translate_x, translate_y
from headtilt.geometry.warp import warp
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.experiments.reproduce.photographs import Lazy, Variant, images_of, model_spec
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import WORDS, draw_images, network, our_tree, picture, tilt
from headtilt.plot.search import view_evidence
from headtilt.result import SearchResult
from headtilt.search.confidence import Orbit, resolve
from headtilt.search.found import LevelTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "examples"
TITLE = "Worked examples"
DATASETS = ("mnist",)
THUMB = 72  # pixels of a view's side in the report, at most
PAPER: dict[str, Any] = {
    "surface": "a confidence surface with its peak at the canonical form",
    "algorithm": "an iteration with two hypotheses, |G| = 9, rotation, scale and shear, in which the leader changes",
    "cutout": "a turned cab on a mountain background: rotation, then scale, with two hypotheses",
    "focus": "a pizza at a lakeside: under translation the search focuses on the wrong object",
}
TITLES = {
    "algorithm": "The algorithm: rotation, scale and shear, two hypotheses",
    "cutout": "A turned cut-out: rotation, then scale",
    "focus": "Focus under translation: horizontal, then vertical",
}


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        candidates: Digits among which the example is chosen.
        photographs: Composed images among which each example is chosen.
        samples: Samples of each orbit, |G|.
        surface: Samples along each side of the surface.
        passes: Monte-Carlo passes on the digits.
    """

    candidates: int = 400
    photographs: int = 200
    samples: int = 9
    surface: int = 49
    passes: int = 50


FULL = Size()
QUICK = Size(candidates=60, photographs=4, surface=25, passes=10)


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return the surface and the walks, pictures included; what needs photographs is left out where there are none."""
    datasets, left_out = study.available(DATASETS)
    jobs: dict[str, Callable[[], Any]] = {
        "surface": partial(surface, study, size, datasets[0]),
        "algorithm": partial(algorithm, study, size, datasets[0]),
    }
    found = store.within(datasets[0]).gather(jobs)
    try:
        model = Lazy(model_spec(study), study.device)
        found |= store.gather(
            {
                "cutout": partial(
                    photograph, study, size, model, "rotation", (rotation(), scale(0.5)), rescued_photograph
                ),
                "focus": partial(
                    photograph, study, size, model, "location", (translate_x(0.5), translate_y(0.5)), spoilt_photograph
                ),
            }
        )
    except DataError as error:
        left_out["photographs"] = str(error)
    peak = found["surface"]
    walks = {name: entry for name, entry in found.items() if name != "surface"}
    return {
        "dataset": datasets[0],
        "left_out": left_out,
        "seeds": [0],
        "results": found,
        "verdict": {
            "surface_peak_undoes_the_turn": abs((peak["peak_degrees"] + peak["true_degrees"] + 180) % 360 - 180) <= 30,
            **{
                name: {key: entry[key] for key in ("truth", "bare", "after_level_1", "final", "shows_it")}
                for name, entry in walks.items()
            },
        },
    }


def surface(study: Study, size: Size, dataset: str) -> dict[str, Any]:
    """Return the energy confidence of a turned image over rotation and scale, and where it peaks."""
    robust = our_tree(network(study, dataset, 0), [rotation(), scale(0.25)], mc_passes=size.passes)
    data = draw_images(study, dataset, size.candidates)
    turn = rotation().matrix(torch.tensor(60.0).deg2rad())
    test = tilt(data, turn.expand(len(data), 3, 3), study.device)
    found = robust.search(test.images)
    number = int((found.labels == test.labels).float().argmax())
    image = test.images[number]
    first, second = rotation(), scale(0.25)
    poses = second.orbit(size.surface) @ first.orbit(size.surface)[:, None]
    seen = view_evidence(robust, image, poses.flatten(0, 1)).reshape(1, size.surface, size.surface)
    heat = resolve("energy")(seen, Orbit(second, size.surface))[0].T.cpu()
    row, column = divmod(int(heat.argmax()), size.surface)
    degrees = first.grid(size.surface).rad2deg()
    return {
        "image": picture(image.cpu()),
        "label": data.classes[int(test.labels[number])],
        "degrees": degrees.tolist(),
        "factors": second.grid(size.surface).exp().tolist(),
        "confidence": heat.tolist(),
        "true_degrees": 60.0,
        "peak_degrees": float(degrees[column]),
        "peak_factor": float(second.grid(size.surface)[row].exp()),
    }


def algorithm(study: Study, size: Size, dataset: str) -> dict[str, Any]:
    """Return a walk with two hypotheses in which the first leader does not win, and the answer is right."""
    levels = (rotation(), scale(0.25), shear_x(0.25))
    robust = our_tree(network(study, dataset, 0), levels, samples=size.samples, hypotheses=2, mc_passes=size.passes)
    data = draw_images(study, dataset, size.candidates)
    test = tilt(data, draw_transforms("affine", len(data)), study.device)
    result = robust.search(test.images)
    return walk(result, changed(result, test.labels), test.labels, data.classes)


def photograph(
    study: Study,
    size: Size,
    model: Lazy,
    variant: Variant,
    levels: Sequence[Group],
    choose: Callable[[SearchResult, Tensor], Tensor],
) -> dict[str, Any]:
    """Return a walk with two hypotheses on a composed photograph."""
    adapted = model()
    data, _ = images_of(study, variant, adapted.size, size.photographs)
    robust = our_tree(adapted.model, levels, samples=size.samples, hypotheses=2, padding=adapted.padding)
    images, labels = data.floats().to(study.device), data.labels.to(study.device)
    result = robust.search(images)
    names = [name.split(",")[0] for name in adapted.labels] if adapted.labels else list(data.classes)
    return walk(result, choose(result, labels), labels, names)


def leaders(result: SearchResult) -> Tensor:
    """Return the label (B,) that leads after level 1."""
    level = cast(tuple[LevelTrace, ...], result.trace)[0]
    return level.labels.flatten(1).gather(1, level.chosen[:, :1].clamp_min(0))[:, 0]


def changed(result: SearchResult, truth: Tensor) -> Tensor:
    """Return (B,) how well an image shows a change of mind for the better."""
    right = result.labels == truth
    return (
        right.int() + (right & (result.bare.argmax(1) != truth)).int() + 2 * (right & (leaders(result) != truth)).int()
    )


def rescued_photograph(result: SearchResult, truth: Tensor) -> Tensor:
    """Return (B,) how well an image shows that the search helps."""
    right = result.labels == truth
    return right.int() + 2 * (right & (result.bare.argmax(1) != truth)).int()


def spoilt_photograph(result: SearchResult, truth: Tensor) -> Tensor:
    """Return (B,) how well an image shows that the search looks at the wrong thing."""
    wrong = result.labels != truth
    return wrong.int() + 2 * (wrong & (result.bare.argmax(1) == truth)).int()


def walk(result: SearchResult, score: Tensor, truth: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return every view of the image of best score: a row for each hypothesis of each level."""
    number = int(score.argmax())
    image = result.images[number]
    rows = []
    for depth, level in enumerate(cast(tuple[LevelTrace, ...], result.trace)):
        samples = len(level.parameters)
        kept = {int(place): slot for slot, place in enumerate(level.chosen[number]) if place >= 0}
        poses = level.poses()[number]
        for slot in range(level.active.shape[1]):
            if not bool(level.active[number, slot]):
                continue
            views = warp(image[None], poses[slot].to(image), padding=result.padding, interpolation=result.interpolation)
            rows.append(
                {
                    "level": level.group.name,
                    "depth": depth,
                    "hypothesis": slot,
                    "pictures": [picture(view) for view in shrunk(views).cpu()],
                    "labels": [names[int(label)] for label in level.labels[number, slot]],
                    "confidence": level.confidence[number, slot].tolist(),
                    "kept_as": [kept.get(slot * samples + place) for place in range(samples)],
                }
            )
    final = int(result.labels[number])
    return {
        "input": picture(shrunk(image[None])[0].cpu()),
        "canonical": picture(shrunk(result.canonical()[number : number + 1])[0].cpu()),
        "perturbation": decompose(result.perturbation[number].double()).describe(),
        "truth": names[int(truth[number])],
        "bare": names[int(result.bare[number].argmax())],
        "after_level_1": names[int(leaders(result)[number])],
        "final": names[final],
        "rows": rows,
        "shows_it": int(score[number]) >= 3,
    }


def shrunk(images: Tensor) -> Tensor:
    """Return images whose side is at most that of a thumbnail."""
    if images.shape[-1] <= THUMB:
        return images
    return F.interpolate(images, (THUMB, THUMB), mode="bilinear", antialias=True)


def draw(report: Report) -> dict[str, Figure]:
    """Return the surface, and a figure for each walk."""
    results = report["results"]
    where = str(WORDS.get(report["dataset"], report["dataset"]))
    walks = {f"{NAME}-{name}": draw_walk(results[name], title) for name, title in TITLES.items() if name in results}
    return {NAME: draw_surface(results["surface"], where), **walks}


def draw_surface(entry: dict[str, Any], where: str) -> Figure:
    """Return the surface in three dimensions beside the image."""
    import numpy as np

    from headtilt.paper.experiments.reproduce.trial import pixels
    from headtilt.plot.style import COLORMAP, VERMILION, new_figure, style_axes

    figure = new_figure(8, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.6])
    left.imshow(pixels(entry["image"]), interpolation="nearest")
    style_axes(left, title=f"{where}: {entry['label']}, turned by {entry['true_degrees']:.0f}°")
    left.set(xticks=[], yticks=[])
    heat = np.array(entry["confidence"])
    mesh = right.pcolormesh(entry["degrees"], entry["factors"], heat, cmap=COLORMAP, shading="gouraud", rasterized=True)
    right.contour(entry["degrees"], entry["factors"], heat, levels=9, colors="white", linewidths=0.6, alpha=0.6)
    right.plot(entry["peak_degrees"], entry["peak_factor"], "*", ms=15, mfc=VERMILION, mec="white", clip_on=False)
    said = f"confidence; peak at {entry['peak_degrees']:.0f}°, ×{entry['peak_factor']:.2f}".replace("-", "−")
    style_axes(right, title=said, xlabel="rotation (degrees)", ylabel="scale (factor)")
    right.set_xticks(range(-135, 136, 45))
    bar = figure.colorbar(mesh, ax=right, aspect=28, pad=0.02)
    bar.outline.set_visible(False)
    style_axes(bar.ax)
    return figure


def draw_walk(entry: dict[str, Any], title: str) -> Figure:
    """Return the views of a walk: a row for each hypothesis of each level, the kept ones framed."""
    from headtilt.paper.experiments.reproduce.figures import strip
    from headtilt.paper.experiments.reproduce.trial import pixels
    from headtilt.plot.style import FAINT, GREEN, INK, canvas, hue, say

    samples, pitch, drop, left = len(entry["rows"][0]["pictures"]), 1.14, 1.5, 3.2
    figure, axes = canvas(left + pitch * samples + 0.1, 0.75 + drop * len(entry["rows"]), 0.8)
    say(axes, 0.1, -0.22, title, 11, ha="left", weight="bold")
    words = {"truth": "truth", "bare": "bare", "after_level_1": "after level 1", "final": "final"}
    said = " · ".join(f"{word} {entry[key]}" for key, word in words.items())
    say(axes, left + pitch * samples, -0.22, said, 8.5, FAINT, ha="right")
    strip(axes, [(pixels(entry["input"]), "input", INK)], 0.1, -0.6, 1.14)
    if len(entry["rows"]) > 1:
        under = -0.6 - drop * (len(entry["rows"]) - 1)
        strip(axes, [(pixels(entry["canonical"]), entry["final"], INK)], 0.1, under, 1.14)
    for number, row in enumerate(entry["rows"]):
        top = -0.6 - drop * number
        name = row["level"].replace("_", " ")
        say(axes, left - 0.12, top - 0.38, name, 8.5, ha="right", weight="bold")
        whose = "input" if row["depth"] == 0 else f"H{'₀₁₂₃₄'[row['hypothesis']]} of level {row['depth']}"
        say(axes, left - 0.12, top - 0.65, f"of {whose}" if row["depth"] == 0 else whose, 7.5, FAINT, ha="right")
        looks, rims = [], []
        for place, (image, label, kept) in enumerate(zip(row["pictures"], row["labels"], row["kept_as"], strict=True)):
            right = label == entry["truth"]
            looks.append((pixels(image), label, hue(kept) if kept is not None else GREEN if right else FAINT))
            if kept is not None:
                rims.append(place)
        strip(axes, looks, left, top, pitch, rims)
    return figure
