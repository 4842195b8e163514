"""Setting a gate from held-out upright images and a promise, without a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headtilt.calibrate import Calibrator
from headtilt.evidence import Evaluate, Evidence, concatenate
from headtilt.gate import (
    Detector,
    Gate,
    Promise,
    exit_for,
    fit_detector,
    fit_weights,
    margin_for,
    statistics,
    tail_for,
)
from headtilt.looks import CORNERS, Looks
from headtilt.result import Found
from headtilt.search.joint import Joint
from headtilt.search.plan import Plan
from headtilt.temperature import fit_temperature

DETECTOR_IMAGES = 8192
# Share of a promise that is spent on the held-out images: those to come may be harder. Chosen on validation images that
# had no part in the fit, on some of which gates that spent all of it cost more than was promised.
SPENT = 1 / 2
# Of upright images with more evidence against their answer than the margin, one in `OVER` or so loses it. The more
# there are beyond `SOME`, the more what they cost tells, and the less how they are distributed.
OVER, SOME = 4, 50
ENOUGH = 200  # upright images by which a gate is set: fewer are also searched shifted
GATE_TILTS = 600  # tilted images by which a gate is set: of few held-out images it looks at more tilts


@dataclass(frozen=True)
class Case:
    """Held-out images and what the search makes of them.

    Attributes:
        images: (n, C, H, W), as the model sees them.
        bare: What the bare model says of them.
        root: (n, Y), their calibrated logits.
        found: What the search found.
    """

    images: Tensor
    bare: Evidence
    root: Tensor
    found: Found

    @property
    def winner(self) -> Tensor:
        """The search's answer (n,)."""
        return self.found.marginal.argmax(1)

    def decided(self, truth: Tensor) -> Tensor:
        """Return for which images (n,) either the search or the bare model is right, and not both."""
        return (self.winner != self.bare.labels) & ((self.winner == truth) != (self.bare.labels == truth))

    def cost(self, belief: Tensor) -> Tensor:
        """Return (n,) what the search's answer in place of the bare one costs by what is believed (n, Y)."""
        bare, winner = (belief.gather(1, labels[:, None])[:, 0] for labels in (self.bare.labels, self.winner))
        return bare - winner

    def harm(self, kept: Tensor, truth: Tensor) -> Tensor:
        """Return (n,) 1 where the bare answer would lose what the gated search has, −1 where it would save it."""
        gated = torch.where(kept, self.bare.labels, self.winner)
        return (gated == truth).long() - (self.bare.labels == truth).long()

    def answers(self, kept: Tensor) -> Tensor:
        """Return the logits (n, Y) after the gate."""
        return torch.where(kept[:, None], self.bare.logits, self.found.marginal)


@dataclass(frozen=True)
class GateFitter:
    """How to set a gate.

    Attributes:
        looks: How images are looked at.
        plan: The search that the gate will serve.
        calibrator: What the search is calibrated with; None for the bare logits.
        promise: What the gate must keep.
        early_exit: Whether images may go before the search.
        readout: What the search answers with.
        seed: Seeds tilts and the detector.
    """

    looks: Looks
    plan: Plan
    calibrator: Calibrator | None
    promise: Promise
    early_exit: bool = True
    readout: Literal["incumbent", "marginal"] = "marginal"
    seed: int = 0

    def fit(
        self, images: Tensor, upright: Evidence, targets: Tensor, train: Tensor, held_out: Tensor
    ) -> tuple[Gate, dict[str, Any]]:
        """Return the gate, and a report of what it expects to cost.

        Args:
            images: (n, C, H, W), upright.
            upright: What the bare model says of them.
            targets: (n,), its answers, which stand for the truth.
            train: Indices of the images that the calibrator was fitted on: the detector learns from them.
            held_out: Indices of those that set the thresholds.
        """
        truth = targets[held_out]
        straight, tilted = self._straight(images, upright, held_out), self._tilted(images, held_out)
        cases = [*straight, *tilted]
        detector = self._detector(images, upright, targets, train[:DETECTOR_IMAGES])
        against = [statistics(case.bare, case.root, case.found, detector) for case in cases]
        decided = [case.decided(truth) for case in cases]
        weights = fit_weights(
            torch.cat([rows[use] for rows, use in zip(against, decided, strict=True)]),
            torch.cat([(case.winner == truth)[use] for case, use in zip(cases, decided, strict=True)]),
        )
        belief = self.looks.second_opinion(images[held_out.cpu()])
        cost = torch.cat([case.cost(belief) for case in straight])
        margin = self._margin(torch.cat(against[: len(straight)]) @ weights, cost, len(held_out))
        kept = [rows @ weights < margin for rows in against]
        exit_at = glance_at = None
        if self.early_exit:
            kept_tilted = kept[len(straight) :]
            harm = torch.cat([case.harm(keep, truth) for case, keep in zip(tilted, kept_tilted, strict=True)])
            exit_at, glance_at = self._exits(tilted, harm, detector, weights)
        gate = Gate(margin, weights, exit_at, detector, glance_at)
        temperature = None
        if self.readout == "marginal":
            answers = torch.cat([case.answers(keep) for case, keep in zip(cases, kept, strict=True)])
            temperature = fit_temperature(answers, truth.repeat(len(cases)))
        return gate, {
            "temperature": temperature,
            "promise_upright": self.promise.upright,
            "promise_tilted": self.promise.tilted,
            "held_out": len(held_out),
            "margin": margin,
            "weights": weights.tolist(),
            "exit_at": exit_at,
            "glance_at": glance_at,
            "upright_answers_changed": float((~kept[0] & (cases[0].winner != truth)).float().mean()) * 100,
            "upright_leave_early": float(gate.leaves_early(cases[0].bare).float().mean()) * 100,
        }

    def _margin(self, evidence_against: Tensor, cost: Tensor, count: int) -> float:
        """Return the margin that the promise asks for: by what upright images cost, and by how few of them there are.

        Args:
            evidence_against: (n,), of the upright held-out images.
            cost: (n,), what a change of their answers costs.
            count: How many images there are: n, less what is the same image shifted.
        """
        points = SPENT * self.promise.upright
        # A few hundred images may show no loss at all where a few in a hundred others would.
        share = points / 100 * OVER * max(1, count / SOME)
        return max(margin_for(evidence_against, cost, points), tail_for(evidence_against, share))

    def _straight(self, images: Tensor, upright: Evidence, held_out: Tensor) -> list[Case]:
        """Return the held-out images searched as they are, and where they are few also moved a little.

        A classifier is surer of the very images that it was trained on than of those to come.
        """
        chosen = images[held_out.cpu()]
        more = min(max(ENOUGH // len(held_out) - 1, 0), len(CORNERS))
        batches = [self.looks.shifted(chosen, corner) for corner in range(more)]
        return [
            self._case(self.looks.cropped(chosen), upright.at(held_out)),
            *(self._case(batch, self.looks.predictor(batch)) for batch in batches),
        ]

    def _tilted(self, images: Tensor, held_out: Tensor) -> list[Case]:
        """Return the held-out images searched under some tilts."""
        tilts = max(2, math.ceil(GATE_TILTS / len(held_out)))
        batches = [self.looks.tilted(images, held_out, hash((self.seed, 1, number))) for number in range(tilts)]
        return [self._case(batch, self.looks.predictor(batch)) for batch in batches]

    def _case(self, images: Tensor, bare: Evidence) -> Case:
        return Case(images, bare, *self.looks.search(images, bare, self.calibrator, self.plan.search))

    def _exits(
        self,
        tilted: Sequence[Case],
        harm: Tensor,
        detector: Detector,
        weights: Tensor,
    ) -> tuple[float, float | None]:
        """Return the scores at which tilted images may leave after one view and after a glance.

        Args:
            tilted: Searched images.
            harm: (n,), what leaving before the search would lose (1), keep from being lost (−1), or neither.
            detector: What scores the images as they came.
            weights: How evidence against the bare answer is weighed.
        """
        points = self.promise.tilted
        trust = torch.cat([detector(case.bare) for case in tilted])
        if not isinstance(self.plan, Joint):
            return exit_for(trust, harm, points), None
        # Half of what may be lost is for the glance, which decides about the images that are still there.
        exit_at = exit_for(trust, harm, points / 2)
        plan = self.plan

        def glance(evaluate: Evaluate, root: Evidence) -> Found:
            return plan.judged(plan.glance(evaluate, root))

        glanced = [
            statistics(case.bare, *self.looks.search(case.images, case.bare, self.calibrator, glance), detector)
            for case in tilted
        ]
        still_there = torch.where(trust >= exit_at, 0, harm)
        return exit_at, -exit_for(-torch.cat(glanced) @ weights, still_there, points / 2)

    def _detector(self, images: Tensor, upright: Evidence, targets: Tensor, train: Tensor) -> Detector:
        """Return a detector trained on those images, each upright and under two tilts."""
        tilts = [self.looks.tilted(images, train, hash((self.seed, 2, number))) for number in range(2)]
        roots = [upright.at(train), *(self.looks.predictor(batch) for batch in tilts)]
        right = torch.cat([root.labels == targets[train] for root in roots])
        return fit_detector(concatenate(roots), right, seed=self.seed)
