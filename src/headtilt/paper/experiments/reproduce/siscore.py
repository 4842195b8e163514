"""Table 2 and its continuations: SI-Rotation, SI-Size and SI-Location with a classifier of photographs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headtilt.errors import DataError
from headtilt.geometry.groups import Group, rotation, scale, translate_x, translate_y
from headtilt.geometry.warp import Padding, centre_crop
from headtilt.its import ITS
from headtilt.paper.data import load as load_data
from headtilt.paper.data.perturb import draw as draw_transforms
from headtilt.paper.data.perturb import perturb_dataset
from headtilt.paper.experiments.methods import Setting, fitted
from headtilt.paper.experiments.reproduce.compose import turns
from headtilt.paper.experiments.reproduce.photographs import (
    BATCH,
    MODELS,
    Cropped,
    Lazy,
    Variant,
    accuracies,
    bare_logits,
    images_of,
    model_spec,
    shown,
    undone,
)
from headtilt.paper.experiments.reproduce.study import Report, Store, Study
from headtilt.paper.experiments.reproduce.trial import our_tree, share
from headtilt.presets import accurate
from headtilt.result import SearchResult
from headtilt.search.joint import Joint
from headtilt.sources import Adapted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "siscore"
TITLE = "SI-Score: turned, resized and moved objects on backgrounds"
LEVELS: dict[Variant, tuple[Group, ...]] = {
    "rotation": (rotation(), scale(0.5)),
    "area": (scale(0.5),),
    "location": (translate_x(0.5), translate_y(0.5)),
}
TITLES = {"rotation": "SI-Rotation", "area": "SI-Size", "location": "SI-Location", "imagenet": "turned ImageNet"}


def _rows(text: str) -> dict[str, list[float]]:
    """Return acc@1, acc@5 and, for ITS, acc@5 over the hypotheses, by row."""
    rows = (row.split(":") for row in text.split(";"))
    return {name.strip(): [float(value) for value in values.split()] for name, values in rows}


# acc@1, acc@5; for ITS with the ViT a third number, acc@5 over the top-1 of the five hypotheses.
PAPER: dict[str, Any] = {
    "rotation": _rows(
        "ViT-B/16: 38.5 58.5; ViT-B/16, rotation + scale augmented: 41.0 63.2; ViT-B/16, Chefer et al.: 44.8 65.2; "
        "ViT-B/16, Chefer et al. + masks: 46.2 67.0; ViT-B/16 + ITS: 49.0 68.7 70.9; EfficientNet-B0: 25.1 43.0; "
        "EfficientNet-B0 + ITS: 34.4 47.9; ConvNeXt-tiny: 42.4 65.3; ConvNeXt-tiny + ITS: 54.7 70.0"
    ),
    "area": _rows(
        "ViT-B/16: 54.9 77.5; ViT-B/16, rotation + scale augmented: 45.3 67.9; ViT-B/16, Chefer et al.: 60.2 80.6; "
        "ViT-B/16, Chefer et al. + masks: 61.0 81.4; ViT-B/16 + ITS: 55.1 77.7 72.3; EfficientNet-B0: 35.7 57.3; "
        "EfficientNet-B0 + ITS: 36.9 50.5; ConvNeXt-tiny: 53.2 75.8; ConvNeXt-tiny + ITS: 56.4 68.3"
    ),
    "location": _rows(
        "ViT-B/16: 33.3 52.2; ViT-B/16, Chefer et al.: 38.6 57.0; ViT-B/16, Chefer et al. + masks: 38.6 57.8; "
        "ViT-B/16 + ITS: 29.7 45.0 43.6; EfficientNet-B0: 15.7 30.3; EfficientNet-B0 + ITS: 11.4 17.9; "
        "ConvNeXt-tiny: 32.1 58.6; ConvNeXt-tiny + ITS: 31.6 51.5"
    ),
    "claims": ["ITS helps much on rotation, keeps size, and costs accuracy on location"],
}


ZOOMS = {"1": 1.0, "√2": math.sqrt(2), "1.5": 1.5}
BLACK_BOX_FIT_IMAGES, BLACK_BOX_IMAGES = 300, 200
CEILINGS = ("oracle", "upright composite")
QUOTED = ("ViT-B/16 by Chefer et al.", "the fine-tuned ViT-B/16", "EfficientNet-B0", "ConvNeXt-T")


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        images: Images of each variant.
        samples: Samples of each orbit.
        hypotheses: Hypotheses kept.
        budget: Views of the joint search.
        turned: Images of imagenet-mini, turned by any angle; 0 leaves them out.
        fit_images: Unlabelled images for our own methods; 0 leaves those out.
        zooms: Names in `ZOOMS`.
        models: Names in `MODELS`, where the study names none.
    """

    images: int
    samples: int = 17
    hypotheses: int = 5
    budget: int = 48
    turned: int = 1000
    fit_images: int = 1000
    zooms: tuple[str, ...] = tuple(ZOOMS)
    models: tuple[str, ...] = tuple(MODELS)


FULL = Size(images=1200)
QUICK = Size(images=9, samples=9, budget=12, turned=12, fit_images=0, zooms=("1", "1.5"), models=("MobileNetV2",))


def measure(study: Study, size: Size, store: Store) -> Report:
    """Return acc@1 and acc@5 of every row on each variant, and on turned photographs, for each classifier."""
    jobs: dict[tuple[str, ...], Callable[[], Any]] = {}
    left_out: dict[str, str] = {}
    for name in [study.model] if study.model is not None else size.models:
        try:
            model = Lazy(model_spec(study, name), study.device)
        except DataError as error:
            left_out[name] = str(error)
            continue
        for variant in LEVELS:
            for row in rows(variant, size):
                jobs[name, variant, row] = partial(composed, study, size, model, variant, row)
        if size.turned:
            for row in ("bare", "upright", "ITS", *(("balanced", "head") if size.fit_images else ())):
                jobs[name, "imagenet", row] = partial(turned, study, size, model, row)
    found, missing = store.attempt(jobs, lambda key: (key[0], key[2]))  # one classifier, fitted once for all places
    for (_, place, row), why in missing.items():
        left_out[place if row not in CEILINGS else f"{place}: {row}"] = str(why)
    if not found:
        raise DataError(next(iter(left_out.values())))
    results: dict[str, Any] = {}
    for (name, place, row), entry in found.items():
        about = {"images": entry["images"], "source": entry["source"], "rows": {}}
        results.setdefault(shown(name), {}).setdefault(place, about)["rows"][row] = entry["row"]
    report = {"left_out": left_out, "seeds": [0], "notes": NOTES, "results": results}
    return {**report, "verdict": judge(report)}


NOTES = [
    "Images are composed, or read, at the size to which the classifier's own processor resizes, and cut to the square "
    "that it sees. At a zoom they are that much larger before the cut: a turned view then has no empty corner.",
    "The classifiers are searched as they are, without sampled dropout: MobileNetV2's one layer of it drops four "
    "fifths of the features, and sampling that loses more than the search gains.",
    "ITS: rotation, then scale ± 1/2, as in the paper's figure; the hypothesis of lowest energy answers.",
    f"A classifier that comes as a black box is fitted on at most {BLACK_BOX_FIT_IMAGES} images, and is shown "
    f"{BLACK_BOX_IMAGES} of each set.",
    "acc5 is over H0's distribution, acc5_hypotheses over the top-1 labels of the hypotheses.",
    "oracle: the whole image turned back by the true angle, so that the background is turned; upright composite: the "
    "object pasted without its turn. Both are ceilings, not methods, and exist for composed images only.",
    "Where SI-Score's own folders are not found, images are composed of its nine public cut-outs and eight "
    "backgrounds as SI-Score composes them: far fewer objects, so that numbers do not compare to the paper.",
    f"Quoted and not run: {', '.join(QUOTED)}.",
]


def rows(variant: Variant, size: Size) -> list[str]:
    """Return the rows of a variant: "bare" and searches, on SI-Rotation at several zooms, and the ceilings."""
    if variant != "rotation":
        return ["bare", "ITS, zeros", "ITS, reflection"]
    found = []
    for zoom in size.zooms:
        found += [f"{what}, zoom {zoom}" for what in ("bare", "rotation", "rotation by energy", "oracle")]
    found += ["ITS, zeros", "ITS, reflection", "scale then rotation", "joint"]
    found += ["head"] if size.fit_images else []
    return [name.removesuffix(", zoom 1") if name.startswith(("bare", "oracle")) else name for name in found] + [
        "upright composite"
    ]


def composed(study: Study, size: Size, model: Lazy, variant: Variant, row: str) -> dict[str, Any]:
    """Return what one row of a variant says."""
    adapted = model()
    kind, _, zoom = row.partition(", zoom ")
    side = round(max(adapted.resize, adapted.size) * ZOOMS[zoom or "1"])
    count = seen(size.images, adapted)
    data, source = images_of(study, variant, side, count, upright=row == "upright composite")
    images, labels = data.floats(), data.labels
    network = Cropped(adapted.model, adapted.size)
    if kind == "oracle":
        if source == "SI-Score":
            raise DataError("the turn of SI-Score's own images is not in their names: no oracle.")
        degrees = turns(variant, folders=study.folders, limit=count)
        images = undone(images, degrees, adapted.padding)
    if kind in ("bare", *CEILINGS):
        found: dict[str, Any] = accuracies(bare_logits(network, images, study.device), labels)
    elif kind == "head":
        robust = fitted_for(study, size, model, kind)
        found = scores(robust, centre_crop(images, adapted.size), labels, study.device)
    else:
        found = scores(searching(network, kind, variant, size, adapted.padding), images, labels, study.device)
    return {"source": source, "images": len(images), "row": found}


def searching(network: nn.Module, kind: str, variant: Variant, size: Size, padding: Padding) -> ITS:
    """Return the search of that kind."""
    walk: dict[str, Any] = {"samples": size.samples, "hypotheses": size.hypotheses, "padding": padding}
    if kind == "joint":
        levels = LEVELS[variant]
        return ITS(network, levels, search=Joint(budget=size.budget), readout="marginal", gate=None, padding=padding)
    if kind.startswith("ITS, "):
        return our_tree(network, LEVELS[variant], **{**walk, "padding": kind.removeprefix("ITS, ")})
    if kind == "scale then rotation":
        return our_tree(network, LEVELS[variant][::-1], **walk)
    if kind == "rotation by energy":
        return our_tree(network, [rotation()], **walk, confidence="energy")
    return our_tree(network, [rotation()], **walk)


def turned(study: Study, size: Size, model: Lazy, row: str) -> dict[str, Any]:
    """Return what one row says of photographs turned by any angle, or of the upright ones."""
    adapted = model()
    limit = seen(size.turned, adapted)
    data = load_data("imagenet-mini", "test", folders=study.folders, size=side_of(adapted), limit=limit)
    eye = torch.eye(3).expand(len(data), 3, 3)
    transforms = eye if row == "upright" else draw_transforms("rotation", len(data))
    test = perturb_dataset(data, transforms, crop=adapted.size)
    if row in ("bare", "upright"):
        found: dict[str, Any] = accuracies(bare_logits(adapted.model, test.images, study.device), test.labels)
    else:
        options: dict[str, Any] = {"samples": size.samples, "hypotheses": size.hypotheses, "padding": adapted.padding}
        robust = (
            our_tree(adapted.model, [rotation()], **options) if row == "ITS" else fitted_for(study, size, model, row)
        )
        found = scores(robust, test.images, test.labels, study.device)
    return {"source": "imagenet-mini", "images": len(test), "row": found}


def fitted_for(study: Study, size: Size, model: Lazy, name: str) -> ITS:
    """Return our own method, fitted once on unlabelled photographs; a black box, which runs on the CPU, on fewer."""
    adapted = model()
    side = side_of(adapted)
    limit = size.fit_images if adapted.features is not None else min(size.fit_images, BLACK_BOX_FIT_IMAGES)
    setting = Setting(
        adapted.model,
        (rotation(),),
        lambda: load_data("imagenet-mini", "fit", folders=study.folders, size=side, limit=limit).floats(),
        padding=adapted.padding,
        crop=adapted.size,
        fits=model.fits,
    )
    return fitted(setting, "balance" if name == "balanced" else "head", accurate((rotation(),)), gate=False)


def side_of(adapted: Adapted) -> int:
    """Return the side of the photographs from which what a classifier sees is cut, after a turn by any angle."""
    return -(-adapted.size * 10 // 7)


def seen(images: int, adapted: Adapted) -> int:
    """Return how many of so many images a classifier is shown: a black box, which runs on the CPU, fewer."""
    return images if adapted.features is not None else min(images, BLACK_BOX_IMAGES)


def scores(robust: ITS, images: Tensor, labels: Tensor, device: str) -> dict[str, Any]:
    """Return the accuracies of a search."""
    batch = BATCH if device.startswith("cuda") else 8
    results = [robust.search(part.to(device)) for part in images.split(batch)]
    logits = torch.cat([result.logits for result in results]).cpu()
    among = torch.cat(
        [among_hypotheses(result, part) for result, part in zip(results, labels.split(batch), strict=True)]
    )
    return {**accuracies(logits, labels), "acc5_hypotheses": share(among)}


def among_hypotheses(result: SearchResult, labels: Tensor) -> Tensor:
    """Return (B,), whether the right label is that of one of the hypotheses."""
    beam = result.hypotheses
    return ((beam.labels.cpu() == labels[:, None]) & beam.active.cpu()).any(1)


def judge(report: Report) -> dict[str, Any]:
    """Return for each classifier and set what the best unfitted search adds, and how far the ceilings are."""
    return {
        name: {place: verdict(entry["rows"]) for place, entry in places.items()}
        for name, places in report["results"].items()
    }


def verdict(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each search adds to the bare model, and the room that the ceilings leave."""
    if "bare" not in rows:
        return {}
    bare = rows["bare"]["acc1"]
    ceilings = {name: row["acc1"] - bare for name, row in rows.items() if name.startswith((*CEILINGS, "upright"))}
    identities = {name: row["acc1"] - bare for name, row in rows.items() if name.startswith("bare, ")}
    gains = {name: row["acc1"] - bare for name, row in rows.items() if name not in {"bare", *ceilings, *identities}}
    unfitted = {name: gain for name, gain in gains.items() if name not in ("head", "balanced")}
    found: dict[str, Any] = {"gain": gains, "of_the_zoom_alone": identities, "ceilings": ceilings}
    if unfitted:
        best = max(unfitted, key=lambda name: unfitted[name])
        found |= {"best_unfitted": best, "gain_of_best_unfitted": unfitted[best], "search_helps": unfitted[best] > 0}
    return found


def draw(report: Report) -> dict[str, Figure]:
    """Return acc@1 of every row, a panel for each set and a colour for each classifier, beside the paper's ViT."""
    from headtilt.plot.style import BLUE, GREEN, ORANGE, VERMILION, new_figure, say, style_axes

    results = report["results"]
    places = list(dict.fromkeys(place for entry in results.values() for place in entry))
    names = {
        place: list(dict.fromkeys(row for entry in results.values() for row in entry.get(place, {"rows": {}})["rows"]))
        for place in places
    }
    widths = [len(rows) + 2 for rows in names.values()]
    figure = new_figure(0.42 * sum(widths) + 2, 4.8)
    panels = figure.subplots(1, len(places), squeeze=False, width_ratios=widths)[0]
    colours = dict(zip(results, (BLUE, ORANGE, GREEN), strict=False))
    for axes, place in zip(panels, places, strict=True):
        for number, (name, entry) in enumerate(results.items()):
            for row, values in entry.get(place, {"rows": {}})["rows"].items():
                x = names[place].index(row) + (number - (len(results) - 1) / 2) * 0.8 / len(results)
                axes.bar(x, values["acc1"], 0.75 / len(results), color=colours.get(name, BLUE), label=name, zorder=2)
        quoted = [(who, v[0]) for who, v in report["paper"].get(place, {}).items() if who.startswith("ViT-B/16")]
        quoted = [(who, value) for who, value in quoted if who in ("ViT-B/16", "ViT-B/16 + ITS")]
        for number, (_, value) in enumerate(quoted):
            x = len(names[place]) + number
            axes.plot(x, value, "D", ms=6, mfc="white", mec=VERMILION, mew=1.5, zorder=3, label="the paper's ViT-B/16")
            say(axes, x, value + 3, f"{value:.0f}", 6.5, va="bottom")
        ticks = [*names[place], *(who for who, _ in quoted)]
        axes.set_xticks(range(len(ticks)), ticks, rotation=60, ha="right", fontsize=7, rotation_mode="anchor")
        style_axes(axes, title=TITLES[place], grid="y", ylabel="acc@1 (%)" if axes is panels[0] else "")
        axes.set(ylim=(0, 100), xlim=(-0.7, len(ticks) - 0.3))
    unique: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        unique |= dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return {NAME: figure}
