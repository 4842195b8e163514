"""What a search returns for each image of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from headtilt.errors import OptionError, at_least, is_number
from headtilt.geometry import inverse
from headtilt.geometry.groups import decompose
from headtilt.geometry.warp import Interpolation, Padding, invert, warp
from headtilt.model.outputs import two_classes
from headtilt.search.found import Beam, Trace, join_images, map_image_tensors, spread_out
from headtilt.search.run import Answer

SHOWN = 10  # images that a printed result names


@dataclass(frozen=True, eq=False, repr=False)
class SearchResult:
    """What the search found for each image.

    Attributes:
        logits: (B, Y), in the shape of the model's own output.
        pose: (B, 3, 3), what undoes the perturbation: ``warp(images, pose)`` is the canonical image.
        views: (B,), how many views of each image the model was shown.
        hypotheses: The final beam, best first: poses, labels and confidences of the rivals too.
        trace: One `LevelTrace` per level, from the root down; a `LatticeTrace` for a search over the whole group.
            Images that a gate let go early hold NaN, −1 or False there; it is empty where all of them went.
        bare: (B, Y), the bare model's own logits of the images as they came.
        gated: (B,), whether the gate kept the bare model's own answer.
        pose_confidence: (B,), how probable it is, by a fitted head, that the right pose is near `pose`; NaN where no
            head tells.
        images: (B, C, H, W), the images as they came.
        padding: How views were padded.
        interpolation: How views were resampled.
        multilabel: Whether each label is there or not by itself, rather than one of them.
    """

    logits: Tensor
    pose: Tensor
    views: Tensor
    hypotheses: Beam
    trace: Trace
    bare: Tensor
    gated: Tensor
    pose_confidence: Tensor
    images: Tensor
    padding: Padding = "auto"
    interpolation: Interpolation = "bilinear"
    multilabel: bool = False

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> SearchResult:
        """Return the result of one image, still as a batch of one, or of several: a slice, indices or truth values."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index must name one of the {len(self)} images; got {index}.")
            index = slice(index % len(self), index % len(self) + 1)
        rows = index if isinstance(index, slice) else torch.as_tensor(index, device=self.logits.device)
        if isinstance(rows, Tensor) and not rows.numel():
            rows = rows.long()  # an empty list names no image, and is of floats by itself
        return self._changed(lambda part: part[rows])

    def to(self, *args: Any, **kwargs: Any) -> SearchResult:
        """Return the same on another device; see `torch.Tensor.to`. Precisions stay as they are."""
        device = torch.empty(0).to(*args, **kwargs).device
        return self._changed(lambda part: part.to(device), shared=True)

    def cpu(self) -> SearchResult:
        """Return the same in the memory of the CPU."""
        return self.to("cpu")

    def __repr__(self) -> str:
        """Return a line for each image, for as many as fit on a screen."""
        shown = [self.describe(index).partition("\n")[0] for index in range(min(len(self), SHOWN))]
        more = [f"… and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n  ".join([f"SearchResult of {len(self)} images", *shown, *more])

    def _changed(self, change: Callable[[Tensor], Tensor], *, shared: bool = False) -> SearchResult:
        """Return the result with all of its per-image tensors changed."""
        changes: dict[str, Any] = {
            field.name: change(part) for field in fields(self) if isinstance(part := getattr(self, field.name), Tensor)
        }
        levels = (map_image_tensors(level, change, shared=shared) for level in self.trace)
        hypotheses = map_image_tensors(self.hypotheses, change, shared=shared)
        return replace(self, hypotheses=hypotheses, trace=cast(Trace, tuple(levels)), **changes)

    @property
    def labels(self) -> Tensor:
        """Most probable class of each image (B,); for several labels, whether each is there (B, Y)."""
        return self.logits > 0 if self.multilabel else two_classes(self.logits).argmax(dim=-1)

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities (B, Y); of no and yes (B, 2) for a single logit; one by one for several labels."""
        return self.logits.sigmoid() if self.multilabel else two_classes(self.logits).softmax(dim=-1)

    @property
    def perturbation(self) -> Tensor:
        """How each image was most likely transformed (B, 3, 3): the inverse of `pose`."""
        return invert(self.pose)

    def topk(self, k: int = 5) -> tuple[Tensor, Tensor]:
        """Return the k most probable classes and their probabilities, each (B, k), fewer where the model has fewer."""
        at_least("k", k, 1)
        probabilities = self.probabilities
        best = probabilities.topk(min(k, probabilities.shape[-1]), dim=-1)
        return best.indices, best.values

    def canonical(self, min_confidence: float = 0.0) -> Tensor:
        """Return the images (B, C, H, W) with the perturbation undone, resampled once from the originals.

        Args:
            min_confidence: Images whose pose is less probable than that stay as they came; needs a fitted head.
        """
        if not is_number(min_confidence) or not 0 <= float(min_confidence) <= 1:
            raise OptionError(f"min_confidence must be a probability between 0 and 1; got {min_confidence!r}.")
        if not len(self):
            return self.images
        turned = warp(self.images, self.pose, padding=self.padding, interpolation=self.interpolation)
        stays = (self.pose == torch.eye(3, dtype=self.pose.dtype, device=self.pose.device)).flatten(1).all(1)
        least = float(min_confidence)
        if least > 0:
            if bool(self.pose_confidence.isnan().any()):
                raise OptionError("min_confidence needs a head that tells poses: call fit first, or leave it out.")
            stays = stays | (self.pose_confidence < least)
        return torch.where(stays[:, None, None, None], self.images, turned)

    @property
    def quarters(self) -> Tensor:
        """Clockwise quarter turns (B,), 0 to 3, nearest to `pose`: how to turn a page that may not be square.

        ``torch.rot90(page, -int(result.quarters[i]), (-2, -1))`` turns it exactly, sides swapped where need be; the
        canonical image keeps the frame it came in, which cuts a page that is not square.
        """
        return (decompose(self.pose.double()).rotation / (math.pi / 2)).round().long() % 4

    def invert(
        self,
        *,
        points: Tensor | None = None,
        boxes: Tensor | None = None,
        masks: Tensor | None = None,
        corners: bool = False,
    ) -> Tensor:
        """Return what was found on the canonical images as it lies on the images as they came.

        Args:
            points: (B, N, 2), x and y.
            boxes: (B, N, 4), left, top, right, bottom; gives the upright boxes around the tilted ones.
            masks: (B, N, H, W) of any dtype, resampled to the nearest pixel.
            corners: For boxes: return the corners (B, N, 4, 2) of the tilted boxes instead.

        Convention:
            Pixels, x right, y down; the image covers [0, W] × [0, H], so that the first pixel's centre is (0.5, 0.5).
        """
        height, width = self.images.shape[-2:]
        if [points is None, boxes is None, masks is None].count(False) != 1:
            raise OptionError("invert takes exactly one of points, boxes and masks.")
        if points is not None:
            return inverse.points_back(points, self.pose, height, width)
        if boxes is not None:
            return inverse.boxes_back(boxes, self.pose, height, width, corners=corners)
        return inverse.masks_back(cast(Tensor, masks), self.pose)

    def describe(self, index: int = 0, *, names: Sequence[str] | None = None) -> str:
        """Return in words how image `index` was perturbed, what it shows, and what the rivals were."""
        if not -len(self) <= index < len(self):
            raise OptionError(f"index must name one of the {len(self)} images; got {index}.")

        def name(label: int) -> str:
            return names[label] if names is not None else f"label {label}"

        label = int(self.probabilities[index].argmax())
        probability = float(self.probabilities[index, label])
        tilt = decompose(self.perturbation[index].double()).describe()
        kept = ", kept by the gate" if bool(self.gated[index]) else ""
        lines = [f"{tilt} → {name(label)} ({probability:.1%}), {int(self.views[index])} views{kept}"]
        beam = self.hypotheses
        for slot in range(beam.active.shape[1]):
            rival = int(beam.labels[index, slot])
            if bool(beam.active[index, slot]) and rival != label:
                tilt = decompose(invert(beam.pose[index, slot].double())).describe()
                sure = f"{float(beam.confidence[index, slot]):.3g}".replace("-", "−")
                lines.append(f"  rival: {tilt} → {name(rival)}, confidence {sure}")
        return "\n".join(lines)


def result_of(
    images: Tensor,
    bare: Tensor,
    answer: Answer,
    *,
    single_logit: bool,
    padding: Padding,
    interpolation: Interpolation,
    multilabel: bool,
) -> SearchResult:
    """Return what users get to see of the answer for images (B, C, H, W) whose bare logits are (B, Y)."""
    return SearchResult(
        logits=own_shape(answer.logits, single_logit),
        pose=answer.pose,
        views=answer.found.views,
        hypotheses=answer.found.beam,
        trace=answer.found.trace,
        bare=own_shape(bare, single_logit),
        gated=answer.kept,
        pose_confidence=answer.confidence,
        images=images,
        padding=padding,
        interpolation=interpolation,
        multilabel=multilabel,
    )


def own_shape(logits: Tensor, single: bool) -> Tensor:
    """Return logits in the model's own shape: the two classes of a single logit as one (…, 1)."""
    return logits[..., 1:] - logits[..., :1] if single else logits


def concatenate(results: Sequence[SearchResult]) -> SearchResult:
    """Return the results of consecutive parts of a batch as one."""
    if len(results) == 1:
        return results[0]
    first = results[0]
    known = next((result.trace for result in results if result.trace), ())
    traces = [result.trace or [spread_out(level, None, len(result)) for level in known] for result in results]
    names = [field.name for field in fields(first) if isinstance(getattr(first, field.name), Tensor)]
    tensors: dict[str, Any] = {name: torch.cat([getattr(result, name) for result in results]) for name in names}
    return replace(
        first,
        hypotheses=join_images([result.hypotheses for result in results]),
        trace=cast(Trace, tuple(join_images(level) for level in zip(*traces, strict=True))),
        **tensors,
    )
