"""Images turned upright on their way into a set: a transform in torchvision's manner, and for `datasets.map`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headtilt.apps.canonicalise import check_fitted
from headtilt.apps.upright_copy import nearest_quarter, turned, undone
from headtilt.errors import OptionError

if TYPE_CHECKING:
    from headtilt.sources.pretrained import Pretrained


class Upright:
    """A transform that turns images back if a fitted gate is sure that they are tilted, and leaves all others alone.

    How probable the angle is, `pose_confidence` of a search result says.

    ``Upright(robust)`` takes a PIL image and returns one, at its own size; a tensor (C, H, W) or (B, C, H, W) of the
    size that the model sees, and returns one; or a batch of `datasets.map(…, batched=True)`, of which it changes the
    column of images.

    Args:
        robust: From `headtilt.from_pretrained`, with a fitted bundle.
        column: Where batches hold their images.
        quarters: Whether to turn by the nearest quarter turn alone, which resamples nothing.
        unfitted: Whether to turn images though nothing was fitted: many upright ones will be turned, too.

    Usage::

            upright = Upright(from_pretrained("hf:NAME", bundle="fitted"))
            pictures = datasets.load_dataset("imagefolder", data_dir="photos")
            pictures = pictures.map(upright, batched=True)
    """

    def __init__(
        self, robust: Pretrained, *, column: str = "image", quarters: bool = False, unfitted: bool = False
    ) -> None:
        check_fitted(robust, unfitted=unfitted)
        self.robust, self.column, self.quarters = robust, column, quarters

    def __call__(self, given: Any) -> Any:
        """Return what was given, turned upright."""
        if isinstance(given, Mapping):
            return self._batch(given)
        if isinstance(given, Tensor):
            return self._tensors(given[None])[0] if given.ndim == 3 else self._tensors(given)
        if hasattr(given, "transpose") and hasattr(given, "mode"):
            return self._pictures([given])[0]
        raise OptionError(
            f"Upright takes a PIL image, a tensor or a batch with a column {self.column!r}; got {type(given).__name__}."
        )

    def __repr__(self) -> str:
        """Return the transform as it would be typed."""
        return f"Upright({self.robust.adapted.name}, column={self.column!r}, quarters={self.quarters})"

    def _batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if self.column not in batch:
            raise OptionError(f"column must be one of {', '.join(map(str, batch))}; got {self.column!r}.")
        images = batch[self.column]
        several = isinstance(images, (list, tuple))
        upright = self._pictures(list(images) if several else [images])
        return {**batch, self.column: upright if several else upright[0]}

    def _tensors(self, images: Tensor) -> Tensor:
        result = self.robust.search(images)
        if not self.quarters:
            return result.canonical()
        turns = result.quarters.tolist()
        return torch.stack([torch.rot90(one, -by, (-2, -1)) for one, by in zip(images, turns, strict=True)])

    def _pictures(self, pictures: list[Any]) -> list[Any]:
        poses = self.robust.search(self.robust.read(*pictures)).pose.double().cpu()
        if self.quarters:
            return [turned(one, nearest_quarter(pose)) for one, pose in zip(pictures, poses, strict=True)]
        return [undone(one, pose) for one, pose in zip(pictures, poses, strict=True)]
