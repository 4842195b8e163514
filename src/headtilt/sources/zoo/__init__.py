"""Small networks for small sets: some come with the package, others lie in the cache once ``headtilt train`` ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from headtilt.errors import DataError, OptionError, one_of
from headtilt.io.files import cache_folder
from headtilt.io.weights import load_tensors, load_weights
from headtilt.sources.zoo.cnn import LargeCNN, SmallCNN
from headtilt.sources.zoo.resnet import ResNet

PACKAGED = Path(__file__).parent / "packaged"
NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {"small": SmallCNN, "large": LargeCNN, "resnet": ResNet}


@dataclass(frozen=True)
class Shape:
    """What a network for a data set looks like from outside, and of which kind it is."""

    network: str
    classes: int
    channels: int
    size: int


SHAPES = {
    "digits": Shape("small", 9, 1, 28),
    "mnist": Shape("small", 9, 1, 28),
    "fashion-mnist": Shape("small", 10, 1, 28),
    "gtsrb": Shape("large", 43, 3, 32),
    "cifar10": Shape("resnet", 10, 3, 32),
}


def parse(spec: str) -> tuple[str, int]:
    """Return name and seed of a zoo spec such as "mnist" or "mnist:3"."""
    name, _, seed = spec.partition(":")
    if name not in SHAPES or not (seed or "0").isdecimal() or len(seed) > 9:  # far below what numpy and torch take
        known = ", ".join(SHAPES)
        raise OptionError(
            f"a zoo network is one of {known}, alone or with a seed of up to nine digits, as in mnist:3; "
            f"got {spec[:60]!r}."
        )
    return name, int(seed or 0)


def empty(name: str) -> nn.Module:
    """Return the untrained network of a data set, its initial weights drawn from the global random stream."""
    shape = SHAPES[name]
    return make_network(shape.network, shape.classes, shape.channels, shape.size)


def make_network(kind: str, classes: int, channels: int, size: int) -> nn.Module:
    """Return the paper's "small" or "large" network, or a "resnet", freshly initialised."""
    one_of("network", kind, NETWORKS)
    return NETWORKS[kind](classes, channels, size)


def load(spec: str, *, device: str | torch.device = "cpu") -> nn.Module:
    """Return the network of a spec in eval mode.

    Args:
        spec: "digits", "mnist", "fashion-mnist", "gtsrb" or "cifar10", with ":SEED" for a certain one.
        device: Where it should live.
    """
    name, seed = parse(spec)
    found = stored(f"{name}-{seed}", empty(name), device)
    if found is None:
        raise DataError(f"{name}:{seed} has not been trained on this machine. Run: headtilt train {name} --seed {seed}")
    return found


def stored(stem: str, network: nn.Module, device: str | torch.device) -> nn.Module | None:
    """Return the network with the weights stored under a name, in eval mode; None where there are none.

    Args:
        stem: File name without its ending, in the package or in the cache.
        network: An untrained network to load the weights into.
        device: Where it should live.
    """
    for folder in (PACKAGED, cache_folder() / "zoo"):
        path = folder / f"{stem}.safetensors"
        if path.exists():
            tensors, _ = load_tensors(path)
            return load_weights(network, tensors, path).to(device).eval()
    return None
