"""What a user would do instead of searching: retrain with augmented, labelled data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from headtilt.data import load as load_data
from headtilt.data.perturb import parameters, schedule
from headtilt.models import zoo
from headtilt.models.train import RECIPES, Recipe, train
from headtilt.warp import warp

# Augmented data vary more, so training takes a multiple of the paper's epochs, by kind of network.
MORE = {"small": 5, "large": 3}


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the batch with each image under its own random rotation, scale and shear, as in the affine test sets."""
    pose = torch.eye(3, device=images.device)
    for group in schedule("affine").drawn:
        unit = torch.rand(len(images), generator=generator, device=images.device)
        pose = pose @ group.matrix(parameters(group, unit))
    return warp(images, pose)


def retrained(name: str, dataset: str, seed: int, device: str, folders: list[Path] | None) -> nn.Module:
    """Return the network retrained with augmentation ("augmented"), or its last layer alone refitted ("last-layer")."""
    recipe = RECIPES[dataset]
    longer = Recipe(recipe.network, recipe.epochs * MORE[recipe.network], min(recipe.learning_rate, 2e-3))
    stem = f"{dataset}-{name}-{seed}"
    if name == "augmented":
        return zoo.kept(
            stem,
            zoo.empty(dataset),
            lambda: zoo.fresh(dataset, seed, device, folders, recipe=longer, augment=augment),
            device,
        )

    def refit() -> nn.Module:
        data = load_data(dataset, "train", folders=folders)
        network = LastLayer(zoo.load(f"{dataset}:{seed}", device=device, folders=folders))
        return train(network, data.images, data.labels, longer, seed=seed, device=device, augment=augment)

    return zoo.kept(stem, LastLayer(zoo.empty(dataset)), refit, device)


class LastLayer(nn.Module):
    """The network with everything frozen but its last linear layer.

    Args:
        network: One of the paper's two networks.
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
