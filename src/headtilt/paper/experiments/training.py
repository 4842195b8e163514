"""Training one of the paper's networks for `headtilt train`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from headtilt.errors import OptionError
from headtilt.io.files import cache_folder
from headtilt.io.weights import load_tensors, load_weights, save_tensors
from headtilt.paper import zoo
from headtilt.paper.data import load as load_data
from headtilt.paper.train import RECIPES, Progress, accuracy
from headtilt.sources import zoo as networks


@dataclass(frozen=True)
class Trained:
    """A trained network on disk.

    Attributes:
        path: Where its weights lie.
        fresh: Whether they were trained just now.
        shadowed: Whether the zoo goes on using weights that came with the package.
        accuracy: On the validation images, upright, in percent.
        count: How many those are.
    """

    path: Path
    fresh: bool
    shadowed: bool
    accuracy: float
    count: int


@dataclass(frozen=True)
class Training:
    """What to train.

    Attributes:
        dataset: One of the zoo's.
        seed: Seeds weights, batches and dropout.
        device: Where to train.
        folders: Where to look for data.
        out: File for the weights; None keeps them in the cache folder, where the zoo finds them.
        epochs: Passes over the images, where other than the paper's.
        force: Whether to train although there are weights.
    """

    dataset: str
    seed: int = 0
    device: str = "cpu"
    folders: list[Path] | None = None
    out: Path | None = None
    epochs: int | None = None
    force: bool = False

    def run(self, progress: Progress | None = None) -> Trained:
        """Return the network's place and accuracy, after training it where it is not there yet."""
        networks.parse(f"{self.dataset}:{self.seed}")
        if self.epochs is not None and self.out is None:
            raise OptionError("epochs other than the paper's make no network of the zoo: give it a place with --out.")
        path = self.out or cache_folder() / "zoo" / f"{self.dataset}-{self.seed}.safetensors"
        places = (path,) if self.out else (networks.PACKAGED / path.name, path)
        there = next((place for place in places if place.exists()), None)
        if there is not None and self.out and not self.force:
            raise OptionError(f"{path} exists already. Give another name, or --force to train again.")
        if there is None or self.force:
            network = self._train(progress)
            save_tensors(path, network.state_dict())
        else:
            path, network = there, networks.empty(self.dataset)
            load_weights(network, load_tensors(there)[0], there).to(self.device).eval()
        held_out = load_data(self.dataset, "validation", folders=self.folders)
        share = accuracy(network, held_out.images, held_out.labels, self.device)
        fresh = there is None or self.force
        return Trained(path, fresh, fresh and there in places[:-1], share, len(held_out))

    def _train(self, progress: Progress | None) -> nn.Module:
        recipe = RECIPES[self.dataset]
        if self.epochs is not None:
            recipe = replace(recipe, epochs=self.epochs)
        return zoo.fresh(self.dataset, self.seed, self.device, self.folders, recipe=recipe, progress=progress)
