"""A `transformers` image-classification pipeline that tilts its head."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.errors import MissingExtraError, OptionError
from headtilt.its import ITS
from headtilt.sources import hf
from headtilt.sources.pretrained import wrapped


def for_pipeline(model: Any, robust: ITS, image_processor: Any) -> Any:
    """Return a copy of a `transformers` classifier that answers with `robust`, for `transformers.pipeline`.

    The processor normalises before the model, and the search wants raw pixels, whose padding is right; so what the
    processor did is undone first.

    Args:
        model: The classifier; it is not changed and shares its weights with the copy.
        robust: From raw pixels in [0, 1] to logits of the same classes, such as an `ITS` around the model.
        image_processor: The processor that the pipeline will use.

    Examples:
        >>> from transformers import pipeline
        >>> tilting = for_pipeline(model, robust, processor)
        >>> classify = pipeline("image-classification", model=tilting, image_processor=processor)
        >>> len(classify("digit.png", top_k=1))
        1
    """
    try:
        from transformers.modeling_outputs import ImageClassifierOutput
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise OptionError(f"model must be a transformers classifier; got {type(model).__name__}.")
    mean, deviation = undone(image_processor)

    def forward(pixel_values: Tensor, **_: Any) -> Any:
        images = pixel_values.float() * deviation.to(pixel_values.device) + mean.to(pixel_values.device)
        return ImageClassifierOutput(logits=robust(images))

    tilting = copy.copy(model)
    tilting.forward = forward
    return tilting


def undone(image_processor: Any) -> tuple[Tensor, Tensor]:
    """Return what to add and to multiply by, each (1, C, 1, 1), to get raw pixels in [0, 1] back from a processor's."""
    # Pixels are bytes to a processor; one that does not rescale leaves them between 0 and 255.
    factor = 255 * float(image_processor.rescale_factor) if image_processor.do_rescale else 255.0
    mean, deviation = [0.0], [1.0]
    if image_processor.do_normalize:
        mean, deviation = list(image_processor.image_mean), list(image_processor.image_std)
    shape = (1, -1, 1, 1)
    return torch.tensor(mean).reshape(shape) / factor, torch.tensor(deviation).reshape(shape) / factor


def tilting_pipeline(source: Any, *, bundle: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """Return a `transformers` image-classification pipeline that tilts its head.

    Args:
        source: The name of a checkpoint, its folder, or a pipeline, which is not changed.
        bundle: What was fitted for the model; levels and options come with it.
        **options: Any of `ITS`, such as those of a preset.

    Usage::

            classify = tilting_pipeline("google/vit-base-patch16-224", bundle="fitted")
            classify("cup.jpg")
    """
    try:
        from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        model = AutoModelForImageClassification.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
        processor, device = AutoImageProcessor.from_pretrained(name, **hf.plain()), None
    elif getattr(source, "task", None) == "image-classification":
        model, processor, device = source.model, source.image_processor, source.device
        name = str(getattr(model.config, "_name_or_path", "") or "model")
    else:
        raise OptionError(
            f"source must be a checkpoint's name or an image-classification pipeline; got {type(source).__name__}."
        )
    labels = tuple(str(model.config.id2label.get(index, index)) for index in range(model.config.num_labels))
    robust = wrapped(hf.adapt(model.eval(), processor, labels, name), bundle=bundle, **options)
    tilting = for_pipeline(model, robust, processor)
    return pipeline("image-classification", model=tilting, image_processor=processor, device=device)
