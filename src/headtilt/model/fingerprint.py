"""What a model is known by: its answers to a few fixed noise images, which any callable gives.

Weights would not do. Black boxes show none, a wrapper such as `DataParallel` renames them, and an ONNX file of the same
network has others; all of these answer alike, and what was fitted around one of them serves the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headtilt.errors import DataError, ModelError
from headtilt.model.evidence import Evidence, floored
from headtilt.model.predictor import Predictor

NOISE_IMAGES = 2
MOST_PIXELS = 2**25  # of one of them: a file may ask for any number
# Standard deviations of its answers by which a model may differ from itself on another device, compiled or exported,
# and cast to half of its precision. The zoo's networks of one architecture and two seeds differ by 0.49 at least.
TOLERANCE, HALF_TOLERANCE = 0.02, 0.1


@dataclass(frozen=True)
class Fingerprint:
    """A model's answers to noise.

    Attributes:
        shape: (C, H, W) of the noise images.
        half: Whether the model computed in half precision.
        answers: What it said, in single precision on the CPU; with features where taps were read.
    """

    shape: tuple[int, int, int]
    half: bool
    answers: Evidence

    def __post_init__(self) -> None:
        whole = len(self.shape) == 3 and all(isinstance(side, int) and side > 0 for side in self.shape)
        if not whole or math.prod(self.shape) > MOST_PIXELS:
            raise DataError(f"a fingerprint must be of images (C, H, W); got {self.shape!r}.")


def fingerprint_of(predictor: Predictor) -> Fingerprint | None:
    """Return the fingerprint of a model, of images like those seen last; None where it has seen none, or takes none."""
    if predictor.seen is None or len(predictor.seen) != 3:
        return None
    channels, height, width = predictor.seen
    try:
        return of_noise(predictor, (channels, height, width))
    except ModelError:  # such as a black box that wants its images on a device of which nobody knows
        return None


def of_noise(predictor: Predictor, shape: tuple[int, int, int]) -> Fingerprint:
    """Return the fingerprint of a model that takes images of a shape (C, H, W)."""
    # Numpy has frozen this generator: the same numbers in every version.
    noise = np.random.RandomState(0).random_sample((NOISE_IMAGES, *shape))
    device, dtype = predictor.device_and_dtype(torch.empty(0))
    said = predictor(torch.from_numpy(noise).to(device, torch.float32))
    features = None if said.features is None else said.features.float().cpu()
    half = predictor.autocast is not None or dtype in (torch.float16, torch.bfloat16)
    return Fingerprint(shape, half, Evidence(floored(said.logits.float()).cpu(), features))


def difference(predictor: Predictor, other: Fingerprint) -> str | None:
    """Return in words how a model differs from that of a fingerprint; None where they are the same."""
    try:
        mine = of_noise(predictor, other.shape)
    except ModelError as error:
        return str(error).removesuffix(".")
    most = HALF_TOLERANCE if mine.half or other.half else TOLERANCE
    for what in ("logits", "features"):
        here, there = getattr(mine.answers, what), getattr(other.answers, what)
        if here is None and there is None:
            continue
        if here is None or there is None or here.shape != there.shape:
            widths = [0 if part is None else part.shape[-1] for part in (here, there)]
            return f"this one has {widths[0]} {what}, that one has {widths[1]}"
        apart = distance(here, there)
        if not apart <= most:  # also where it is NaN
            return f"their {what} for the same noise differ by {apart:.2g} standard deviations ({most} at most)"
    return None


def distance(first: Tensor, second: Tensor) -> float:
    """Return the root mean square of the difference of answers, in standard deviations of the second."""
    apart = (first.double() - second.double()).square().mean().sqrt()
    return float(apart / second.double().std(correction=0).clamp_min(1e-6))
