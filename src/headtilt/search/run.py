"""One run: leave early, search, read out, gate. Search, exported graph and fit all go through it.

::

    bare look ─► leave early? ─► plan.search over views ─► read out ─► gate ─► Answer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from headtilt.errors import HeadtiltError, OptionError
from headtilt.geometry.warp import Interpolation, Padding
from headtilt.model.chunking import out_of_memory
from headtilt.model.evidence import Calibrator, Evaluate, Evidence, floored
from headtilt.model.predictor import Predictor
from headtilt.model.views import Scored, Views, only
from headtilt.search.found import Found, Posture
from headtilt.search.plan import Plan, settled

Readout = Literal["incumbent", "marginal"]
# Logits and features kept at once while one block of images is searched: bounds memory whatever the size of the batch.
# A search is some hundred small operations besides the model; a GPU, which starts each in ten microseconds and does it
# in one, wants blocks that are worth it.
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
BLOCK_CHUNKS = 64  # whoever asks for small chunks has little memory: no more of them than this make a block


class Judge(Protocol):
    """A gate, seen from here: who needs no search, and whose bare answer stays after it."""

    def leaves_early(self, root: Evidence) -> Tensor:
        """Return which images (B,) need no search."""

    def keeps(self, bare: Evidence, found: Found, answer: Tensor) -> Tensor:
        """Return for which images (B,) the bare answer stays."""


@dataclass(frozen=True)
class Answer:
    """What is answered for each image.

    Attributes:
        logits: (B, Y).
        pose: (B, 3, 3); the identity where an image stays as it came.
        kept: (B,), whether the bare answer stays.
        confidence: (B,), of the pose; NaN where no head tells.
        found: What the search found on its way.
    """

    logits: Tensor
    pose: Tensor
    kept: Tensor
    confidence: Tensor
    found: Found


def run(
    bare: Evidence,
    evaluate: Evaluate,
    plan: Plan,
    *,
    calibrator: Calibrator | None = None,
    gate: Judge | None = None,
    readout: Readout = "incumbent",
    branching: bool = True,
) -> Answer:
    """Return the answer and the pose of each image of a batch.

    Args:
        bare: What the bare model says of the images (B, …) as they came.
        evaluate: What it says of views of them.
        plan: Which views to look at.
        calibrator: From what the model says to evidence that compares across poses; None leaves it as it is.
        gate: Which bare answers stay; None lets the search have its way. Labels and poses are judged each by itself.
        readout: See `ITS`.
        branching: Whether images that leave early are spared the search. A fixed graph cannot: there it is done for
            all, and thrown away.
    """
    root = as_it_came(calibrator, bare)
    scored = evaluate if calibrator is None else Scored(evaluate, calibrator)
    early = torch.zeros_like(bare.labels, dtype=torch.bool) if gate is None else gate.leaves_early(root)
    some_leave = branching and bool(early.any())
    found = _searched(scored, plan, root, ~early) if some_leave else plan.search(scored, root)
    return decide(bare, found, gate, readout, early, getattr(calibrator, "bare_weight", 1.0))


def _searched(evaluate: Evaluate, plan: Plan, root: Evidence, wanted: Tensor) -> Found:
    """Return what the search finds for the images that are wanted (B,); for the others, that they are upright."""
    left = wanted.nonzero()[:, 0]
    found = plan.search(only(evaluate, left), root.at(left)) if len(left) else None
    return settled(root, found, left, plan.hypotheses)


def decide(
    bare: Evidence, found: Found, gate: Judge | None, readout: str, early: Tensor, bare_weight: Tensor | float = 1.0
) -> Answer:
    """Return the answer and the pose of each image after the gate, which judges each by itself.

    Args:
        bare: What the bare model says of the images as they came.
        found: What the search found.
        gate: None lets the search have its way.
        readout: See `ITS`.
        early: (B,), which images left before the search.
        bare_weight: See `with_bare`.
    """
    answer, pose = read_out(found, readout)
    answer = with_bare(answer, bare, found.posture, bare_weight)
    kept = early if gate is None else early | gate.keeps(bare, found, answer)
    posture = found.posture
    if posture is None:
        turned, confidence = ~kept, torch.full_like(found.marginal[:, 0], float("nan"))
    else:
        pose, confidence = posture.pose, posture.confidence
        turns = getattr(gate, "turns", None)  # a gate of one's own may leave poses alone
        turned = (posture.tilted > 0 if turns is None else turns(bare, found, answer)) & ~early
    identity = torch.eye(3, dtype=pose.dtype, device=pose.device)
    return Answer(
        logits=torch.where(kept[:, None], bare.logits.to(answer), answer),
        pose=torch.where(turned[:, None, None], pose, identity),
        kept=kept,
        confidence=confidence,
        found=found,
    )


def read_out(found: Found, readout: str) -> tuple[Tensor, Tensor]:
    """Return the logits (B, Y) and the pose (B, 3, 3) that answer for each image.

    The marginal's pose is that of the best hypothesis with the marginal's label, or of the best one where none has it.
    """
    beam = found.beam
    if readout == "incumbent":
        return beam.evidence.logits[:, 0], beam.pose[:, 0]
    agrees = (beam.evidence.labels == found.marginal.argmax(1, keepdim=True)) & beam.active
    slot = agrees.float().argmax(1)
    return found.marginal, beam.pose[torch.arange(slot.shape[0], device=slot.device), slot]


def with_bare(answer: Tensor, bare: Evidence, posture: Posture | None, bare_weight: Tensor | float = 1.0) -> Tensor:
    """Return logits (B, Y) in which the bare answer counts, as far as the image seems to have come upright.

    The head was fitted to say what the bare model says upright. Of an image that is upright the bare model says it
    itself, and without the head's mistakes. So the answer is the geometric mean of both distributions, in which the
    bare one counts by how probable it is that the image came upright.

    Args:
        answer: (B, Y), what the search would answer.
        bare: What the bare model says of the images as they came.
        posture: How the images lie; None, where no head tells, leaves the answer as it is.
        bare_weight: How much the bare answer counts beside the other where the image is surely upright. A head that was
            fitted on many images needs little of it.
    """
    if posture is None:
        return answer
    share = bare_weight * (-posture.tilted).sigmoid()[:, None].to(answer)
    return (answer + share * floored(bare.log_probs).to(answer)) / (1 + share)


def as_it_came(calibrator: Calibrator | None, bare: Evidence) -> Evidence:
    """Return the calibrated evidence of images as they came; a head has a word of its own for these."""
    if calibrator is None:
        return bare
    try:
        root: Evidence = getattr(calibrator, "as_it_came", calibrator)(bare)
    except RuntimeError as error:
        # What was fitted meets a model that it was not fitted for; functions of others speak for themselves.
        ours = type(calibrator).__module__.startswith("headtilt.")
        if not ours or isinstance(error, HeadtiltError) or out_of_memory(error):
            raise
        raise OptionError(
            f"{type(calibrator).__name__} was fitted for another model: {error}. "
            "Fit again, or load the bundle of this model."
        ) from error
    if root.logits.shape != bare.logits.shape:
        got, wanted = tuple(root.logits.shape), tuple(bare.logits.shape)
        raise OptionError(f"calibrator must return logits {wanted}, as the model does; got {got}.")
    return root


@dataclass(frozen=True)
class Searcher:
    """Everything that a search needs but the images; see `ITS` for what each part means."""

    predictor: Predictor
    plan: Plan
    calibrator: Calibrator | None
    gate: Judge | None
    readout: Readout
    padding: Padding
    interpolation: Interpolation

    def blocks(self, images: Tensor, bare: Evidence) -> Iterator[tuple[slice, Answer]]:
        """Yield rows and their answers, of the arguments of `answer`, for all images."""
        for rows in self.rows(images, bare):
            yield rows, self.answer(images, bare, rows)

    def answer(self, images: Tensor, bare: Evidence, rows: slice) -> Answer:
        """Return what is answered for some images.

        Args:
            images: (B, C, H, W), on the model's device.
            bare: What the bare model says of them.
            rows: Which of them.
        """
        some = images[rows]
        return run(
            bare if len(some) == len(images) else bare.at(rows),
            Views(self.predictor, some, self.padding, self.interpolation),
            self.plan,
            calibrator=self.calibrator,
            gate=self.gate,
            readout=self.readout,
        )

    def rows(self, images: Tensor, bare: Evidence) -> list[slice]:
        """Return which images (B, C, H, W) to search at once: as many at a time as memory should hold."""
        width = bare.logits.shape[-1] + (0 if bare.features is None else bare.features.shape[-1])
        size = BLOCK_ELEMENTS.get(images.device.type, BLOCK_ELEMENTS["cpu"]) // (self.plan.budget * width)
        if self.predictor.chunk is not None:
            size = min(size, BLOCK_CHUNKS * self.predictor.chunk // self.plan.budget)
        size = max(size, 1)
        return [slice(start, start + size) for start in range(0, len(images), size)]
