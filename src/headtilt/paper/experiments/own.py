"""A classifier of one's own under test: what it is shown, and which of its outputs means which class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtilt.errors import OptionError
from headtilt.paper.data import NAMES
from headtilt.paper.data import load as load_data
from headtilt.paper.data.folder import list_images
from headtilt.paper.experiments.evaluate import Evaluation, Network
from headtilt.paper.experiments.methods import reads_fit_images
from headtilt.sources import registry as door
from headtilt.sources.zoo import SHAPES


def own(
    dataset: str,
    spec: str | None,
    *,
    split: str = "test",
    size: int | None = None,
    device: str = "cpu",
    folders: list[Path] | None = None,
) -> dict[str, Any]:
    """Return `models` and `size` of an `Evaluation`; nothing where no model is named and the zoo has some.

    Photographs come larger than the model sees them, by √2 and a bit: turned and then cropped they have no empty
    corners. The data sets of the zoo come as they are.

    Args:
        dataset: Name or folder.
        spec: See `door.load`; None for the networks of the zoo.
        split: Which images will be tested.
        size: Side of the square that the model sees, in place of its own.
        device: Where it should live.
        folders: Where to look for data.
    """
    if dataset not in NAMES and not Path(dataset).expanduser().is_dir():
        raise OptionError(f"DATASET must be one of {', '.join(NAMES)}, or a folder of images; got {dataset!r}.")
    if spec is None:
        if dataset in SHAPES and size is None:
            return {}
        forms = ", ".join(f"{scheme}:{form}" for scheme, (form, _) in door.SCHEMES.items())
        what = "size" if dataset in SHAPES else repr(dataset)
        raise OptionError(f"{what} needs a model of your own: give --model, one of {forms}.")
    if size is not None and dataset in SHAPES:
        raise OptionError(f"size must be left out for {dataset}, whose images are shown to the model as they are.")
    adapted = door.load(spec, device=device, size=size)
    side = None if dataset in SHAPES else -(-adapted.size * 10 // 7)
    outputs = None
    if adapted.labels is not None:
        one = load_data(dataset, split, folders=folders, size=side, limit=1)  # type: ignore[arg-type]
        outputs = door.outputs_for(adapted, one.classes)
    crop = None if side is None else adapted.size
    return {"models": (Network(adapted.model, adapted.name, crop, adapted.padding, outputs),), "size": side}


def notes(evaluation: Evaluation) -> list[str]:
    """Return what a reader of the numbers must know, in sentences."""
    said = []
    root = Path(evaluation.dataset).expanduser()
    fitted = [name for name in evaluation.methods if reads_fit_images(name)]
    if evaluation.dataset not in NAMES and fitted:
        seen = set(list_images(root, "fit").paths)
        if seen & set(list_images(root, evaluation.split).paths):
            said.append(
                f"{', '.join(fitted)}: fitted on the very images (without their labels) that are tested, since "
                f"{root.name} has no folder fit. Put other images into {root.name}/fit and these into {root.name}/test."
            )
    return said
