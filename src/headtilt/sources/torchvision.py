"""Classifiers of torchvision, by the name under which it lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

from torch import nn

from headtilt.errors import DataError, MissingExtraError, OptionError
from headtilt.io.weights import load_tensors
from headtilt.sources import Adapted
from headtilt.sources.preprocessing import Normalised, name_and_options, only_tensors


def load(spec: str, *, device: str = "cpu") -> Adapted:
    """Return a classifier of torchvision.

    Args:
        spec: ``resnet18`` with the best weights that torchvision has for it (downloaded once, by torchvision);
            ``resnet18?weights=IMAGENET1K_V1`` with others; ``resnet18?weights=FILE.safetensors`` with one's own of as
            many classes; ``resnet18?weights=none`` with random ones.
        device: Where it should live.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # it raises RuntimeError where it does not fit the torch there is
        raise MissingExtraError("torchvision", "torchvision") from error
    name, options = name_and_options(spec, "weights")
    wanted = options.get("weights", "DEFAULT")
    try:
        known = models.get_model_weights(name)
    except ValueError as error:
        raise OptionError(
            f"torchvision:{name} is none of its models; they are {_first_names(models.list_models())}."
        ) from error
    file = Path(wanted).expanduser()
    bare = wanted.lower() == "none" or file.suffix == ".safetensors"
    about = _weights(known, "DEFAULT" if bare else wanted, name)
    model = _build(models, name, None if bare else about)
    if file.suffix == ".safetensors":
        _load_weights(model, file, name)
    return _adapted(model, about, name, device)


def _adapted(model: nn.Module, about: Any, name: str, device: str) -> Adapted:
    transforms = about.transforms()
    try:
        (size,), (resize,) = set(transforms.crop_size), transforms.resize_size
        mean, deviation = list(transforms.mean), list(transforms.std)
    except (AttributeError, ValueError) as error:
        raise OptionError(f"torchvision:{name} is no classifier of square images.") from error
    return Adapted(
        model=Normalised(model, mean, deviation).to(device).eval(),
        labels=tuple(about.meta["categories"]) if "categories" in about.meta else None,
        size=int(size),
        resize=max(int(resize), int(size)),
        padding="reflection",
        name=name,
        resample=getattr(transforms.interpolation, "value", "bilinear"),
    )


def _weights(known: Any, wanted: str, name: str) -> Any:
    try:
        return known[wanted] if wanted != "DEFAULT" else known.DEFAULT
    except KeyError as error:
        names = ", ".join(known.__members__)
        raise OptionError(
            f"torchvision:{name} weights must be none, a .safetensors file or one of {names}; got {wanted!r}."
        ) from error


def _build(models: Any, name: str, weights: Any) -> nn.Module:
    try:
        with only_tensors():
            model: nn.Module = models.get_model(name, weights=weights)
    except (URLError, OSError) as error:
        raise DataError(f"the weights of torchvision:{name} could not be fetched: {error}") from error
    return model


def _load_weights(model: nn.Module, file: Path, name: str) -> None:
    tensors, _ = load_tensors(file)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise DataError(f"{file} does not hold the weights of a {name}: {error}") from error


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} others" if len(names) > 12 else "")
