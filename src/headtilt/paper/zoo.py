"""Networks of the zoo for experiments: those that are not there yet are trained now, and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock  # comes with torch
from torch import nn

from headtilt.errors import one_of
from headtilt.io.files import cache_folder
from headtilt.io.weights import save_tensors
from headtilt.paper.data import load as load_data
from headtilt.paper.train import NOTEBOOK, RECIPES, Augment, Progress, Recipe, Standardised, train
from headtilt.sources.zoo import SHAPES, empty, parse, stored


def load(
    spec: str,
    *,
    device: str | torch.device = "cpu",
    folders: list[Path] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return the network of a spec in eval mode: packaged, cached, or trained now and cached.

    Args:
        spec: See `headtilt.sources.zoo.load`.
        device: Where it should live, and be trained if it must be.
        folders: Where to look for training data.
        progress: Called while training.
    """
    name, seed = parse(spec)
    return kept(f"{name}-{seed}", empty(name), lambda: fresh(name, seed, device, folders, progress=progress), device)


def load_notebook(
    spec: str,
    *,
    device: str | torch.device = "cpu",
    folders: list[Path] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return the network of a spec trained as the authors' notebook does, in eval mode: cached, or trained now.

    Args:
        spec: "mnist", "fashion-mnist" or "gtsrb", with ":SEED" for a certain one.
        device: Where it should live, and be trained if it must be.
        folders: Where to look for training data.
        progress: Called while training.
    """
    name, seed = parse(spec)
    one_of("spec", name, NOTEBOOK)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Standardised(empty(name), SHAPES[name].channels)
    stem = f"{name}-notebook-{seed}"

    def make() -> nn.Module:
        data = load_data(name, "train", folders=folders)
        return train(
            network.measure(data.images),
            data.images,
            data.labels,
            NOTEBOOK[name],
            seed=seed,
            device=device,
            checkpoint=cache_folder() / "zoo" / f".{stem}.partial.safetensors",
            progress=progress,
        )

    return kept(stem, network, make, device)


def kept(stem: str, network: nn.Module, make: Callable[[], nn.Module], device: str | torch.device) -> nn.Module:
    """Return the network with the weights stored under `stem`, or what `make` returns, which is then stored.

    Of several processes that want it at the same time one makes it, and the others wait.

    Args:
        stem: File name without its ending, in the package or in the cache.
        network: An untrained network to load the weights into.
        make: Trains one.
        device: Where it should live.
    """
    found = stored(stem, network, device)
    if found is None:
        folder = cache_folder() / "zoo"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{stem}.lock"):  # another process may be training it: whoever waited loads it
            found = stored(stem, network, device)
            if found is None:
                found = make()
                save_tensors(folder / f"{stem}.safetensors", found.state_dict())
    return found


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
