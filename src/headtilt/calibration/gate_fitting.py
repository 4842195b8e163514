"""Fitting a gate: what held-out images tell of answers and poses, and the thresholds that keep a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headtilt.calibration.gate import Gate, Promise, exit_for, margin_for, quantile_for
from headtilt.calibration.head import OrbitHead
from headtilt.calibration.looks import Looks, floats
from headtilt.calibration.proposals import above_chance
from headtilt.calibration.sampler import Orbits
from headtilt.calibration.verdict import TURNED, Judged, Straight, answer_of_views, joined, rows_of, straight, verdict
from headtilt.model.evidence import Calibrator, Evidence, concatenate
from headtilt.search.lattice import covering
from headtilt.search.plan import Plan
from headtilt.search.run import as_it_came, with_bare
from headtilt.search.seen import log_weights, posture, prior_at

# Of which a fit chooses one each; the first where they do equally well.
BARE_WEIGHTS, GUESS_WEIGHTS = (1.0, 0.5, 0.0), (0.0, 0.25, 0.5)
BLOCK = 256  # looks that are judged at a time


@dataclass(frozen=True)
class HeldOut:
    """Images that had no part in a calibrator.

    Attributes:
        calibrator: Fitted without them.
        looks: At them.
        images: How many they are.
    """

    calibrator: Calibrator | None
    looks: Looks
    images: int


@dataclass(frozen=True)
class Weights:
    """How much the bare answer and the guesses of likely poses count beside what a head says of the views.

    Attributes:
        bare: See `with_bare`.
        guess: See `OrbitHead`.
    """

    bare: float = 1.0
    guess: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A margin, for some weights.

    Attributes:
        weights: Under which answers are judged.
        cases: All looks.
        upright: Those at upright images.
        margin: That keeps the promise.
    """

    weights: Weights
    cases: Judged
    upright: Straight
    margin: float

    @property
    def agreement(self) -> float:
        """Share of the tilted images whose gated answer is the one that the model gives to them upright."""
        return float(self.cases.gated(self.margin)[~self.cases.upright].double().mean())


@dataclass(frozen=True)
class GateFitting:
    """How a gate is fitted.

    Attributes:
        plan: The search that it will serve.
        readout: What the search answers with.
        promise: What it must keep.
        early_exit: Whether it may let images go before the search.
        new_head: Whether the calibrator was fitted along with it, and may be told its weights.
    """

    plan: Plan
    readout: str
    promise: Promise
    early_exit: bool
    new_head: bool

    def fit(
        self,
        calibrator: Calibrator | None,
        held_out: Sequence[HeldOut],
        labels: Tensor,
        searched: Straight | None,
    ) -> tuple[Gate, dict[str, Any]]:
        """Return the gate that keeps the promise, and what held-out images tell of it.

        The more the bare answer counts, the smaller the margin may be. A new head is told the weights under which most
        tilted images keep the answer that they have upright.

        Args:
            calibrator: What the search will use.
            held_out: Images, each with a calibrator of the same kind that had no part of them.
            labels: What the bare model says of all images upright.
            searched: What the search made of upright images, where it answers in another way than looks are judged.
        """
        images = sum(part.images for part in held_out)
        judged = [self.judge(part.looks, part.calibrator, labels) for part in held_out]
        tried = [
            candidate(weights, joined([by[weights] for by in judged]), searched, self.promise.upright, images)
            for weights in judged[0]
        ]
        best = max(tried, key=lambda one: one.agreement)
        if isinstance(calibrator, OrbitHead) and self.new_head:
            calibrator.bare_weight.fill_(best.weights.bare)
            calibrator.guess_weight.fill_(best.weights.guess)
        cases, those, margin = best.cases, best.upright, best.margin
        exit_at, turn_at = math.inf, 0.0
        if self.early_exit:
            exit_at = exit_for(cases.trust[~cases.upright], cases.harm(margin)[~cases.upright], self.promise.tilted)
        if bool(those.tilted.isfinite().any()):
            turns = those.turned > TURNED
            turn_at = max(quantile_for(those.for_turning.masked_fill(~turns, -math.inf), self.promise.turned), 0.0)
        gate = Gate(margin, exit_at, turn_at)
        return gate, {
            "gate": {
                "promise_upright": self.promise.upright,
                "promise_tilted": self.promise.tilted,
                "promise_turned": self.promise.turned,
                "held_out": images,
                "bare_weight": best.weights.bare,
                "guess_weight": best.weights.guess,
                "margin": gate.margin,
                "exit_at": gate.exit_at,
                "turn_at": gate.turn_at,
            },
            "verdict": verdict(gate, those, cases),
        }

    def judge(self, looks: Looks, calibrator: Calibrator | None, labels: Tensor) -> dict[Weights, Judged]:
        """Return what a calibrator makes of looks at images that had no part in it, for each choice of weights."""
        parts = {weights: list[Judged]() for weights in self.choices(calibrator)}
        for rows in torch.arange(len(looks.image), device=looks.image.device).split(BLOCK):
            self._judge_some(looks.at(rows), calibrator, labels, parts)
        return {weights: joined(some) for weights, some in parts.items()}

    def choices(self, calibrator: Calibrator | None) -> list[Weights]:
        """Return the weights to choose from; only a new head and a sum over views leave a choice."""
        if not isinstance(calibrator, OrbitHead):
            return [Weights()]
        if not self.new_head or self.readout != "marginal":
            return [Weights(float(calibrator.bare_weight), float(calibrator.guess_weight))]
        guesses = GUESS_WEIGHTS[:1] if calibrator.proposals is None else GUESS_WEIGHTS
        return [Weights(bare, guess) for guess, bare in product(guesses, BARE_WEIGHTS)]

    def _judge_some(
        self, looks: Looks, calibrator: Calibrator | None, labels: Tensor, parts: dict[Weights, list[Judged]]
    ) -> None:
        """Append what a calibrator makes of some looks, for each choice of weights.

        Args:
            looks: At images that had no part in the calibrator.
            calibrator: None for the bare logits.
            labels: What the bare model says of all images upright.
            parts: By weights; appended to.
        """
        seen, truth = looks.orbits, labels[looks.image]
        evidence = floats(seen.evidence)
        bare, around = evidence.at(slice(None), 0), evidence.at(slice(None), slice(1, None))
        first = as_it_came(calibrator, bare).reshape(len(truth), 1)
        said = concatenate([first, around if calibrator is None else calibrator(around)], dim=1)
        tells = said.upright
        trust = torch.full_like(said.logits[:, 0, 0], -math.inf) if tells is None else tells[:, 0, 0]
        guessed = self._guessed(first.at(slice(None), 0), seen)
        for guess in sorted({weights.guess for weights in parts}):
            counts = log_weights(seen.poses) + guess * guessed
            lies = None
            if tells is not None:
                lies = posture(self.plan.levels, seen.coordinates, seen.poses, tells[..., 0] + counts)
            answer = answer_of_views(said, counts, self.readout)
            for weights in (one for one in parts if one.guess == guess):
                pooled = with_bare(answer, bare, lies, weights.bare)
                parts[weights].append(
                    Judged(
                        **vars(straight(bare, first.logits[:, 0], pooled, lies)),
                        trust=trust,
                        right=pooled.argmax(1) == truth,
                        bare_right=bare.labels == truth,
                        upright=seen.upright,
                        exact=seen.exact,
                    )
                )

    def _guessed(self, first: Evidence, seen: Orbits) -> Tensor:
        """Return by how much the proposals think each view (n, V) likelier than chance; 0 where nothing is guessed.

        Args:
            first: What the calibrator says of the images as they came.
            seen: The same images from all views.
        """
        if first.poses is None or self.plan.lattice is None:
            return torch.zeros_like(seen.poses[..., 0, 0])
        _, lattice = covering(self.plan.levels, self.plan.choices, seen.poses)
        return prior_at(above_chance(first.poses), lattice, seen.poses)


def candidate(weights: Weights, cases: Judged, searched: Straight | None, points: float, images: int) -> Candidate:
    """Return the margin for one choice of weights.

    Args:
        weights: That choice.
        cases: All looks, under these weights.
        searched: What the search made of upright images, where it answers in another way than the looks were judged.
        points: The promise.
        images: How many images these are looks at.
    """
    upright: Straight = rows_of(cases, cases.upright) if searched is None else searched
    margin = margin_for(upright.score, upright.cost, points, images)
    return Candidate(weights, cases, upright, margin)
