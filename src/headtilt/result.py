"""What a search returns: beams of hypotheses, the trace of each level, and the result (all frozen)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from headtilt.errors import OptionError, at_least, is_number
from headtilt.geometry import inverse as back
from headtilt.geometry.groups import Group, decompose, invert
from headtilt.geometry.warp import Interpolation, Padding, warp
from headtilt.model.evidence import Evidence
from headtilt.model.evidence import concatenate as join_evidence
from headtilt.model.outputs import two_classes

NEAR = 0.5
SHARED = {"group", "parameters"}  # fields of a trace that all images have in common
_Value = TypeVar("_Value", "Beam", "LevelTrace", "LatticeTrace")


@dataclass(frozen=True)
class Beam:
    """The hypotheses of a batch, best first.

    Attributes:
        pose: (B, K, 3, 3), what has been done to the image so far.
        evidence: Logits (B, K, Y) of the image under that pose.
        confidence: (B, K), as the last level judged it.
        accumulated: (B, K), confidence summed along the trajectory.
        active: (B, K), false where fewer labels than hypotheses were found; such slots hold nothing.
    """

    pose: Tensor
    evidence: Evidence
    confidence: Tensor
    accumulated: Tensor
    active: Tensor

    @property
    def labels(self) -> Tensor:
        """Class of each hypothesis (B, K)."""
        return self.evidence.labels


@dataclass(frozen=True)
class LevelTrace:
    """What one level saw and chose.

    Attributes:
        group: The group of the level.
        parameters: (N,), the parameters sampled along its orbit.
        parents: (B, K, 3, 3), the poses that were expanded.
        active: (B, K), which of them were hypotheses at all.
        confidence: (B, K, N); −inf where the parent was not active.
        energy: (B, K, N), the mean energy; +inf where the parent was not active.
        labels: (B, K, N), the class of every view.
        chosen: (B, K′), the candidates kept, as indices into K·N; −1 where a slot stayed empty.
        temperature: Of the Boltzmann traversal.
    """

    group: Group
    parameters: Tensor
    parents: Tensor
    active: Tensor
    confidence: Tensor
    energy: Tensor
    labels: Tensor
    chosen: Tensor
    temperature: float = 1.0

    @property
    def probabilities(self) -> Tensor:
        """Boltzmann probabilities (B, K, N) of moving from a parent to each candidate: the appendix's Markov chain."""
        return torch.where(self.active[..., None], (self.confidence / self.temperature).softmax(dim=-1), 0.0)

    def poses(self) -> Tensor:
        """Return the poses (B, K, N, 3, 3) of all candidates."""
        steps = self.group.matrix(self.parameters).to(self.parents)
        return steps @ self.parents[:, :, None]


@dataclass(frozen=True)
class LatticeTrace:
    """What a search over the whole group saw.

    Attributes:
        levels: The groups whose product was searched.
        coordinates: (B, V, L), the parameters of each view, level by level.
        poses: (B, V, 3, 3).
        confidence: (B, V).
        energy: (B, V).
        labels: (B, V), the class of every view.
    """

    levels: tuple[Group, ...]
    coordinates: Tensor
    poses: Tensor
    confidence: Tensor
    energy: Tensor
    labels: Tensor


Trace = tuple[LevelTrace, ...] | tuple[LatticeTrace, ...]


@dataclass(frozen=True)
class Posture:
    """How images lie by a head's posterior over the views that were seen.

    Attributes:
        pose: (B, 3, 3), what turns each image upright.
        tilted: (B,), log-odds that the image did not come upright.
        confidence: (B,), how probable it is that the right pose is near this one.
    """

    pose: Tensor
    tilted: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Found:
    """What a walk through the poses found for a batch.

    Attributes:
        beam: The final hypotheses, ranked.
        trace: What was seen on the way.
        root: (B, Y), the calibrated logits of the images as they came.
        marginal: (B, Y), logsumexp of the logits over all views seen.
        near: (B, Y), the same over the views near the identity alone.
        views: (B,), how many views were seen.
        posture: How the images lie; None where no head tells.
    """

    beam: Beam
    trace: Trace
    root: Tensor
    marginal: Tensor
    near: Tensor
    views: Tensor
    posture: Posture | None = None


@dataclass(frozen=True)
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
            return back.points_back(points, self.pose, height, width)
        if boxes is not None:
            return back.boxes_back(boxes, self.pose, height, width, corners=corners)
        return back.masks_back(cast(Tensor, masks), self.pose)

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
                lines.append(f"  rival: {tilt} → {name(rival)}, confidence {float(beam.confidence[index, slot]):.3g}")
        return "\n".join(lines)


def own_shape(logits: Tensor, single: bool) -> Tensor:
    """Return logits in the model's own shape: the two classes of a single logit as one (…, 1)."""
    return logits[..., 1:] - logits[..., :1] if single else logits


def near_identity(poses: Tensor) -> Tensor:
    """Return whether poses (…, 3, 3) move the image little: ‖T − I‖_F ≤ 1/2, a rotation by 20° or so."""
    identity = torch.eye(3, dtype=poses.dtype, device=poses.device)
    return (poses - identity).flatten(-2).norm(dim=-1) <= NEAR


def read_out(found: Found, readout: str) -> tuple[Tensor, Tensor]:
    """Return the logits (B, Y) and the pose (B, 3, 3) that answer for each image.

    The marginal's pose is that of the best hypothesis with the marginal's label, or of the best one where none has it.
    """
    beam = found.beam
    if readout == "incumbent":
        return beam.evidence.logits[:, 0], beam.pose[:, 0]
    agrees = (beam.labels == found.marginal.argmax(1, keepdim=True)) & beam.active
    slot = agrees.float().argmax(1)
    return found.marginal, beam.pose[torch.arange(slot.shape[0], device=slot.device), slot]


def scatter(whole: Found, found: Found, rows: Tensor) -> Found:
    """Return `whole` with the images at `rows` replaced by what was found for them.

    In the trace, which only those images have, all others hold NaN, −1 or False.
    """
    beam = found.beam
    posture = found.posture
    if posture is not None and whole.posture is not None:
        pairs = ((getattr(whole.posture, part.name), getattr(posture, part.name)) for part in fields(posture))
        posture = Posture(*(before.index_copy(0, rows, after) for before, after in pairs))
    changes = {
        name: getattr(whole.beam, name).index_copy(0, rows, getattr(beam, name))
        for name in ("pose", "confidence", "accumulated", "active")
    }
    logits = whole.beam.evidence.logits.index_copy(0, rows, beam.evidence.logits)
    batch = len(whole.views)
    return Found(
        beam=replace(whole.beam, evidence=Evidence(logits), **changes),
        trace=cast(Trace, tuple(_spread_out(level, rows, batch) for level in found.trace)),
        root=whole.root,
        marginal=whole.marginal.index_copy(0, rows, found.marginal),
        near=whole.near.index_copy(0, rows, found.near),
        views=whole.views.index_copy(0, rows, found.views),
        posture=posture,
    )


def _spread_out(level: LevelTrace | LatticeTrace, rows: Tensor | None, batch: int) -> LevelTrace | LatticeTrace:
    """Return a trace of `batch` images with this one's at `rows`, or nowhere, and nothing at all others."""
    changes: dict[str, Any] = {}
    for field in fields(level):
        part: Any = getattr(level, field.name)
        if isinstance(part, Tensor) and field.name not in SHARED:
            empty = float("nan") if part.is_floating_point() else False if part.dtype == torch.bool else -1
            whole = part.new_full((batch, *part.shape[1:]), empty)
            changes[field.name] = whole if rows is None else whole.index_copy(0, rows, part)
    return replace(level, **changes)


def concatenate(results: Sequence[SearchResult]) -> SearchResult:
    """Return the results of consecutive parts of a batch as one."""
    if len(results) == 1:
        return results[0]
    first = results[0]
    known = next((result.trace for result in results if result.trace), ())
    traces = [result.trace or [_spread_out(level, None, len(result)) for level in known] for result in results]
    return replace(
        first,
        logits=torch.cat([result.logits for result in results]),
        pose=torch.cat([result.pose for result in results]),
        views=torch.cat([result.views for result in results]),
        bare=torch.cat([result.bare for result in results]),
        gated=torch.cat([result.gated for result in results]),
        pose_confidence=torch.cat([result.pose_confidence for result in results]),
        images=torch.cat([result.images for result in results]),
        hypotheses=_stack([result.hypotheses for result in results]),
        trace=cast(Trace, tuple(_stack(level) for level in zip(*traces, strict=True))),
    )


def _stack(values: Sequence[_Value]) -> _Value:
    """Return one frozen value whose per-image tensors are those of all `values`, one after the other."""
    changes: dict[str, Any] = {}
    for field in fields(values[0]):
        parts = [getattr(value, field.name) for value in values]
        if isinstance(parts[0], Evidence):
            changes[field.name] = join_evidence(parts)
        elif isinstance(parts[0], Tensor) and field.name not in SHARED:
            changes[field.name] = torch.cat(parts)
    return replace(values[0], **changes)
