"""What a search finds on its way: beams of hypotheses, the trace of each level, how images lie (all frozen values)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from headtilt.geometry.groups import Group
from headtilt.model.evidence import Evidence, concatenate

SHARED = {"group", "parameters"}  # fields of a trace that all images have in common
_Value = TypeVar("_Value", bound="Beam | Evidence | LevelTrace | LatticeTrace")


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


def root_beam(root: Evidence) -> Beam:
    """Return the beam (B, 1) that holds nothing but the identity."""
    batch = root.logits.shape[0]
    zeros = root.logits.new_zeros(batch, 1)
    return Beam(
        pose=torch.eye(3, dtype=root.logits.dtype, device=root.logits.device).expand(batch, 1, 3, 3),
        evidence=root.reshape(batch, 1),
        confidence=zeros,
        accumulated=zeros,
        active=torch.ones_like(zeros, dtype=torch.bool),
    )


def take(beam: Beam, index: Tensor) -> Beam:
    """Return the hypotheses (B, K′) at `index` of each image's candidates."""
    rows = torch.arange(index.shape[0], device=index.device)[:, None]
    return Beam(
        pose=beam.pose[rows, index],
        evidence=beam.evidence.at(rows, index),
        confidence=beam.confidence[rows, index],
        accumulated=beam.accumulated[rows, index],
        active=beam.active[rows, index],
    )


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
        trace=cast(Trace, tuple(spread_out(level, rows, batch) for level in found.trace)),
        root=whole.root,
        marginal=whole.marginal.index_copy(0, rows, found.marginal),
        near=whole.near.index_copy(0, rows, found.near),
        views=whole.views.index_copy(0, rows, found.views),
        posture=posture,
    )


def spread_out(level: LevelTrace | LatticeTrace, rows: Tensor | None, batch: int) -> LevelTrace | LatticeTrace:
    """Return a trace of `batch` images with this one's at `rows`, or nowhere, and nothing at all others."""
    changes: dict[str, Any] = {}
    for field in fields(level):
        part: Any = getattr(level, field.name)
        if isinstance(part, Tensor) and field.name not in SHARED:
            empty = float("nan") if part.is_floating_point() else False if part.dtype == torch.bool else -1
            whole = part.new_full((batch, *part.shape[1:]), empty)
            changes[field.name] = whole if rows is None else whole.index_copy(0, rows, part)
    return replace(level, **changes)


def map_image_tensors(value: _Value, change: Callable[[Tensor], Tensor], *, shared: bool = False) -> _Value:
    """Return a value with all of its per-image tensors changed, those inside of it included.

    Args:
        value: A beam, a trace or evidence.
        change: From tensor to tensor.
        shared: Whether what all images have in common changes, too.
    """
    changes: dict[str, Any] = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Evidence):
            changes[field.name] = map_image_tensors(part, change, shared=shared)
        elif isinstance(part, Tensor) and (shared or field.name not in SHARED):
            changes[field.name] = change(part)
    return replace(value, **changes)


def join_images(values: Sequence[_Value]) -> _Value:
    """Return one value whose per-image tensors are those of all `values`, one after the other."""
    changes: dict[str, Any] = {}
    for field in fields(values[0]):
        parts = [getattr(value, field.name) for value in values]
        if isinstance(parts[0], Evidence):
            changes[field.name] = concatenate(parts)
        elif isinstance(parts[0], Tensor) and field.name not in SHARED:
            changes[field.name] = torch.cat(parts)
    return replace(values[0], **changes)
