"""Test-time augmentation: the mean or the most confident of the predictions over rotated views."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headtilt.errors import one_of
from headtilt.geometry.groups import Group, rotation
from headtilt.geometry.warp import Padding, invert
from headtilt.model.predictor import Predictor


def tta(
    predictor: Predictor,
    images: Tensor,
    merge: Literal["mean", "max"] = "mean",
    *,
    group: Group | None = None,
    samples: int = 17,
    padding: Padding = "zeros",
) -> tuple[Tensor, Tensor]:
    """Return merged probabilities (B, Y) and the transform that the best view undid (B, 3, 3).

    Args:
        predictor: The model.
        images: (B, C, H, W).
        merge: "mean" averages probabilities over the views; "max" takes, for each class, its largest.
        group: Whose orbit to average over; rotations by default.
        samples: Views per image.
        padding: See `warp`.
    """
    one_of("merge", merge, ("mean", "max"))
    poses = (rotation() if group is None else group).orbit(samples).to(images)
    index = torch.arange(len(images), device=images.device).repeat_interleave(len(poses))
    seen = predictor.views(images, index, poses.repeat(len(images), 1, 1), padding=padding)
    probabilities = seen.logits.softmax(-1).reshape(len(images), len(poses), -1)
    best = probabilities.amax(2).argmax(1)
    merged = probabilities.mean(1) if merge == "mean" else probabilities.amax(1)
    return merged, invert(poses[best])
