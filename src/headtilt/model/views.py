"""Evaluators: what a classifier says of views of a batch. Any callable of that kind will do; these know short cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headtilt.geometry.warp import Interpolation, Padding
from headtilt.model.evidence import Calibrator, Evaluate, Evidence
from headtilt.model.predictor import Predictor


@dataclass(frozen=True)
class Views:
    """An `Evaluate`: what a predictor says of views of these images.

    Attributes:
        predictor: Whom to ask.
        images: (B, C, H, W).
        padding: See `warp`.
        interpolation: See `warp`.
    """

    predictor: Predictor
    images: Tensor
    padding: Padding = "zeros"
    interpolation: Interpolation = "bilinear"

    def __call__(self, index: Tensor, poses: Tensor) -> Evidence:
        """Return the evidence (V, …) of image `index[v]` seen under `poses[v]`."""
        return self.predictor.views(self.images, index, poses, padding=self.padding, interpolation=self.interpolation)

    def of(self, rows: Tensor) -> Views:
        """Return the views of those images (n,) alone, in rising order."""
        return replace(self, images=self.images[rows])

    def everywhere(self, batch: int, poses: Tensor) -> Evidence:  # noqa: ARG002
        """Return the evidence (B·P, …) of every image under every pose (P, 3, 3), image by image."""
        return self.predictor.all_views(self.images, poses, padding=self.padding, interpolation=self.interpolation)


def everywhere(evaluate: Evaluate, batch: int, poses: Tensor) -> Evidence:
    """Return the evidence (B·P, …) of each of `batch` images under each of the poses (P, 3, 3), image by image.

    An evaluator may know a short cut, called like this function; any other is asked view by view.
    """
    shortcut: Callable[[int, Tensor], Evidence] | None = getattr(evaluate, "everywhere", None)
    if shortcut is not None:
        return shortcut(batch, poses)
    index = torch.arange(batch, device=poses.device).repeat_interleave(poses.shape[0])
    return evaluate(index, poses.repeat(batch, 1, 1))


@dataclass(frozen=True)
class Scored:
    """An evaluator whose evidence goes through a calibrator."""

    evaluate: Evaluate
    calibrator: Calibrator

    def __call__(self, index: Tensor, poses: Tensor) -> Evidence:
        """Return the calibrated evidence (V, …) of image `index[v]` seen under `poses[v]`."""
        return self.calibrator(self.evaluate(index, poses))

    def everywhere(self, batch: int, poses: Tensor) -> Evidence:
        """Return the calibrated evidence (B·P, …) of every image under every pose (P, 3, 3)."""
        return self.calibrator(everywhere(self.evaluate, batch, poses))

    def of(self, rows: Tensor) -> Scored:
        """Return the same for those images (n,) alone."""
        return Scored(only(self.evaluate, rows), self.calibrator)


def only(evaluate: Evaluate, rows: Tensor) -> Evaluate:
    """Return an evaluator of those images (n,) alone, in rising order."""
    narrowed: Callable[[Tensor], Evaluate] | None = getattr(evaluate, "of", None)
    if narrowed is not None:
        return narrowed(rows)
    return lambda index, poses: evaluate(rows[index], poses)
