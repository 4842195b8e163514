"""Fitting a calibrator and a gate from unlabelled upright images; the classifier stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headtilt.calibrate import Calibrator, fit_balance, fit_map, upright_prior
from headtilt.distances import fit_neighbours, fit_prototypes
from headtilt.errors import DataError, HeadtiltError, OptionError, ShapeError, at_least, checked_seed, one_of
from headtilt.evidence import Evaluate, Evidence, concatenate
from headtilt.gate import Detector, Gate, Promise, exit_for, fit_detector, fit_weights, margin_for, statistics
from headtilt.groups import FiniteGroup, Group, invert
from headtilt.head import HeadRecipe, fit_head
from headtilt.predictor import Predictor, Views
from headtilt.result import Found
from headtilt.search.joint import Joint, lattice, matrices, spread
from headtilt.temperature import fit_temperature
from headtilt.warp import Interpolation, Padding, check_images, warp

Method = Literal["head", "balance", "bias", "prototypes", "neighbours", "keep"]
METHODS = ("head", "balance", "bias", "prototypes", "neighbours", "keep")
FEWEST_FOR_HEAD = 100
FEWEST = 8
BALANCE_IMAGES = 2000
HELD_OUT_IMAGES = 2000
DETECTOR_IMAGES = 8192
SHIFT = 1 / 32  # of the side: what a classifier should not mind
GATE_TILTS = 600  # tilted images by which a gate is set: of few held-out images it looks at more tilts
NEARNESS = 0.35  # distance ‖T − I‖ of a view from upright at which it counts half as much or so: a turn by 15°


class Plan(Protocol):
    """A way through the poses: `Tree`, `Joint` or `Anneal`."""

    @property
    def levels(self) -> tuple[Group, ...]:
        """The groups that are searched."""

    def search(self, evaluate: Evaluate, root: Evidence) -> Found:
        """Return what the search finds."""


@dataclass(frozen=True)
class Fitted:
    """What a fit gives.

    Attributes:
        calibrator: From evidence to calibrated evidence; None for the bare logits.
        gate: None where no promise was asked for.
        report: What was fitted, on how many images, and what the gate expects to cost.
    """

    calibrator: Calibrator | None
    gate: Gate | None
    report: dict[str, Any] = field(default_factory=dict)


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

    def harm(self, kept: Tensor, truth: Tensor) -> Tensor:
        """Return (n,) 1 where the bare answer would lose what the gated search has, −1 where it would save it."""
        gated = torch.where(kept, self.bare.labels, self.winner)
        return (gated == truth).long() - (self.bare.labels == truth).long()

    def answers(self, kept: Tensor) -> Tensor:
        """Return the logits (n, Y) after the gate."""
        return torch.where(kept[:, None], self.bare.logits, self.found.marginal)


@dataclass(frozen=True)
class Fitter:
    """How to fit.

    Attributes:
        predictor: The model, with features tapped where the method needs them.
        plan: The search that the calibrator and the gate will serve.
        padding: See `warp`.
        interpolation: See `warp`.
        method: "head", "balance", "bias", "prototypes", "neighbours", or "keep" to fit a gate for `calibrator` alone.
        calibrator: The calibrator to keep; None is the bare logits.
        recipe: How a head is trained.
        readout: What the search will answer with; the balance is fitted to the same.
        views: Views per orbit in fitting; None takes `default_views`.
        promise: What the gate must keep; None fits no gate.
        early_exit: Whether the gate may let images go before the search.
        crop: Side of the centre square that the model sees, where fit images are larger: tilts then leave no corners.
        seed: Seeds everything random.
        progress: Called with (stage, done, total).
    """

    predictor: Predictor
    plan: Plan
    padding: Padding = "zeros"
    interpolation: Interpolation = "bilinear"
    method: Method = "head"
    calibrator: Calibrator | None = None
    recipe: HeadRecipe = field(default_factory=HeadRecipe)
    readout: Literal["incumbent", "marginal"] = "marginal"
    views: int | None = None
    promise: Promise | None = field(default_factory=Promise)
    early_exit: bool = True
    crop: int | None = None
    seed: int = 0
    progress: Callable[[str, int, int], None] | None = None

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        if not isinstance(self.recipe, HeadRecipe):
            raise OptionError(f"recipe must be a HeadRecipe or None; got {self.recipe!r}.")
        object.__setattr__(self, "seed", checked_seed(self.seed))
        for name in ("views", "crop"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least(name, getattr(self, name), 1))

    def fit(self, source: Tensor | Iterable[Any], held_out_source: Tensor | Iterable[Any] | None = None) -> Fitted:
        """Return calibrator and gate fitted on upright images (n, C, H, W) or a loader of such batches.

        Args:
            source: Images to fit on.
            held_out_source: Images for early stopping and the gate; None sets a fifth of `source` aside.
        """
        images = gather(source)
        others = None if held_out_source is None else gather(held_out_source)
        train, held_out = _halves(len(images), None if others is None else len(others), self.seed)
        if others is not None:
            if others.shape[1:] != images.shape[1:]:
                raise ShapeError(
                    f"held-out images must be of the size of the others, {tuple(images.shape[1:])}; "
                    f"got {tuple(others.shape[1:])}. Nothing was fitted."
                )
            images = torch.cat([images, others.to(images)])
        upright = self._look(images, None)
        targets, classes = upright.labels, upright.logits.shape[-1]
        if int(targets.unique().numel()) < 2:
            raise DataError("fit images must show at least two classes by the model's own judgement; they show one.")
        train, held_out = train.to(targets.device), held_out.to(targets.device)
        calibrator, kind = self._calibrator(images, upright, targets, train, held_out, classes)
        report: dict[str, Any] = {"method": kind, "images": len(images), "seed": self.seed}
        gate = None
        if self.promise is not None:
            gate, expected = self._gate(images, upright, targets, train, held_out, calibrator, self.promise)
            temperature = expected.pop("temperature")
            report |= {"gate": expected} | ({} if temperature is None else {"temperature": temperature})
        return Fitted(calibrator, gate, report)

    def _calibrator(
        self, images: Tensor, upright: Evidence, targets: Tensor, train: Tensor, held_out: Tensor, classes: int
    ) -> tuple[Calibrator | None, str]:
        if self.method == "keep":
            return self.calibrator, "keep"
        if self.method in ("prototypes", "neighbours"):
            # Not the held-out images: each would be its own nearest neighbour, and the gate is set by them.
            distances = fit_prototypes if self.method == "prototypes" else fit_neighbours
            return distances(upright.at(train), targets[train]), self.method
        some = train[: max(BALANCE_IMAGES, 100 * classes)]
        orbits = self._orbits(images, some, self.seed, stage="balance")[0].logits
        best = self.readout == "incumbent"
        balance = fit_balance(orbits.amax(1) if best else orbits.logsumexp(1), upright_prior(targets, classes))
        if self.method == "bias":
            return balance, "bias"
        if self.method == "balance" or len(images) < FEWEST_FOR_HEAD:
            return fit_map(orbits, targets[some], balance, best=best), "balance"

        def told(done: int, total: int, loss: float) -> None:  # noqa: ARG001
            self._tell("head", done, total)

        def sample(index: Tensor, seed: int) -> tuple[Evidence, Tensor]:
            return self._orbits(images, index, seed)

        return fit_head(sample, targets, train, held_out, balance, self.recipe, seed=self.seed, progress=told), "head"

    def _gate(
        self,
        images: Tensor,
        upright: Evidence,
        targets: Tensor,
        train: Tensor,
        held_out: Tensor,
        calibrator: Calibrator | None,
        promise: Promise,
    ) -> tuple[Gate, dict[str, Any]]:
        truth = targets[held_out]
        cases = self._cases(images, upright, held_out, calibrator)
        detector = self._detector(images, upright, targets, train[:DETECTOR_IMAGES])
        against = [statistics(case.bare, case.root, case.found, detector) for case in cases]
        decided = [case.decided(truth) for case in cases]
        weights = fit_weights(
            torch.cat([rows[use] for rows, use in zip(against, decided, strict=True)]),
            torch.cat([(case.winner == truth)[use] for case, use in zip(cases, decided, strict=True)]),
        )
        belief = self._second_opinion(images[held_out.cpu()])
        cost = belief.gather(1, truth[:, None])[:, 0] - belief.gather(1, cases[0].winner[:, None])[:, 0]
        margin = margin_for(against[0] @ weights, cost, promise.upright)
        kept = [rows @ weights < margin for rows in against]
        exit_at = glance_at = None
        if self.early_exit:
            harm = torch.cat([case.harm(keep, truth) for case, keep in zip(cases[1:], kept[1:], strict=True)])
            exit_at, glance_at = self._exits(cases[1:], harm, calibrator, detector, weights, promise.tilted)
        gate = Gate(margin, weights, exit_at, detector, glance_at)
        temperature = None
        if self.readout == "marginal":
            answers = torch.cat([case.answers(keep) for case, keep in zip(cases, kept, strict=True)])
            temperature = fit_temperature(answers, truth.repeat(len(cases)))
        return gate, {
            "temperature": temperature,
            "promise_upright": promise.upright,
            "promise_tilted": promise.tilted,
            "held_out": len(held_out),
            "margin": margin,
            "weights": weights.tolist(),
            "exit_at": exit_at,
            "glance_at": glance_at,
            "upright_answers_changed": float((~kept[0] & (cases[0].winner != truth)).float().mean()) * 100,
            "upright_leave_early": float(gate.leaves_early(cases[0].bare).float().mean()) * 100,
        }

    def _cases(self, images: Tensor, upright: Evidence, held_out: Tensor, calibrator: Calibrator | None) -> list[Case]:
        """Return the held-out images upright and under some tilts, searched."""
        tilts = max(2, math.ceil(GATE_TILTS / len(held_out)))
        batches = [(self._cropped(images[held_out.cpu()]), upright.at(held_out))]
        for number in range(tilts):
            tilted = self._tilted(images, held_out, hash((self.seed, 1, number)))
            batches.append((tilted, self.predictor(tilted)))
        return [Case(batch, bare, *self._search(batch, bare, calibrator, self.plan.search)) for batch, bare in batches]

    def _exits(
        self,
        tilted: Sequence[Case],
        harm: Tensor,
        calibrator: Calibrator | None,
        detector: Detector,
        weights: Tensor,
        points: float,
    ) -> tuple[float, float | None]:
        """Return the scores at which tilted images may leave after one view and after a glance.

        Args:
            tilted: Searched images.
            harm: (n,), what leaving before the search would lose (1), keep from being lost (−1), or neither.
            calibrator: What the search is calibrated with.
            detector: What scores the images as they came.
            weights: How evidence against the bare answer is weighed.
            points: Of accuracy, that may be lost in all.
        """
        trust = torch.cat([detector(case.bare) for case in tilted])
        if not isinstance(self.plan, Joint):
            return exit_for(trust, harm, points), None
        # Half of what may be lost is for the glance, which decides about the images that are still there.
        exit_at = exit_for(trust, harm, points / 2)
        plan = self.plan

        def glance(evaluate: Evaluate, root: Evidence) -> Found:
            return plan.judged(plan.glance(evaluate, root))

        glanced = [
            statistics(case.bare, *self._search(case.images, case.bare, calibrator, glance), detector)
            for case in tilted
        ]
        still_there = torch.where(trust >= exit_at, 0, harm)
        return exit_at, -exit_for(-torch.cat(glanced) @ weights, still_there, points / 2)

    def _second_opinion(self, images: Tensor) -> Tensor:
        """Return how probable each class is (n, Y) by looks that neither the bare answer nor the search has had.

        The mean prediction over four small shifts. The image as it came would side with the bare answer, whose source
        it is, and condemn every change; the views of the search would side with the search.
        """
        device, _ = self.predictor.device_and_dtype(images)
        side = images.shape[-1] if self.crop is None else self.crop
        shift = 2 * SHIFT * side / max(images.shape[-2:])
        opinions = []
        for part in images.split(256):
            looks = []
            for x, y in ((-shift, -shift), (-shift, shift), (shift, -shift), (shift, shift)):
                pose = torch.tensor([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]]).expand(len(part), 3, 3)
                moved = warp(part.to(device), pose, padding=self.padding, interpolation=self.interpolation)
                looks.append(self.predictor(self._cropped(moved)).logits.softmax(1))
            opinions.append(torch.stack(looks).mean(0))
        return torch.cat(opinions)

    def _detector(self, images: Tensor, upright: Evidence, targets: Tensor, train: Tensor) -> Detector:
        """Return a detector trained on those images, each upright and under two tilts."""
        tilts = [self._tilted(images, train, hash((self.seed, 2, number))) for number in range(2)]
        roots = [upright.at(train), *(self.predictor(batch) for batch in tilts)]
        right = torch.cat([root.labels == targets[train] for root in roots])
        return fit_detector(concatenate(roots), right, seed=self.seed)

    def _search(
        self,
        images: Tensor,
        bare: Evidence,
        calibrator: Calibrator | None,
        search: Callable[[Evaluate, Evidence], Found],
    ) -> tuple[Tensor, Found]:
        """Return the calibrated root logits and what a search finds, in blocks that fit memory."""
        roots, parts = [], []
        for start in range(0, len(images), 128):
            self._tell("gate", start, len(images))
            batch, root = images[start : start + 128], bare.at(slice(start, start + 128))
            root = root if calibrator is None else calibrator(root)
            roots.append(root.logits)
            parts.append(search(Views(self.predictor, batch, self.padding, self.interpolation, calibrator), root))
        marginal, near = (torch.cat([getattr(part, name) for part in parts]) for name in ("marginal", "near"))
        views = torch.cat([part.views for part in parts])
        return torch.cat(roots), Found(parts[0].beam, (), marginal, near, views)

    def _look(self, images: Tensor, index: Tensor | None) -> Evidence:
        """Return the bare evidence of the upright images, block by block."""
        chosen = images if index is None else images[index.cpu()]
        blocks, parts = chosen.split(1024), []
        for number, part in enumerate(blocks):
            self._tell("upright", number, len(blocks))
            parts.append(self.predictor(self._cropped(part)))
        return concatenate(parts)

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)

    def _cropped(self, images: Tensor) -> Tensor:
        device, _ = self.predictor.device_and_dtype(images)
        return centre_crop(images.to(device), self.crop)

    def _tilts(self, count: int, seed: int) -> Tensor:
        """Return transforms (count, 3, 3), each its own draw from what the groups of the search undo."""
        generator = torch.Generator().manual_seed(seed)
        unit = torch.rand(count, len(self.plan.levels), generator=generator)
        coordinates = [spread(group, unit[:, place]) for place, group in enumerate(self.plan.levels)]
        return invert(matrices(self.plan.levels, torch.stack(coordinates, dim=-1)))

    def _tilted(self, images: Tensor, index: Tensor, seed: int) -> Tensor:
        """Return the images at `index`, each tilted by its own draw."""
        tilts = self._tilts(len(index), seed)
        device, _ = self.predictor.device_and_dtype(images)
        whole = images[index.cpu()].to(device)
        return self._cropped(warp(whole, tilts.to(device), padding=self.padding, interpolation=self.interpolation))

    def _orbits(self, images: Tensor, index: Tensor, seed: int, *, stage: str | None = None) -> tuple[Evidence, Tensor]:
        """Return the evidence (n, V, …) of tilted images over a shifted lattice of poses, and their aim (n, V)."""
        generator = torch.Generator().manual_seed(seed)
        levels = self.plan.levels
        count = self.views or default_views(levels)
        shift = torch.rand(len(levels), generator=generator)
        poses = matrices(levels, lattice(levels, count, shift).float())
        parts, aims = [], []
        blocks = index.split(256)
        for number, part in enumerate(blocks):
            if stage is not None:
                self._tell(stage, number, len(blocks))
            tilted = self._tilted(images, part, hash((seed, number)))
            left = poses @ self._tilts(len(part), hash((seed, number)))[:, None] - torch.eye(3)
            aims.append((-left.flatten(2).square().sum(2) / (2 * NEARNESS**2)).softmax(1).to(tilted.device))
            rows = torch.arange(len(part), device=tilted.device).repeat_interleave(count)
            evidence = self.predictor.views(
                tilted,
                rows,
                poses.to(tilted.device).repeat(len(part), 1, 1),
                padding=self.padding,
                interpolation=self.interpolation,
            )
            parts.append(evidence.reshape(len(part), count))
        return concatenate(parts), torch.cat(aims)


def default_views(levels: Sequence[Group]) -> int:
    """Return how many views of an orbit a fit looks at: all of finite groups, else 24 of one level, 72 of several."""
    if all(isinstance(group, FiniteGroup) for group in levels):
        return math.prod(len(group.grid(1)) for group in levels)
    return 24 if len(levels) == 1 else 72


def gather(source: Tensor | Iterable[Any]) -> Tensor:
    """Return all images of a tensor or a loader as one checked tensor; a batch may be a tuple with images first."""
    if isinstance(source, Tensor):
        images = source
    else:
        try:
            batches = [batch[0] if isinstance(batch, (tuple, list)) else batch for batch in source]
        except HeadtiltError:
            raise
        except Exception as error:
            raise DataError(f"the loader of fit images raised: {error}. Nothing was fitted.") from error
        if not batches:
            raise DataError("the loader of fit images gave no batch. Nothing was fitted.")
        for batch in batches:
            check_images(batch, "fit images")
            if batch.shape[1:] != batches[0].shape[1:]:
                sizes = f"{tuple(batches[0].shape[1:])} and {tuple(batch.shape[1:])}"
                raise ShapeError(f"fit images must all be of one size; got {sizes}. Resize them. Nothing was fitted.")
        images = torch.cat(batches)
    check_images(images, "fit images")
    if not bool(images.isfinite().all()):
        raise ShapeError("fit images must be finite; some pixels are NaN or infinite. Nothing was fitted.")
    if len(images) < FEWEST:
        raise DataError(f"fit images must be at least {FEWEST}, better some hundreds; got {len(images)}.")
    return images


def centre_crop(images: Tensor, side: int | None) -> Tensor:
    """Return the centre square (B, C, side, side), or the images themselves where side is None."""
    if side is None:
        return images
    height, width = images.shape[-2:]
    if side > min(height, width):
        raise OptionError(f"crop must fit into the images; got {side} for {height}×{width}.")
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


def _halves(count: int, others: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return the images to fit on and those held out for early stopping and the gate, as indices.

    Held out are the `others` that follow the images, or else a fifth of the images; 2,000 at most. All in random order:
    images often come sorted by class.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    if others is not None:
        return order, count + torch.randperm(others, generator=generator)[:HELD_OUT_IMAGES]
    fewer = max(2, min(count // 5, HELD_OUT_IMAGES))
    return order[fewer:], order[:fewer]
