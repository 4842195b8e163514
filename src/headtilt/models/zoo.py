"""Weights that come with the package, trained by its own code; others are trained on demand into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from headtilt.data import load as load_data
from headtilt.data.fetch import cache_folder
from headtilt.errors import OptionError
from headtilt.models.train import RECIPES, Augment, Progress, Recipe, make_network, train
from headtilt.weights import load_tensors, load_weights, save_tensors

PACKAGED = Path(__file__).parent / "packaged"


@dataclass(frozen=True)
class Shape:
    """What a network for a data set looks like from outside."""

    classes: int
    channels: int
    size: int


SHAPES = {
    "digits": Shape(9, 1, 28),
    "mnist": Shape(9, 1, 28),
    "fashion-mnist": Shape(10, 1, 28),
    "gtsrb": Shape(43, 3, 32),
    "cifar10": Shape(10, 3, 32),
}


def parse(spec: str) -> tuple[str, int]:
    """Return name and seed of a zoo spec such as "mnist" or "mnist:3"."""
    name, _, seed = spec.partition(":")
    if name not in SHAPES or not (seed or "0").isdecimal() or len(seed) > 9:  # far below what numpy and torch take
        known = ", ".join(SHAPES)
        raise OptionError(f"a zoo network is one of {known}, with :SEED of up to nine digits; got {spec[:60]!r}.")
    return name, int(seed or 0)


def empty(name: str) -> nn.Module:
    """Return the untrained network of a data set, its initial weights drawn from the global random stream."""
    shape = SHAPES[name]
    return make_network(RECIPES[name].network, shape.classes, shape.channels, shape.size)


def load(
    spec: str,
    *,
    device: str | torch.device = "cpu",
    folders: list[Path] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return the network of a spec in eval mode: packaged, cached, or trained now and cached.

    Args:
        spec: "digits", "mnist", "fashion-mnist", "gtsrb" or "cifar10", with ":SEED" for a certain one.
        device: Where it should live, and be trained if it must be.
        folders: Where to look for training data.
        progress: Called while training.
    """
    name, seed = parse(spec)
    return kept(f"{name}-{seed}", empty(name), lambda: fresh(name, seed, device, folders, progress=progress), device)


def kept(stem: str, network: nn.Module, make: Callable[[], nn.Module], device: str | torch.device) -> nn.Module:
    """Return the network with the weights stored under `stem`, or what `make` returns, which is then stored.

    Args:
        stem: File name without its ending, in the package or in the cache.
        network: An untrained network to load the weights into.
        make: Trains one.
        device: Where it should live.
    """
    cached = cache_folder() / "zoo" / f"{stem}.safetensors"
    for path in (PACKAGED / cached.name, cached):
        if path.exists():
            tensors, _ = load_tensors(path)
            return load_weights(network, tensors, path).to(device).eval()
    trained = make()
    save_tensors(cached, trained.state_dict())
    return trained


def fresh(
    name: str,
    seed: int,
    device: str | torch.device = "cpu",
    folders: list[Path] | None = None,
    *,
    recipe: Recipe | None = None,
    augment: Augment | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a network trained now, by its data set's recipe or another; interrupted, it goes on where it stopped."""
    data = load_data(name, "train", folders=folders)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = empty(name)
    recipe = recipe or RECIPES[name]
    how = f"{'plain' if augment is None else 'augmented'}-{recipe.epochs}"
    checkpoint = cache_folder() / "zoo" / f".{name}-{how}-{seed}.partial.safetensors"
    return train(
        network,
        data.images,
        data.labels,
        recipe,
        seed=seed,
        device=device,
        augment=augment,
        checkpoint=checkpoint,
        progress=progress,
    )
