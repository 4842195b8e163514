"""Hugging Face `transformers` image classifiers, from a hub name or a folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headtilt.adapters import Adapted
from headtilt.errors import DataError, MissingExtraError


class Normalised(nn.Module):
    """A model behind its own normalisation: raw pixels in [0, 1] in, logits out.

    Args:
        model: Returns an object with `.logits`.
        mean: One number per channel.
        deviation: One number per channel.
        factor: What pixels in [0, 1] are multiplied by first, where the processor rescales by other than 1/255.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module, mean: list[float], deviation: list[float], factor: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).reshape(1, -1, 1, 1) / factor)
        self.register_buffer("deviation", torch.tensor(deviation).reshape(1, -1, 1, 1) / factor)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y)."""
        logits: Tensor = self.model(pixel_values=(images - self.mean) / self.deviation).logits
        return logits


def load(name: str, *, device: str | torch.device = "cpu") -> Adapted:
    """Return the classifier of a checkpoint with its own preprocessing, split into geometry and normalisation.

    Args:
        name: A folder with a `transformers` checkpoint, or the name of one on the hub.
        device: Where the model should live.
    """
    try:
        from transformers import AutoImageProcessor, AutoModelForImageClassification
        from transformers import __version__ as version
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    try:
        model = AutoModelForImageClassification.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
        # The PIL classes, which need no torchvision; version 5 names them otherwise.
        plain: dict[str, Any] = {"backend": "pil"} if int(version.split(".")[0]) >= 5 else {"use_fast": False}
        processor = AutoImageProcessor.from_pretrained(name, **plain)
    except (OSError, ValueError) as error:
        raise DataError(
            f"hf:{name} is neither a checkpoint folder nor a name on the hub that can be reached: {error}"
        ) from error
    size = _side(
        getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else processor.size
    )
    resize = _side(processor.size)
    rescale = float(getattr(processor, "rescale_factor", 1 / 255)) * 255 if processor.do_rescale else 255.0
    mean, deviation = ([0.0], [1.0])
    if processor.do_normalize:
        mean, deviation = list(processor.image_mean), list(processor.image_std)
    labels = tuple(str(model.config.id2label[index]) for index in range(model.config.num_labels))
    wrapped = Normalised(model, mean, deviation, rescale).to(device).eval()
    return Adapted(wrapped, labels, size, max(resize, size), "reflection", name.rstrip("/").rsplit("/", 1)[-1])


def _side(size: Any) -> int:
    """Return the side of the square that a processor's size means, in any of the forms that processors use."""
    if isinstance(size, int):
        return size
    for key in ("shortest_edge", "height", "longest_edge"):
        if size and size.get(key):
            return int(size[key])
    raise DataError(f"the image processor gives its size as {size!r}, which has no side to read.")
