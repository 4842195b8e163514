"""A batch, searched a block at a time: bounded memory, images that leave early, answers that the gate keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headtilt.calibration.balance import Balance, Calibrator, as_it_came, fit_balance
from headtilt.calibration.gate import CautiousGate, Gate
from headtilt.calibration.sampler import default_views
from headtilt.errors import OptionError
from headtilt.geometry.warp import Interpolation, Padding
from headtilt.model.chunking import kind_of
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor, Views
from headtilt.result import Found, SearchResult, own_shape, read_out
from headtilt.search.joint import lattice, matrices
from headtilt.search.plan import Plan, settled

# Logits and features kept at once while one block of images is searched: bounds memory whatever the size of the batch.
# A search is some hundred small operations besides the model; a GPU, which starts each in ten microseconds and does it
# in one, wants blocks that are worth it.
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
BLOCK_CHUNKS = 64  # whoever asks for small chunks has little memory: no more of them than this make a block
BATCH_BALANCE = 1000  # images, at most, by which a batch balances itself


@dataclass(frozen=True)
class Decided:
    """What is answered.

    Attributes:
        logits: (B, Y).
        pose: (B, 3, 3); the identity where an image stays as it came.
        kept: (B,), whether the bare answer stays.
        confidence: (B,), of the pose; NaN where no head tells.
    """

    logits: Tensor
    pose: Tensor
    kept: Tensor
    confidence: Tensor


def decide(
    bare: Evidence, found: Found, gate: Gate | CautiousGate | None, readout: str, early: Tensor | None = None
) -> Decided:
    """Return the answer and the pose of each image, after the gate, which judges each by itself.

    Args:
        bare: What the bare model says of the images as they came.
        found: What the search found.
        gate: None lets the search have its way.
        readout: See `ITS`.
        early: (B,), which images left before the search.
    """
    answer, pose = read_out(found, readout)
    kept = torch.zeros_like(bare.labels, dtype=torch.bool) if early is None else early
    if gate is not None:
        kept = kept | gate.keeps(bare, found, answer)
    posture = found.posture
    if posture is None:
        turned, confidence = ~kept, torch.full_like(found.marginal[:, 0], float("nan"))
    else:
        pose, confidence = posture.pose, posture.confidence
        turned = posture.tilted > 0 if gate is None else gate.turns(posture.tilted)
        turned = turned if early is None else turned & ~early
    identity = torch.eye(3, dtype=pose.dtype, device=pose.device)
    logits = torch.where(kept[:, None], bare.logits.to(answer), answer)
    return Decided(logits, torch.where(turned[:, None, None], pose, identity), kept, confidence)


@dataclass(frozen=True)
class Searcher:
    """Everything that a search needs but the images; see `ITS` for what each part means."""

    predictor: Predictor
    plan: Plan
    calibrator: Calibrator | Literal["batch"] | None
    gate: Gate | CautiousGate | None
    readout: Literal["incumbent", "marginal"]
    padding: Padding
    interpolation: Interpolation

    @torch.no_grad()
    def blocks(self, images: Tensor) -> Iterator[SearchResult]:
        """Yield what the search finds in images (B, C, H, W), for as many at a time as memory should hold."""
        device, _ = self.predictor.device_and_dtype(images)
        images = images.to(device)
        with self.predictor.borrowed():
            bare = self.predictor(images)
            calibrator = self.batch_balance(images) if self.calibrator == "batch" else self.calibrator
            size = self.block_size(bare, device)
            for start in range(0, len(images), size):
                part = slice(start, start + size)
                yield self.block(images[part], bare.at(part), calibrator)

    def block_size(self, bare: Evidence, device: torch.device) -> int:
        """Return how many images to search at once."""
        width = bare.logits.shape[-1] + (0 if bare.features is None else bare.features.shape[-1])
        size = BLOCK_ELEMENTS[kind_of(device)] // (self.plan.budget * width)
        if self.predictor.chunk is not None:
            size = min(size, BLOCK_CHUNKS * self.predictor.chunk // self.plan.budget)
        return max(size, 1)

    def block(self, images: Tensor, bare: Evidence, calibrator: Calibrator | None) -> SearchResult:
        """Return what the search finds in one block of images, of which the bare model has said its word."""
        found, early = self.find(images, bare, calibrator)
        decided = decide(bare, found, self.gate, self.readout, early)
        single = self.predictor.single_logit
        return SearchResult(
            logits=own_shape(decided.logits, single),
            pose=decided.pose,
            views=found.views,
            hypotheses=found.beam,
            trace=found.trace,
            bare=own_shape(bare.logits, single),
            gated=decided.kept,
            pose_confidence=decided.confidence,
            images=images,
            padding=self.padding,
            interpolation=self.interpolation,
            multilabel=self.plan.confidence == "multilabel",
        )

    def find(self, images: Tensor, bare: Evidence, calibrator: Calibrator | None) -> tuple[Found, Tensor]:
        """Return what the search finds, and which images (B,) the gate let go before it."""
        root = as_it_came(calibrator, bare)
        if root.logits.shape != bare.logits.shape:
            got, wanted = tuple(root.logits.shape), tuple(bare.logits.shape)
            raise OptionError(f"calibrator must return logits {wanted}, as the model does; got {got}.")
        early = torch.zeros_like(bare.labels, dtype=torch.bool) if self.gate is None else self.gate.leaves_early(root)
        left = (~early).nonzero()[:, 0]
        found = None
        if len(left):
            views = Views(self.predictor, images, self.padding, self.interpolation, calibrator)
            found = self.plan.search(views.of(left), root.at(left))
        if found is None or len(left) < len(images):
            found = settled(root, found, left, self.plan.hypotheses)
        return found, early

    def batch_balance(self, images: Tensor) -> Balance:
        """Return the balance under which all classes win equally often over the orbits of this very batch."""
        points = lattice(self.plan.levels, default_views(self.plan.levels))
        poses = matrices(self.plan.levels, points.to(images))
        # Evenly from the whole batch, which may have come sorted by class.
        some = images[torch.linspace(0, len(images) - 1, min(len(images), BATCH_BALANCE)).long().to(images.device)]
        seen = self.predictor.all_views(some, poses, padding=self.padding, interpolation=self.interpolation)
        orbits = seen.logits.reshape(len(some), len(poses), -1)
        pooled = orbits.amax(1) if self.readout == "incumbent" else orbits.logsumexp(1)
        return fit_balance(pooled, torch.full_like(pooled[0], 1 / pooled.shape[1]))
