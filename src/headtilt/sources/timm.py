"""Classifiers of timm, by the name under which it lists them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn

from headtilt.errors import DataError, MissingExtraError, OptionError
from headtilt.io.weights import load_tensors
from headtilt.sources import Adapted, Resample
from headtilt.sources.preprocessing import Normalised, name_and_options, only_tensors

RESAMPLE: dict[str, Resample] = {"bilinear": "bilinear", "nearest": "nearest", "lanczos": "lanczos", "box": "box"}


def load(spec: str, *, device: str = "cpu") -> Adapted:
    """Return a classifier of timm.

    Args:
        spec: ``resnet50`` with timm's own weights (downloaded once, by timm), also ``resnet50.a1_in1k`` and
            ``hf_hub:ORGANISATION/NAME``; ``resnet50?weights=FILE.safetensors`` with one's own of as many classes;
            ``resnet50?weights=none`` with random ones.
        device: Where it should live.
    """
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # it needs a torchvision that fits the torch there is
        raise MissingExtraError("timm", "timm") from error
    name, options = name_and_options(spec, "weights")
    wanted = options.get("weights", "DEFAULT")
    file = Path(wanted).expanduser()
    if wanted.lower() not in ("none", "default") and file.suffix != ".safetensors":
        raise OptionError(f"timm:{name} weights must be none or a .safetensors file; got {wanted!r}.")
    try:
        with only_tensors():
            model = timm.create_model(name, pretrained=wanted == "DEFAULT")
        if file.suffix == ".safetensors":
            model.load_state_dict(load_tensors(file)[0])
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"timm:{name} cannot be made: {error}") from error
    return _adapted(timm, model, name, device)


def _adapted(timm: Any, model: nn.Module, name: str, device: str) -> Adapted:
    config = timm.data.resolve_model_data_config(model)
    channels, height, width = config["input_size"]
    if height != width or channels not in (1, 3):
        raise OptionError(f"timm:{name} sees {channels}×{height}×{width}; headtilt needs 1 or 3 channels and squares.")
    features = _classifier(model)
    return Adapted(
        model=Normalised(model, config["mean"], config["std"]).to(device).eval(),
        labels=_labels(timm, model),
        size=height,
        resize=max(math.floor(height / (config.get("crop_pct") or 1.0)), height),
        padding="reflection",
        name=name,
        channels=channels,
        resample=RESAMPLE.get(config.get("interpolation", ""), "bicubic"),
        features="auto" if features is None else (f"model.{features}",),
    )


def _classifier(model: Any) -> str | None:
    """Return the name of the linear layer that classifies, whose input is the features; None where it is none."""
    layer = model.get_classifier()
    named = model.named_modules()
    return next((name for name, module in named if module is layer and isinstance(module, nn.Linear)), None)


def _labels(timm: Any, model: Any) -> tuple[str, ...] | None:
    """Return class names: those that came with the weights, or ImageNet's where timm knows which of its sets it is."""
    count = model.num_classes
    own = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    if own is not None and len(own) == count:
        return tuple(map(str, own))
    subset = timm.data.infer_imagenet_subset(model)
    if not subset:
        return None
    info = timm.data.ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(count))
