"""What the items with photographs share: classifiers opened when they are needed, SI-Score's images, accuracies."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from headtilt.errors import DataError
from headtilt.geometry.groups import rotation
from headtilt.geometry.warp import Padding, centre_crop, warp
from headtilt.its import ITS
from headtilt.model.predictor import Predictor
from headtilt.paper.data import siscore as reader
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.fetch import data_folders, find, missing
from headtilt.paper.experiments.reproduce.compose import compose
from headtilt.paper.experiments.reproduce.study import Study
from headtilt.paper.experiments.reproduce.trial import share
from headtilt.sources import Adapted
from headtilt.sources import registry as door

BATCH = 64
Variant = Literal["rotation", "area", "location"]
MODELS = {
    "MobileNetV2": "hf:mobilenet_v2_imagenet",
    "ViT-Ti/16": "hf:vit_tiny_imagenet",
    "EfficientNet-Lite0": "onnx:efficientnet_lite0_imagenet/model.onnx",
}


class Lazy:
    """A classifier loaded when it is first needed: a run whose units are all done needs none.

    Args:
        spec: What to load.
        device: Where it should live.

    Attributes:
        fits: Wrappers fitted for it so far; see `Setting`.
    """

    def __init__(self, spec: str, device: str) -> None:
        self.spec, self.device = spec, device
        self._loaded: Adapted | None = None
        self.fits: dict[Any, ITS] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker gets: it loads the classifier itself."""
        return {**self.__dict__, "_loaded": None, "fits": {}}

    def __call__(self) -> Adapted:
        """Return it."""
        if self._loaded is None:
            self._loaded = door.load(self.spec, device=self.device)
        return self._loaded


class Cropped(nn.Module):
    """A classifier that sees the centre square of larger images: views are turned first, and cut afterwards.

    Args:
        model: The classifier.
        side: Of the square.
    """

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y) of images (B, C, H, W)."""
        logits: Tensor = self.model(centre_crop(images, self.side))
        return logits


def model_spec(study: Study, name: str | None = None) -> str:
    """Return the spec of a classifier: as it is asked for, or by its name in `MODELS` from the data folders."""
    name = name or study.model or "MobileNetV2"
    if name not in MODELS:
        return name
    scheme, _, place = MODELS[name].partition(":")
    places = data_folders(study.folders)
    path = find([place], places)
    if path is None:
        raise missing(name, f"{place} (or give --model)", places)
    return f"{scheme}:{path}"


def shown(name: str) -> str:
    """Return what reports call a classifier: its name, or what a spec ends in."""
    return name if name in MODELS else name.rstrip("/").rsplit("/", 1)[-1]


def images_of(study: Study, variant: Variant, size: int, limit: int, *, upright: bool = False) -> tuple[Dataset, str]:
    """Return a variant's images and where they are from: SI-Score's own folder, or composed."""
    try:
        found = reader.read(variant, folders=study.folders, size=size, limit=limit), "SI-Score"
    except DataError:
        data = compose(variant, folders=study.folders, size=size, limit=limit, upright=upright)
        return data, "composed from si-score-mini"
    if upright:
        raise DataError("SI-Score's own images come with their turn; only composed ones can be had without it.")
    return found


def undone(images: Tensor, degrees: Tensor, padding: Padding) -> Tensor:
    """Return images (N, C, H, W) turned back by degrees (N,)."""
    pose = rotation().matrix(-degrees.double().deg2rad()).float()
    parts = zip(images.split(BATCH), pose.split(BATCH), strict=True)
    return torch.cat([warp(part, back, padding=padding) for part, back in parts])


def bare_logits(model: nn.Module, images: Tensor, device: str) -> Tensor:
    """Return what the bare model says."""
    predictor = Predictor(model)
    return torch.cat([predictor(part.to(device)).logits.cpu() for part in images.split(BATCH)])


def accuracies(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return acc@1 and acc@5."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return {"acc1": share(best[:, 0] == labels), "acc5": share((best == labels[:, None]).any(1))}
