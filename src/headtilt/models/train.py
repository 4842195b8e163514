"""Training with the paper's recipe: AdamW, batches of 128, negative log-likelihood on upright images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.errors import DataError, OptionError, at_least
from headtilt.models.cnn import LargeCNN, SmallCNN
from headtilt.weights import load_tensors, load_weights, save_tensors

Augment = Callable[[Tensor, torch.Generator], Tensor]
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        network: "small" or "large".
        epochs: Passes over the training images.
        learning_rate: Of AdamW.
        batch: Images per step.
    """

    network: str
    epochs: int
    learning_rate: float = 5e-3
    batch: int = 128


# The paper's numbers; on GTSRB 1e-3 trains better than its 5e-3. Digits are few, so they take more passes.
RECIPES = {
    "digits": Recipe("small", 40),
    "mnist": Recipe("small", 3),
    "fashion-mnist": Recipe("small", 5),
    "gtsrb": Recipe("large", 10, 1e-3),
}


def make_network(kind: str, classes: int, channels: int, size: int) -> nn.Module:
    """Return the paper's "small" or "large" network, freshly initialised."""
    if kind not in ("small", "large"):
        raise OptionError(f"network must be 'small' or 'large'; got {kind!r}.")
    network = SmallCNN if kind == "small" else LargeCNN
    return network(classes, channels, size)


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    augment: Augment | None = None,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return the model trained in place and put in eval mode; the same seed gives the same weights on one device.

    Args:
        model: A freshly made network.
        images: (N, C, H, W), uint8 or floats in [0, 1].
        labels: (N,).
        recipe: Epochs, learning rate, batch size.
        seed: Seeds batches and dropout (initial weights are the caller's).
        device: Where to train.
        augment: Applied to each batch of float images, with a generator of its own.
        checkpoint: File to write after each epoch and to go on from if it exists; removed at the end.
        progress: Called after each step with (steps done, steps in all, loss).
    """
    at_least("epochs", recipe.epochs, 0)
    model.to(device).train()
    images, labels = images.to(device), labels.to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    first = _resume(checkpoint, model, optimiser) if checkpoint is not None else 0
    steps = max(len(images) // recipe.batch, 1)
    for epoch in range(first, recipe.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(hash((seed, epoch))))
        generator = torch.Generator(device=images.device).manual_seed(hash((seed, epoch, 1)))
        with torch.random.fork_rng(devices=[images.device] if images.device.type == "cuda" else []):
            torch.manual_seed(hash((seed, epoch, 2)))
            for step, batch in enumerate(order.to(device).split(recipe.batch)[:steps]):
                inputs = as_floats(images[batch])
                loss = F.cross_entropy(model(augment(inputs, generator) if augment else inputs), labels[batch])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
                if progress is not None and (step % 20 == 19 or step == steps - 1):
                    progress(epoch * steps + step + 1, recipe.epochs * steps, float(loss.detach()))
        if checkpoint is not None:
            _save(checkpoint, model, optimiser, epoch + 1)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return model.eval()


def as_floats(images: Tensor) -> Tensor:
    """Return images in [0, 1], whether they came as bytes or as floats."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str | torch.device = "cpu") -> float:
    """Return the share of right answers in percent."""
    right = 0
    for rows in torch.arange(len(images)).split(512):
        right += int((model(as_floats(images[rows].to(device))).argmax(1).cpu() == labels[rows].cpu()).sum())
    return 100 * right / len(images)


def _save(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, epoch: int) -> None:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors.update({f"optimiser.{number}.{name}": torch.as_tensor(value) for name, value in state.items()})
    save_tensors(path, tensors, {"epoch": json.dumps(epoch)})


def _resume(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Return the first epoch that is still to do, after loading the checkpoint if there is one."""
    if not path.exists():
        return 0
    tensors, metadata = load_tensors(path)
    load_weights(model, {name[6:]: value for name, value in tensors.items() if name.startswith("model.")}, path)
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, number, key = name.split(".", 2)
                state.setdefault(int(number), {})[key] = value
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        return at_least("epoch", json.loads(metadata["epoch"]), 0)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is no checkpoint of a training run: {error!r}. Delete it.") from error
