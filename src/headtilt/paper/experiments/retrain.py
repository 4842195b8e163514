"""What a user would do instead of searching: retrain with augmented, labelled data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from headtilt.geometry.warp import warp
from headtilt.paper import zoo
from headtilt.paper.data import load as load_data
from headtilt.paper.data.perturb import parameters, schedule
from headtilt.paper.train import RECIPES, Recipe, train
from headtilt.sources import zoo as networks

# Augmented data vary more, so training takes a multiple of the recipe's epochs, by kind of network.
MORE = {"small": 5, "large": 3, "resnet": 2}


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the batch with each image under its own random rotation, scale and shear, as in the affine test sets."""
    pose = torch.eye(3, device=images.device)
    for group in schedule("affine").drawn:
        unit = torch.rand(len(images), generator=generator, device=images.device)
        pose = pose @ group.matrix(parameters(group, unit))
    return warp(images, pose)


def retrained(name: str, dataset: str, seed: int, device: str, folders: list[Path] | None) -> nn.Module:
    """Return the network retrained with augmentation ("augmented"), or its last layer alone refitted ("last-layer").

    The recipe's own upright augmentation comes before the affine one.
    """
    longer = _longer(dataset)
    stem = f"{dataset}-{name}-{seed}"
    if name == "augmented":
        return zoo.kept(
            stem,
            networks.empty(dataset),
            lambda: zoo.fresh(dataset, seed, device, folders, recipe=longer, augment=augment),
            device,
        )

    def refit() -> nn.Module:
        data = load_data(dataset, "train", folders=folders)
        network = LastLayer(zoo.load(f"{dataset}:{seed}", device=device, folders=folders))
        return train(network, data.images, data.labels, longer, seed=seed, device=device, augment=augment)

    return zoo.kept(stem, LastLayer(networks.empty(dataset)), refit, device)


def _longer(dataset: str) -> Recipe:
    recipe = RECIPES[dataset]
    # A rate that is never lowered has to be low; one that falls to 0 may stay as high as it was.
    rate = min(recipe.learning_rate, 2e-3) if recipe.schedule == "constant" else recipe.learning_rate
    return replace(recipe, epochs=recipe.epochs * MORE[networks.SHAPES[dataset].network], learning_rate=rate)


class LastLayer(nn.Module):
    """The network with everything frozen but its last linear layer.

    Args:
        network: One of the zoo's, whose last layer is called `classifier`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        network.get_submodule("classifier").requires_grad_(True)

    def train(self, mode: bool = True) -> LastLayer:
        """Keep everything in eval mode: frozen layers must not update their statistics."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y)."""
        logits: Tensor = self.network(images)
        return logits
