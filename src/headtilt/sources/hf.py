"""Hugging Face `transformers` image classifiers, from a hub name or a folder.

What a checkpoint's image processor does is measured, not read from its fields: there are dozens of processors, and
each has its own names for how much it crops and what it subtracts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headtilt.errors import DataError, MissingExtraError
from headtilt.sources import Adapted, Resample
from headtilt.sources.preprocessing import Normalised, to_mean_and_deviation

PROBE, SLOPE = 512, 0.45  # side of the picture by which a processor's geometry is measured, and how steep it is
PILLOW: dict[int, Resample] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
Processor = Callable[[Any], Tensor]  # from bytes (H, W, C) to what the model is shown, (C, H, W)


def load(name: str, *, device: str | torch.device = "cpu") -> Adapted:
    """Return the classifier of a checkpoint with its own preprocessing, split into geometry and normalisation.

    Weights come from safetensors files alone, and no code of a checkpoint is run, wherever it came from.

    Args:
        name: A folder with a `transformers` checkpoint, or the name of one on the hub.
        device: Where the model should live.

    Convention:
        Nothing is stretched: where a processor squeezes the whole photograph into its square, the centre square of the
        photograph is taken instead, since a tilt is no longer a tilt on squeezed pixels. On square images both agree.
    """
    try:
        from transformers import AutoImageProcessor, AutoModelForImageClassification
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    try:
        with quietly():
            model = AutoModelForImageClassification.from_pretrained(
                name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False, **plain())
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"hf:{name} is neither a checkpoint folder nor a name on the hub that can be reached: {error}"
        ) from error
    labels = tuple(str(model.config.id2label.get(index, index)) for index in range(model.config.num_labels))
    return adapt(model, processor, labels, name, device=device)


def adapt(
    model: nn.Module, processor: Any, labels: tuple[str, ...], name: str, *, device: str | torch.device = "cpu"
) -> Adapted:
    """Return a `transformers` classifier behind its own image processor, which is measured.

    Args:
        model: Takes ``pixel_values`` and gives ``logits``; has a ``config``.
        processor: Its image processor.
        labels: Its class names.
        name: What reports call it.
        device: Where it should live.
    """
    config: Any = model.config
    channels = 1 if getattr(config, "num_channels", 3) == 1 else 3
    matrix, offset = photometry(_shows(processor), channels, name)
    diagonal = bool((matrix - matrix.diag().diag()).abs().max() < 1e-4)
    mean, deviation = to_mean_and_deviation(matrix.diag() if diagonal else torch.ones(channels), offset, name)
    mix = None if diagonal else matrix
    size, resize = geometry(_shows(processor), matrix, offset, name)
    if not getattr(processor, "do_resize", True):
        # It takes images as large as they come: what the network was built for is all that is known.
        size = resize = min(size, _side(getattr(config, "image_size", size)))
    resample = getattr(processor, "resample", None)
    return Adapted(
        model=Normalised(model, mean, deviation, mix=mix, argument="pixel_values").to(device).eval(),
        labels=labels,
        size=size,
        resize=max(resize, size),
        padding="reflection",
        name=name.rstrip("/").rsplit("/", 1)[-1],
        channels=channels,
        resample="bilinear" if resample is None else PILLOW.get(int(resample), "bilinear"),
    )


def plain() -> dict[str, Any]:
    """Return what asks for the PIL classes of processors, which need no torchvision; version 5 names them otherwise."""
    from transformers import __version__ as version

    return {"backend": "pil"} if int(version.split(".")[0]) >= 5 else {"use_fast": False}


def photometry(shows: Processor, channels: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the matrix (C, C) and the offset (C,) by which raw pixels in [0, 1] become what the model is shown.

    Measured on plain colours, and checked on another one, since a curve would not be found out by its ends.
    """

    def seen(colour: list[int]) -> Tensor:
        plain = np.broadcast_to(np.array(colour, dtype=np.uint8), (64, 64, channels))
        shown = shows(plain if channels == 3 else plain[..., 0])
        return shown[:, shown.shape[1] // 2, shown.shape[2] // 2].double()

    offset = seen([0] * channels)
    pure = [[255 * (place == channel) for place in range(channels)] for channel in range(channels)]
    matrix = torch.stack([seen(colour) - offset for colour in pure], dim=1)
    other = [51, 102, 204][:channels]
    if not torch.allclose(matrix @ torch.tensor(other).double() / 255 + offset, seen(other), atol=1e-3, rtol=1e-3):
        raise DataError(f"the image processor of {name} changes colours in a way that is no normalisation.")
    return matrix.float(), offset.float()


def geometry(shows: Processor, matrix: Tensor, offset: Tensor, name: str) -> tuple[int, int]:
    """Return the side of the square that the model sees, and the shorter side to which images are resized before.

    Measured on a square that grows brighter from left to right: how fast it still does tells by how much it shrank.
    """
    # Steeper from left to right than downwards: down the rows the rounding to bytes averages out.
    down, right = np.mgrid[:PROBE, :PROBE]
    ramp = (SLOPE * right + 0.05 * down).round().astype(np.uint8)
    shown = shows(np.stack([ramp] * 3, axis=-1) if len(offset) == 3 else ramp)
    if shown.shape[1] != shown.shape[2]:
        raise DataError(f"{name} sees {shown.shape[1]}×{shown.shape[2]} pixels; headtilt needs a model of squares.")
    size = shown.shape[2]
    raw = torch.linalg.solve(matrix.double(), shown.double().mean(1) - offset.double()[:, None])[0]
    middle = slice(size // 4, size - size // 4)
    place = torch.arange(size, dtype=torch.float64)[middle]
    place, raw = place - place.mean(), raw[middle] - raw[middle].mean()
    per_pixel = float((place * raw).sum() / (place * place).sum())
    return size, round(SLOPE / 255 * PROBE / per_pixel)


def _shows(processor: Any) -> Processor:
    def shows(pixels: Any) -> Tensor:
        from PIL import Image

        shown: Tensor = processor(Image.fromarray(np.ascontiguousarray(pixels)), return_tensors="pt")["pixel_values"][0]
        return shown

    return shows


@contextmanager
def quietly() -> Iterator[None]:
    """Load without the library's own progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _side(size: Any) -> int:
    """Return a side from a number or a pair of them."""
    return int(size if isinstance(size, int) else min(size))
