"""The methods that the playground compares, and the digits that come with it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headtilt.calibration.head import HeadRecipe
from headtilt.errors import DataError, OptionError
from headtilt.its import ITS
from headtilt.paper.data import load as load_data
from headtilt.paper.experiments.names import NAMES
from headtilt.presets import accurate, affine_levels, paper3
from headtilt.progress import Progress
from headtilt.search.tree import Tree
from headtilt.sources import Adapted
from headtilt.sources import registry as door
from headtilt.sources.decoders import Decoders
from headtilt.sources.images import find, square_of
from headtilt.sources.pretrained import wrapped

DIGITS = "zoo:digits"
PACKAGED = Path(__file__).parent / "packaged" / "digits"
RECIPE = HeadRecipe(hidden=128)  # a small head, since it is downloaded with the package
MOST_EXAMPLES = 18


@dataclass(frozen=True)
class Example:
    """An image to play with.

    Attributes:
        image: (C, size, size), as the model sees it.
        name: What it is called.
        truth: Index of its class, or None where nobody knows.
    """

    image: Tensor
    name: str
    truth: int | None = None


@dataclass(frozen=True)
class Stage:
    """Everything that the playground plays with.

    Attributes:
        adapted: The classifier.
        methods: Searches by name; the last one is the one to recommend.
        examples: Images to begin with.
        notes: What each method is, in a sentence.
    """

    adapted: Adapted
    methods: dict[str, ITS]
    examples: list[Example]
    notes: dict[str, str]


NOTES = {
    NAMES["energy"]: "The most confident of 17 rotations wins.",
    NAMES["paper3"]: "Rotation, then scale, then shear, as published.",
    NAMES["balanced"]: "Energy, corrected for classes that look familiar in any pose.",
    NAMES["default"]: "Rotations and a cautious gate. `headtilt fit` makes it far better.",
    NAMES["accurate+gate"]: "A fitted head scores all views; a gate protects upright images.",
}


def digits_stage(tell: Progress | None = None) -> Stage:
    """Return the stage of the embedded digits: no data, no download, nothing to wait for."""
    adapted = door.load(f"{DIGITS}:0")
    methods = unfitted(adapted)
    fit_images = load_data("digits", "fit").floats()
    methods[NAMES["balanced"]] = ITS(adapted.model, **accurate(affine_levels())).fit(
        fit_images, method="balance", promise=None, progress=tell
    )
    methods[NAMES["accurate+gate"]] = ITS.load(PACKAGED, adapted.model)
    return Stage(adapted, methods, digit_examples(adapted), NOTES)


def own_stage(
    model: str, bundle: Path | None, examples: Path | None, device: str = "cpu", *, strict: bool = True
) -> Stage:
    """Return the stage of a model of one's own, with what was fitted for it where there is a bundle.

    Args:
        model: Its spec.
        bundle: Folder of a fitted bundle.
        examples: Folder of images to begin with.
        device: Where it should live.
        strict: See `ITS.load`.
    """
    adapted = door.load(model, device=device)
    methods = unfitted(adapted)
    name = NAMES["default" if bundle is None else "accurate+gate"]
    methods[name] = wrapped(adapted, bundle=bundle, strict=strict)
    shown = [] if examples is None else _pictures(examples, adapted)
    if not shown:
        digits = adapted.channels == 1 and adapted.size == 28
        shown = digit_examples(adapted) if digits else photographs(adapted)
    return Stage(
        adapted, methods, shown, NOTES | {NAMES["accurate+gate"]: "The bundle that was fitted for this model."}
    )


def unfitted(adapted: Adapted) -> dict[str, ITS]:
    """Return the searches that need no fitting."""
    energy = ITS(adapted.model, search=Tree(hypotheses=1, confidence="energy"), padding=adapted.padding, gate=None)
    drops = any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in adapted.model.modules())
    paper = ITS(adapted.model, padding=adapted.padding, **paper3(10 if drops else 1))
    return {NAMES["energy"]: energy, NAMES["paper3"]: paper}


def digit_examples(adapted: Adapted) -> list[Example]:
    """Return an upright digit of each class that the model gets right."""
    data = load_data("digits", "test")
    images = data.floats()
    with torch.no_grad():
        right = adapted.model(images.to(next(adapted.model.parameters()).device)).argmax(1).cpu() == data.labels
    found = []
    for label in data.labels.unique().tolist():
        first = int(((data.labels == label) & right).nonzero()[0])
        found.append(Example(images[first], f"digit {label}", label))
    return found


def photographs(adapted: Adapted) -> list[Example]:
    """Return the two photographs that come with scikit-learn, and squares from their middles."""
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    return [
        Example(square_of(pixels, adapted), Path(name).stem)
        for pixels, name in zip(found.images, found.filenames, strict=True)
    ]


def _pictures(folder: Path, adapted: Adapted) -> list[Example]:
    """Return the first images of a folder; the name of their class is that of their own folder, where it is one."""
    paths = find([folder])
    if not paths:
        raise OptionError(f"examples must be a folder with images; {folder} has none.")
    names = {name.strip().lower(): index for index, name in enumerate(adapted.labels or ())}
    found = []
    with Decoders() as decoders:
        for path in paths[:: max(1, len(paths) // MOST_EXAMPLES)][:MOST_EXAMPLES]:
            with suppress(DataError):  # one that cannot be read is no example
                image = decoders.square_of(path, adapted)
                found.append(Example(image, path.name, names.get(path.parent.name.lower())))
    return found


def fit_packaged(folder: Path = PACKAGED) -> None:
    """Fit the bundle that comes with the package, from the unlabelled digits of the fit split.

    ``python -m headtilt.apps.playground.methods`` does it anew.
    """
    adapted = door.load(f"{DIGITS}:0")
    images = load_data("digits", "fit").floats()
    ITS(adapted.model, **accurate(affine_levels())).fit(images, recipe=RECIPE, promise=0.5).save(folder, overwrite=True)


if __name__ == "__main__":
    fit_packaged()
