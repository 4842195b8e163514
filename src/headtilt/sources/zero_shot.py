"""Models that score pictures against texts, CLIP and SigLIP among them, as classifiers of classes that are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.errors import DataError, MissingExtraError, ModelError, OptionError
from headtilt.sources import Adapted, hf

PROMPT = "a photo of a {}."


class ZeroShot(nn.Module):
    """A picture tower and the texts of some classes, computed once: logits are scaled cosines.

    Args:
        model: Has `get_image_features`, and `logit_scale` where it was trained with one, `logit_bias` likewise.
        texts: (Y, D), features of the classes.
    """

    texts: Tensor

    def __init__(self, model: Any, texts: Tensor) -> None:
        super().__init__()
        self.model = model
        self.config = getattr(model.config, "vision_config", model.config)
        self.register_buffer("texts", nn.functional.normalize(texts, dim=-1))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits (B, Y)."""
        pictures = nn.functional.normalize(features(self.model.get_image_features(pixel_values=pixel_values)), dim=-1)
        scale = getattr(self.model, "logit_scale", None)
        cosines = pictures @ self.texts.to(pictures).T
        bias = getattr(self.model, "logit_bias", None)
        logits = cosines if scale is None else cosines * scale.exp()
        return logits if bias is None else logits + bias


def load(name: str, labels: Sequence[str], *, device: str | torch.device = "cpu", prompt: str = PROMPT) -> Adapted:
    """Return a classifier of the named classes from a checkpoint that knows pictures and texts.

    Weights come from safetensors files alone, and no code of a checkpoint is run, wherever it came from.

    Args:
        name: A folder with a `transformers` checkpoint, or the name of one on the hub.
        labels: Names of the classes.
        device: Where the model should live.
        prompt: What is said of each class; ``{}`` stands for its name.
    """
    if len(labels) < 2 or any(not str(label).strip() for label in labels):
        raise OptionError(f"labels must name at least two classes; got {list(labels)!r}.")
    try:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    try:
        with hf.quietly():
            model = AutoModel.from_pretrained(
                name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            ).eval()
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False, **hf.plain())
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"hf-zeroshot:{name} is neither a checkpoint folder nor a name on the hub that can be reached: {error}"
        ) from error
    if not hasattr(model, "get_image_features") or not hasattr(model, "get_text_features"):
        raise ModelError(f"{name} scores no pictures against texts: it is a {type(model).__name__}. Use hf:{name}.")
    texts = text_features(model, tokenizer, [prompt.format(label) for label in labels])
    short = name.rstrip("/").rsplit("/", 1)[-1]
    return hf.adapt(ZeroShot(model, texts), processor, tuple(map(str, labels)), short, device=device)


@torch.no_grad()
def text_features(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the features (Y, D) of texts, padded as the model was trained: SigLIP to the full length, others not."""
    longest = getattr(getattr(model.config, "text_config", model.config), "max_position_embeddings", None)
    full = "siglip" in str(getattr(model.config, "model_type", ""))
    known = {"max_length": longest, "truncation": True} if longest else {}
    words = tokenizer(texts, padding="max_length" if full else True, return_tensors="pt", **known)
    given = {
        key: words[key] for key in ("input_ids", "attention_mask") if key in words and not (full and key != "input_ids")
    }
    return features(model.get_text_features(**given))


def features(said: Any) -> Tensor:
    """Return features (n, D) from what a tower gives: a tensor, or from version 5 on an object that holds it."""
    found: Tensor = said if isinstance(said, Tensor) else said.pooler_output
    return found
