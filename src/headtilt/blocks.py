"""A batch, searched a block at a time: bounded memory, images that leave early, answers that the gate keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from headtilt.calibrate import Balance, Calibrator, fit_balance, fitted_for_it
from headtilt.errors import OptionError
from headtilt.evidence import Evidence
from headtilt.gate import CautiousGate, Gate
from headtilt.looks import default_views
from headtilt.pace import kind_of
from headtilt.predictor import Predictor, Views
from headtilt.result import SearchResult, own_shape, read_out
from headtilt.search.joint import Joint, Seen, lattice, matrices
from headtilt.search.plan import Plan, settled
from headtilt.warp import Interpolation, Padding

# Logits and features kept at once while one block of images is searched: bounds memory whatever the size of the batch.
# A search is some hundred small operations besides the model; a GPU, which starts each in ten microseconds and does it
# in one, wants blocks that are worth it.
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
BLOCK_CHUNKS = 64  # whoever asks for small chunks has little memory: no more of them than this make a block
BATCH_BALANCE = 1000  # images, at most, by which a batch balances itself


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
    temperature: float = 1.0

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
        with fitted_for_it(calibrator):
            root = bare if calibrator is None else calibrator(bare)
        if root.logits.shape != bare.logits.shape:
            got, wanted = tuple(root.logits.shape), tuple(bare.logits.shape)
            raise OptionError(f"calibrator must return logits {wanted}, as the model does; got {got}.")
        views = Views(self.predictor, images, self.padding, self.interpolation, calibrator)
        left, seen, looked = self._still_open(views, bare, root)
        found = None
        if len(left):
            some, rest = views.of(left), root.at(left)
            found = self.plan.search(some, rest) if seen is None else cast(Joint, self.plan).search(some, rest, seen)
        if found is None or len(left) < len(images):
            found = settled(root, found, left, self.plan.hypotheses, looked)
        kept = torch.ones_like(bare.labels, dtype=torch.bool).index_fill(0, left, False)
        if self.gate is not None:
            with fitted_for_it(self.gate):
                kept = kept | self.gate.keeps(bare, root.logits, found)
        logits, pose = read_out(found, self.readout)
        identity = torch.eye(3, dtype=pose.dtype, device=pose.device)
        single = self.predictor.single_logit
        return SearchResult(
            logits=own_shape(torch.where(kept[:, None], bare.logits, logits), single),
            pose=torch.where(kept[:, None, None], identity, pose),
            views=found.views,
            hypotheses=found.beam,
            trace=found.trace,
            bare=own_shape(bare.logits, single),
            gated=kept,
            images=images,
            padding=self.padding,
            interpolation=self.interpolation,
            multilabel=self.plan.confidence == "multilabel",
            temperature=self.temperature,
        )

    def _still_open(self, views: Views, bare: Evidence, root: Evidence) -> tuple[Tensor, Seen | None, Tensor]:
        """Return which images the gate does not let go early, what a glance saw of them, and views shown (B,)."""
        looked, gate = torch.ones_like(bare.labels), self.gate
        if gate is None:
            return torch.arange(len(looked), device=looked.device), None, looked
        with fitted_for_it(gate):
            left = (~gate.leaves_early(bare)).nonzero()[:, 0]
        if not (isinstance(gate, Gate) and gate.glance_at is not None and isinstance(self.plan, Joint) and len(left)):
            return left, None, looked
        seen = self.plan.glance(views.of(left), root.at(left))
        with fitted_for_it(gate):
            sure = gate.leaves_at_a_glance(bare.at(left), root.logits[left], self.plan.judged(seen))
        looked[left] = seen.poses.shape[1]
        return left[~sure], seen.at(~sure), looked

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
