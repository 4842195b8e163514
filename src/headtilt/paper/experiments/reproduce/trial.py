"""Networks and test images of the items, what a method says of them, and mean and spread over runs."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headtilt.calibration.fit_images import HELD_OUT_IMAGES
from headtilt.calibration.gate import Promise
from headtilt.calibration.head import HeadRecipe
from headtilt.geometry.groups import Group
from headtilt.geometry.warp import invert, warp
from headtilt.io.files import cache_folder
from headtilt.its import ITS
from headtilt.paper import baselines, zoo
from headtilt.paper.data import load as load_data
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.perturb import TestSet, distances, mini_batches, pose_errors
from headtilt.paper.experiments.methods import Predict, Prediction, Setting
from headtilt.paper.experiments.reproduce.study import Study
from headtilt.paper.experiments.retrain import retrained
from headtilt.paper.train import RECIPES, train
from headtilt.plot.style import Array, pixels_of
from headtilt.search.tree import Tree
from headtilt.sources import zoo as networks

WORDS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "gtsrb": "GTSRB", "digits": "digits"}


@dataclass(frozen=True)
class Training:
    """How baselines are trained; by default as the network itself: all images, the paper's epochs, from scratch.

    Attributes:
        images: Most training images; None for all.
        epochs: Passes over them; None for the recipe's.
        warm: Whether a backbone starts from the trained network of the same seed, for a quick look.
    """

    images: int | None = None
    epochs: int | None = None
    warm: bool = False


@dataclass(frozen=True)
class Fitting:
    """How our own methods are fitted.

    Attributes:
        images: Unlabelled upright images.
        recipe: How a head is trained.
    """

    images: int = 6000
    recipe: HeadRecipe = HeadRecipe()  # noqa: RUF009 - frozen


QUICK_TRAINING = Training(images=1024, epochs=2, warm=True)
QUICK_FITTING = Fitting(200, HeadRecipe(hidden=64, looks=1))


def network(study: Study, dataset: str, seed: int, *, notebook: bool = False) -> nn.Module:
    """Return the trained CNN of a data set and seed, by the zoo's recipe or by that of the authors' notebook."""

    def told(done: int, total: int, loss: float) -> None:  # noqa: ARG001
        study.tell(f"training {dataset}:{seed}", done, total)

    load = zoo.load_notebook if notebook else zoo.load
    return load(f"{dataset}:{seed}", device=study.device, folders=study.folders, progress=told)


def baseline(study: Study, name: str, dataset: str, seed: int, training: Training) -> nn.Module:
    """Return a trained baseline, kept in the cache folder; interrupted, its training goes on where it stopped."""
    shape, recipe = networks.SHAPES[dataset], RECIPES[dataset]
    if training.epochs is not None:
        recipe = replace(recipe, epochs=training.epochs)
    how = "" if training == Training() else f"-{training.images}x{recipe.epochs}{'-warm' if training.warm else ''}"
    stem = f"{dataset}-{name}-{seed}{how}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        empty = baselines.make(name, classes=shape.classes, channels=shape.channels, size=shape.size)

    def told(done: int, total: int, loss: float) -> None:  # noqa: ARG001
        study.tell(f"training {name} on {dataset}:{seed}", done, total)

    def make() -> nn.Module:
        data = load_data(dataset, "train", folders=study.folders, limit=training.images)
        if training.warm and hasattr(empty, "backbone"):
            empty.get_submodule("backbone").load_state_dict(network(study, dataset, seed).state_dict())
        return train(
            empty,
            data.images,
            data.labels,
            recipe,
            seed=seed,
            device=study.device,
            checkpoint=cache_folder() / "zoo" / f".{stem}.partial.safetensors",
            progress=told,
        )

    return zoo.kept(stem, empty, make, study.device)


def setting(
    study: Study,
    dataset: str,
    seed: int,
    levels: Sequence[Group],
    fitting: Fitting,
    mc_passes: int = 10,
    *,
    notebook: bool = False,
) -> Setting:
    """Return what the methods of `headtilt evaluate` are given: network, levels, and unlabelled images to fit on."""
    images = cache(lambda: load_data(dataset, "fit", folders=study.folders, limit=fitting.images).floats())
    held_out = min(HELD_OUT_IMAGES, max(fitting.images // 2, 16))
    return Setting(
        model=network(study, dataset, seed, notebook=notebook),
        levels=tuple(levels),
        fit_images=images,
        held_out=lambda: load_data(dataset, "validation", folders=study.folders, limit=held_out).floats(),
        padding="zeros",
        mc_passes=mc_passes,
        promise=Promise(0.5),
        recipe=fitting.recipe,
        seed=seed,
        retrained=lambda name: retrained(name, dataset, seed, study.device, study.folders),
    )


def our_tree(model: nn.Module, levels: Sequence[Group], **options: Any) -> ITS:
    """Return our tree over the paper's levels: nothing lies outside an image, and no gate doubts what is found.

    Unless the options say otherwise the hypothesis of lowest energy answers; `paper3` has the rule as printed.

    Args:
        model: A network.
        levels: What is searched.
        **options: Of the walk (`Tree`) and of the wrapper (`ITS`), which share a seed.
    """
    walk = {item.name: options[item.name] for item in fields(Tree) if item.name in options}
    others = {name: value for name, value in options.items() if name not in walk or name == "seed"}
    paper = {"padding": "zeros", "interpolation": "bilinear"}
    return ITS(model, levels, search=Tree(**walk), gate=None, **{**paper, **others})


def canonicalising(model: nn.Module) -> Predict:
    """Return the method that asks a trained canonicaliser for labels and poses."""
    assert isinstance(model, baselines.Canonicaliser)

    @torch.no_grad()
    def predict(images: Tensor) -> Prediction:
        return Prediction(model(images).argmax(1), invert(model.pose(images)), 1)

    return predict


def draw_images(
    study: Study, dataset: str, count: int | None, seed: int = 0, split: Literal["test", "validation"] = "test"
) -> Dataset:
    """Return images, chosen by the seed."""
    return load_data(dataset, split, folders=study.folders, limit=count, seed=seed)


def tilt(data: Dataset, transforms: Tensor, device: str) -> TestSet:
    """Return the images under transforms (N, 3, 3), all on the device."""
    transforms = transforms.to(device)
    parts = [
        warp(data.floats(slice(start, start + 2000)).to(device), transforms[start : start + 2000])
        for start in range(0, len(data), 2000)
    ]
    return TestSet(torch.cat(parts), data.labels.to(device), transforms)


def ask(predict: Predict, test: TestSet, batch: int | None = None, *, batches: bool = False) -> dict[str, Any]:
    """Return accuracy and pose errors of a method on a test set.

    Args:
        predict: The method.
        test: What it is asked about.
        batch: Images per call.
        batches: Whether to add what `mini_batches` says, under "mini_batches".
    """
    batch = batch or (1000 if test.images.is_cuda else 250)
    answers = [predict(test.images[start : start + batch]) for start in range(0, len(test), batch)]
    right = torch.cat([answer.labels for answer in answers]).to(test.labels) == test.labels
    poses = [answer.perturbation for answer in answers if answer.perturbation is not None]
    estimate = torch.cat(poses) if poses else None
    found: dict[str, Any] = {"accuracy": share(right)}
    if estimate is not None:
        found |= pose_errors(estimate, test.transforms)
    if batches:
        apart = None if estimate is None else distances(estimate, test.transforms)
        found["mini_batches"] = mini_batches(right.cpu(), apart)
    return found


def share(right: Tensor) -> float:
    """Return the share of true entries in percent."""
    return 100 * float(right.double().mean())


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, standard deviation (of a sample) and count of what is known of the values."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else 0.0 if known else None,
        "runs": len(known),
    }


def picture(image: Tensor) -> str:
    """Return an image (C, H, W) in [0, 1] as a PNG in base64, which JSON can hold."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, pixels_of(image[None].detach().float().clamp(0, 1))[0], format="png")
    return base64.b64encode(file.getvalue()).decode()


def pixels(text: str) -> Array:
    """Return the pixels (H, W, 3) of what `picture` returned."""
    from matplotlib.image import imread

    found: Array = imread(io.BytesIO(base64.b64decode(text)), format="png")[..., :3]
    return found
