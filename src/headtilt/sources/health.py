"""Signs that a model is not shown what it was trained on: a normalisation that is missing, images of another kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headtilt.geometry.warp import warp
from headtilt.model.predictor import Predictor
from headtilt.sources import Adapted
from headtilt.sources.preprocessing import Normalised

MOST_IMAGES = 48
# What other models want: mean and deviation of pixels in 0 … 1.
NORMALISATIONS = {
    "ImageNet's mean and deviation": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "a mean and a deviation of 0.5": ((0.5,), (0.5,)),
}
MUCH_SURER, MUCH_STEADIER = 1.0, 0.08  # log-odds of the mean probability; share of answers that stay
BARELY_AGREES, NEAR_CHANCE, ONE_LABEL = 0.5, 3.0, 0.9  # share that agrees; times chance; share of the commonest label
COLOURFUL, MUCH_LARGER = 0.08, 4.0  # mean range of the channels; times the side that a model sees


@dataclass(frozen=True)
class Health:
    """How a bare model answers on some images.

    Attributes:
        images: How many.
        agreement: Share of its answers that stay when images are turned by two degrees and moved by a pixel.
        confidence: Mean probability of its answers.
        chance: One in as many as it has classes.
        commonest: Share of images that get the commonest answer.
        better: The normalisation under which it is much surer, and the mean probability there; None where none is.
    """

    images: int
    agreement: float
    confidence: float
    chance: float
    commonest: float
    better: tuple[str, float] | None = None

    def advice(self) -> list[str]:
        """Return what looks wrong, a sentence each, with what to do; nothing where all looks well."""
        said = []
        if self.better is not None:
            name, there = self.better
            said.append(
                f"the model is surer of these images with {name} ({self.confidence:.0%} → {there:.0%}): its "
                "normalisation seems to be missing. Put it into the model, or mean and std into the JSON beside it."
            )
        elif self.confidence < NEAR_CHANCE * self.chance and self.chance < 0.2:
            said.append(
                f"the model's answers are near chance: {self.confidence:.1%} sure on average, of {1 / self.chance:.0f} "
                "classes. Are these images of the kind it was trained on, and prepared as it wants them?"
            )
        if self.agreement < BARELY_AGREES:
            said.append(
                f"the model barely agrees with itself: {self.agreement:.0%} of its answers stay when images are turned "
                "by 2°. A search can be no better than the model; check its preprocessing."
            )
        if self.images >= 20 and self.chance <= 0.2 and self.commonest > ONE_LABEL:
            said.append(
                f"the model gives {self.commonest:.0%} of these images the same answer. Check its preprocessing."
            )
        return [sentence.replace("%", " %") for sentence in said]


@torch.no_grad()
def health(predictor: Predictor, images: Tensor) -> Health:
    """Return how a bare model answers on images (n, C, H, W), of which it is shown the first 48 at most."""
    device, _ = predictor.device_and_dtype(images)
    some = images[:MOST_IMAGES].to(device)
    angle = math.radians(2)
    nearly = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 2 / some.shape[-1]], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]],
        device=device,
    )
    moved = warp(some, nearly.expand(len(some), 3, 3), padding="border")

    def seen(mean: tuple[float, ...] = (0.0,), deviation: tuple[float, ...] = (1.0,)) -> tuple[float, float, Tensor]:
        plain, other = (
            predictor((shown - _per_channel(mean, some)) / _per_channel(deviation, some)) for shown in (some, moved)
        )
        return _mean_confidence(plain.logits), float((plain.labels == other.labels).double().mean()), plain.logits

    confidence, agreement, logits = seen()
    better = None
    # More contrast makes many a model surer: only one that brings no normalisation can be missing it.
    missing = not isinstance(predictor.model, Normalised) or bool((predictor.model.deviation == 1).all())
    for name, (mean, deviation) in NORMALISATIONS.items() if missing else ():
        if len(mean) not in (1, some.shape[1]):
            continue
        there, agrees, _ = seen(mean, deviation)
        surer, steadier = _log_odds(there) - _log_odds(confidence), agrees - agreement
        if (surer > MUCH_SURER and steadier > -0.02) or (steadier > MUCH_STEADIER and surer > 0.2):
            better = max(better or ("", 0.0), (name, there), key=lambda one: one[1])
    return Health(
        images=len(some),
        agreement=agreement,
        confidence=confidence,
        chance=1 / logits.shape[1],
        commonest=float(logits.argmax(1).bincount().max()) / len(some),
        better=better,
    )


def unlike(size: tuple[int, int], colours: Tensor, adapted: Adapted) -> str | None:
    """Return a hint where a picture is plainly not of the kind that a model knows: a photograph for one of digits.

    Args:
        size: Width and height of the whole picture.
        colours: (3, h, w), some or all of it.
        adapted: The model.
    """
    if adapted.channels == 3 or min(size) < MUCH_LARGER * adapted.size:
        return None
    if float((colours.amax(0) - colours.amin(0)).mean()) < COLOURFUL:
        return None
    return (
        f"this looks like a photograph ({size[0]}×{size[1]}, in colour), and {adapted.name} sees "
        f"{adapted.size}×{adapted.size} pixels in grey: its answer means nothing. Choose a model of photographs."
    )


def _mean_confidence(logits: Tensor) -> float:
    return float(logits.double().softmax(1).amax(1).mean())


def _log_odds(share: float) -> float:
    share = min(max(share, 1e-6), 1 - 1e-6)
    return math.log(share / (1 - share))


def _per_channel(values: tuple[float, ...], like: Tensor) -> Any:
    return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(1, -1, 1, 1)
