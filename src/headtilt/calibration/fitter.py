"""Fitting a calibrator and a gate from unlabelled upright images; the classifier stays as it is.

The cost is counted in views of the model and known before the first: each image is looked at as it is, once more not
far from that, and under some tilts from several views each. With few images the calibrator is fitted several
times, each time without a part of them, so that every image tells the gate something and none is judged by a
calibrator that it had a part in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headtilt.calibration.balance import Balance, fit_balance, fit_map
from headtilt.calibration.distances import fit_neighbours, fit_prototypes
from headtilt.calibration.fit_images import HELD_OUT_IMAGES, Fold, Seeds, gather, split
from headtilt.calibration.gate import Gate, Promise
from headtilt.calibration.gate_fitting import GateFitting, HeldOut
from headtilt.calibration.head import HeadRecipe, OrbitHead, fit_head
from headtilt.calibration.looks import Looks, Pile, floats, most_kept
from headtilt.calibration.padding import choose_padding
from headtilt.calibration.proposals import Proposals, fit_proposals
from headtilt.calibration.sampler import Sampler
from headtilt.calibration.verdict import Straight, joined, straight
from headtilt.errors import DataError, OptionError, ShapeError, at_least, checked_seed, one_of
from headtilt.geometry.warp import Interpolation, Padding
from headtilt.model.evidence import Calibrator, Evidence, concatenate
from headtilt.model.predictor import Predictor
from headtilt.progress import Progress, Ticker
from headtilt.search.lattice import covering, elements
from headtilt.search.plan import Plan
from headtilt.search.run import Searcher

Method = Literal["head", "balance", "bias", "prototypes", "neighbours", "keep"]
METHODS = ("head", "balance", "bias", "prototypes", "neighbours", "keep")
FEWEST_FOR_HEAD = 50
PADDING_IMAGES = 48  # by which a padding is chosen


@dataclass(frozen=True)
class Fitted:
    """What a fit gives.

    Attributes:
        calibrator: From evidence to calibrated evidence; None for the bare logits.
        gate: None where no promise was asked for.
        padding: What suits the images and the model.
        report: What was fitted, on how many images, at which cost, and what it should be worth.
    """

    calibrator: Calibrator | None
    gate: Gate | None
    padding: Padding
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitter:
    """How to fit.

    Attributes:
        predictor: The model, with features tapped where the method needs them.
        plan: The search that the calibrator and the gate will serve.
        padding: See `warp`; "auto" has the best one chosen.
        interpolation: See `warp`.
        method: "head", "balance", "bias", "prototypes", "neighbours", or "keep" to fit a gate for `calibrator` alone.
        calibrator: The calibrator to keep; None is the bare logits.
        recipe: How a head is trained.
        readout: What the search will answer with.
        promise: What the gate must keep; None fits no gate.
        early_exit: Whether the gate may let images go before the search.
        crop: Side of the centre square that the model sees, where fit images are larger: tilts then leave no corners.
        seed: Seeds everything random.
        progress: Called with (stage, views done, views in all).
    """

    predictor: Predictor
    plan: Plan
    padding: Padding = "auto"
    interpolation: Interpolation = "bicubic"
    method: Method = "head"
    calibrator: Calibrator | None = None
    recipe: HeadRecipe = field(default_factory=HeadRecipe)
    readout: Literal["incumbent", "marginal"] = "marginal"
    promise: Promise | None = field(default_factory=Promise)
    early_exit: bool = True
    crop: int | None = None
    seed: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        if not isinstance(self.recipe, HeadRecipe):
            raise OptionError(f"recipe must be a HeadRecipe or None; got {self.recipe!r}.")
        object.__setattr__(self, "seed", checked_seed(self.seed))
        if self.crop is not None:
            object.__setattr__(self, "crop", at_least("crop", self.crop, 1))

    def fit(self, source: Tensor | Iterable[Any], held_out_source: Tensor | Iterable[Any] | None = None) -> Fitted:
        """Return calibrator and gate fitted on upright images (n, C, H, W) or a loader of such batches.

        Args:
            source: Images to fit on.
            held_out_source: Images for the gate; None has the others take turns, or sets a fifth of many aside.
        """
        seeds = Seeds(self.seed)
        images = gather(source, seeds.numbers("images"))
        others = None if held_out_source is None else gather(held_out_source, seeds.numbers("held out"))
        if others is not None:
            if others.shape[1:] != images.shape[1:]:
                raise ShapeError(
                    f"held-out images must be of the size of the others, {tuple(images.shape[1:])}; "
                    f"got {tuple(others.shape[1:])}. Nothing was fitted."
                )
            images = torch.cat([images, others[:HELD_OUT_IMAGES].to(images)])
        given = None if others is None else min(len(others), HELD_OUT_IMAGES)
        folds = self.folds(len(images), given, seeds.numbers("folds"))
        return Fitting(self, images, folds, seeds).run()

    def views(self, images: int, held_out: int | None = None) -> int:
        """Return how many views of the model a fit on so many images takes.

        Args:
            images: How many are fitted on.
            held_out: How many others are held out; None holds out of `images`.
        """
        folds = self.folds(images + (held_out or 0), held_out, np.random.default_rng(0))
        return sum(self.cost(images + (held_out or 0), folds).values())

    def folds(self, count: int, given: int | None, generator: np.random.Generator) -> list[Fold]:
        """Return which images to fit on and which tell the gate; all are fitted on where there is none."""
        if self.promise is None:
            return [Fold(torch.arange(count - (given or 0)), torch.arange(0))]
        return split(count, given, generator)

    def cost(self, images: int, folds: list[Fold]) -> dict[str, int]:
        """Return the views that each stage takes."""
        judged = sum(len(fold.held_out) for fold in folds) if self.promise is not None else 0
        return {
            "upright": images,
            "padding": 5 * min(PADDING_IMAGES, len(folds[0].train)) if self.padding == "auto" else 0,
            "looks": self.looks(images) * images * (self.views_each + 1) if self.method != "keep" or judged else 0,
            "gate": 0 if self.sums else judged * (1 + self.plan.most_views),
        }

    def looks(self, images: int) -> int:
        """Return under how many tilts each of so many images is looked at."""
        return self.recipe.looks_at(images, self.views_each + 1)

    @property
    def sums(self) -> bool:
        """Whether the search answers with a sum over views, as the looks of a fit can be answered with, too."""
        return self.readout == "marginal"

    @property
    def views_each(self) -> int:
        """Views of each of these, beside the image as it came."""
        every = elements(self.plan.levels)
        return self.recipe.views if every is None else every - 1


@dataclass(frozen=True)
class Fitting:
    """One fit, from images to a calibrator and a gate.

    Attributes:
        fitter: How to fit.
        images: (n, C, H, W), upright.
        folds: Which of them are fitted on, and which tell the gate; several for few images.
        seeds: Where randomness comes from.
    """

    fitter: Fitter
    images: Tensor
    folds: list[Fold]
    seeds: Seeds

    def run(self) -> Fitted:
        """Return what is fitted, and a report."""
        how = self.fitter
        cost = how.cost(len(self.images), self.folds)
        tell = Ticker(how.progress, sum(cost.values()))
        upright = self._upright(tell)
        if int(upright.labels.unique().numel()) < 2:
            raise DataError(
                "fit images must show at least two classes by the model's own judgement; they show one. Give images of "
                "several classes, and check that the model is given pixels as it wants them. Nothing was fitted."
            )
        padding, scores = self._padding(tell)
        sampler = Sampler(how.predictor, how.plan.levels, padding, how.interpolation, how.crop, how.views_each)
        looks = self._looks(sampler, tell) if cost["looks"] else None
        calibrators = [
            self._calibrator(fold.train, looks, upright, number, tell) for number, fold in enumerate(self.folds)
        ]
        everything = torch.cat([self.folds[0].train, self.folds[0].held_out])
        final = calibrators[0]
        if len(self.folds) > 1:
            final = self._calibrator(everything, looks, upright, len(self.folds), tell)
        report: dict[str, Any] = {
            "method": self._kind(len(self.images)),
            "images": len(self.images),
            "seed": how.seed,
            "views": sum(cost.values()),
            "padding": padding,
            **({"padding_scores": scores} if scores else {}),
            "proposes": getattr(final, "proposals", None) is not None,
            "features": 0 if how.predictor.features == "auto" else len(how.predictor.features or ()),
        }
        gate = None
        if how.promise is not None and looks is not None:
            gate, judged = self._gate(how.promise, sampler, final, calibrators, upright, looks, tell)
            report |= judged
        tell.end()
        return Fitted(final, gate, padding, report)

    def _upright(self, tell: Ticker) -> Evidence:
        """Return what the bare model says of all images; features only for methods that compare them."""
        compared = self.fitter.method in ("prototypes", "neighbours")
        predictor = self.fitter.predictor if compared else self.fitter.predictor.with_features(None)
        sampler = Sampler(predictor, self.fitter.plan.levels, crop=self.fitter.crop)
        parts = []
        for part in self.images.split(256):
            parts.append(predictor(sampler.seen(part)))
            tell("looking at upright images", len(part))
        return concatenate(parts)

    def _padding(self, tell: Ticker) -> tuple[Padding, dict[str, float]]:
        how = self.fitter
        if how.padding != "auto":
            return how.padding, {}
        some = self.images[self.folds[0].train[:PADDING_IMAGES]]
        bare = how.predictor.with_features(None)
        device, _ = bare.device_and_dtype(some)
        sampler = Sampler(bare, how.plan.levels, crop=how.crop)
        tilts = sampler.draw(len(some), 0.0, max(some.shape[-2:]), self.seeds.numbers("padding")).transforms
        chosen = choose_padding(
            lambda views: bare(views).logits,
            some.to(device),
            tilts.to(device),
            crop=how.crop,
            interpolation=how.interpolation,
        )
        tell("choosing a padding", 5 * len(some))
        return chosen

    def _looks(self, sampler: Sampler, tell: Ticker) -> Looks:
        """Return the images under some tilts, or as many of them as memory should hold."""
        how, draws = self.fitter, self.seeds.numbers("tilts")
        count = len(self.images)
        device, _ = how.predictor.device_and_dtype(self.images)
        pile = Pile(most_kept(device), count * how.looks(count))

        def looked(views: int) -> None:
            tell("looking at tilted images", views)

        for _ in range(how.looks(count)):
            for rows in torch.from_numpy(draws.permutation(count)).split(256):
                presented = sampler.draw(len(rows), how.recipe.upright, max(self.images.shape[-2:]), draws)
                if not pile.add(sampler.orbits(self.images[rows], presented, sampler.coordinates(draws), looked), rows):
                    return pile.looks()
        return pile.looks()

    def _kind(self, count: int) -> str:
        """Return the method that so many images bear."""
        method = self.fitter.method
        return "balance" if method == "head" and count < FEWEST_FOR_HEAD else method

    def _calibrator(
        self, rows: Tensor, looks: Looks | None, upright: Evidence, number: int, tell: Ticker
    ) -> Calibrator | None:
        how, kind = self.fitter, self._kind(len(self.images))
        rows = rows.to(upright.logits.device)
        if kind == "keep" or looks is None:
            return how.calibrator
        if kind in ("prototypes", "neighbours"):
            distances = fit_prototypes if kind == "prototypes" else fit_neighbours
            return distances(upright.at(rows), upright.labels[rows])
        once = looks.once(rows)
        orbits = floats(once.orbits.evidence).logits
        balance = self._balance(orbits, upright.logits[once.image].softmax(1))
        if kind == "bias":
            return balance
        if kind == "balance":
            return fit_map(orbits, upright.labels[once.image], balance, best=how.readout == "incumbent")
        seed = self.seeds.sequence("head", number)
        targets = upright.logits.softmax(1)
        heads = len(self.folds) + (len(self.folds) > 1)
        total = tell.training // heads
        head = fit_head(
            looks.orbits,
            targets[looks.image],
            balance.bias,
            how.recipe,
            seed,
            lambda done, steps: tell.at("fitting the head", number * total + total * done // max(steps, 1)),
            rows=looks.rows(rows),
            images=min(len(fold.train) for fold in self.folds),
        )
        head.proposals = self._proposals(head, looks, looks.rows(rows), number)
        return head

    def _proposals(self, head: OrbitHead, looks: Looks, rows: Tensor, number: int) -> Proposals | None:
        """Return what guesses likely poses, where the search asks for that and there are features to tell by.

        Args:
            head: Fitted on the same looks.
            looks: At all images.
            rows: Looks to learn from.
            number: Of the fit, for the seed.
        """
        plan = self.fitter.plan
        if plan.lattice is None or head.source != "features":
            return None
        _, poses = covering(plan.levels, plan.choices, head.mean)
        seed, hidden = self.seeds.sequence("proposals", number), self.fitter.recipe.hidden
        return fit_proposals(looks.orbits, rows, poses, head.mean, head.deviation, hidden, seed)

    def _balance(self, orbits: Tensor, upright: Tensor) -> Balance:
        """Return the balance under which classes win over orbits (n, V, Y) as often as the model says them upright."""
        pooled = orbits.amax(1) if self.fitter.readout == "incumbent" else orbits.logsumexp(1)
        return fit_balance(pooled, upright.mean(0))

    def _gate(
        self,
        promise: Promise,
        sampler: Sampler,
        final: Calibrator | None,
        calibrators: list[Calibrator | None],
        upright: Evidence,
        looks: Looks,
        tell: Ticker,
    ) -> tuple[Gate, dict[str, Any]]:
        """Return the gate that keeps the promise, and what the images that had no part in each fit say of it."""
        how = self.fitter
        pairs = list(zip(self.folds, calibrators, strict=True))
        searched = None
        if not how.sums:
            searched = joined([self._searched(sampler, fold.held_out, fitted, tell) for fold, fitted in pairs])
        fitting = GateFitting(how.plan, how.readout, promise, how.early_exit, how.method == "head")
        held_out = [HeldOut(fitted, looks.of(fold.held_out), len(fold.held_out)) for fold, fitted in pairs]
        return fitting.fit(final, held_out, upright.labels, searched)

    def _searched(self, sampler: Sampler, rows: Tensor, calibrator: Calibrator | None, tell: Ticker) -> Straight:
        """Return what the search makes of upright images."""
        how = self.fitter
        searcher = Searcher(how.predictor, how.plan, calibrator, None, how.readout, sampler.padding, how.interpolation)
        parts = []
        for some in rows.cpu().split(128):
            images = sampler.seen(self.images[some])
            bare = how.predictor(images)
            for part, answer in searcher.blocks(images, bare):
                parts.append(straight(bare.at(part), answer.found.root, answer.logits, answer.found.posture))
            tell("searching upright images", len(some) * (1 + how.plan.most_views))
        return joined(parts)
