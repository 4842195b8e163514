"""Fitting a calibrator and a gate from unlabelled upright images; the classifier stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from headtilt.calibrate import Calibrator, fit_balance, fit_map, upright_prior
from headtilt.distances import fit_neighbours, fit_prototypes
from headtilt.errors import DataError, HeadtiltError, OptionError, ShapeError, at_least, checked_seed, one_of
from headtilt.evidence import Evidence
from headtilt.gate import Gate, Promise
from headtilt.gate_fit import GateFitter
from headtilt.head import HeadRecipe, fit_head
from headtilt.looks import Looks
from headtilt.predictor import Predictor
from headtilt.search.plan import Plan
from headtilt.warp import Interpolation, Padding, all_finite, check_images

Method = Literal["head", "balance", "bias", "prototypes", "neighbours", "keep"]
METHODS = ("head", "balance", "bias", "prototypes", "neighbours", "keep")
FEWEST_FOR_HEAD = 100
FEWEST = 8
BALANCE_IMAGES = 2000
HELD_OUT_IMAGES = 2000


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
        looks = self._looks()
        upright = looks.upright(images)
        targets = upright.labels
        if int(targets.unique().numel()) < 2:
            raise DataError("fit images must show at least two classes by the model's own judgement; they show one.")
        train, held_out = train.to(targets.device), held_out.to(targets.device)
        calibrator, kind = self._calibrator(looks, images, upright, targets, train, held_out)
        report: dict[str, Any] = {"method": kind, "images": len(images), "seed": self.seed}
        gate = None
        if self.promise is not None:
            setting = GateFitter(looks, self.plan, calibrator, self.promise, self.early_exit, self.readout, self.seed)
            gate, expected = setting.fit(images, upright, targets, train, held_out)
            temperature = expected.pop("temperature")
            report |= {"gate": expected} | ({} if temperature is None else {"temperature": temperature})
        return Fitted(calibrator, gate, report)

    def _looks(self) -> Looks:
        return Looks(
            self.predictor, self.plan.levels, self.padding, self.interpolation, self.views, self.crop, self.progress
        )

    def _calibrator(
        self, looks: Looks, images: Tensor, upright: Evidence, targets: Tensor, train: Tensor, held_out: Tensor
    ) -> tuple[Calibrator | None, str]:
        if self.method == "keep":
            return self.calibrator, "keep"
        if self.method in ("prototypes", "neighbours"):
            # Not the held-out images: each would be its own nearest neighbour, and the gate is set by them.
            distances = fit_prototypes if self.method == "prototypes" else fit_neighbours
            return distances(upright.at(train), targets[train]), self.method
        classes = upright.logits.shape[-1]
        some = train[: max(BALANCE_IMAGES, 100 * classes)]
        orbits = looks.orbits(images, some, self.seed, stage="balance")[0].logits
        best = self.readout == "incumbent"
        balance = fit_balance(orbits.amax(1) if best else orbits.logsumexp(1), upright_prior(targets, classes))
        if self.method == "bias":
            return balance, "bias"
        if self.method == "balance" or len(images) < FEWEST_FOR_HEAD:
            return fit_map(orbits, targets[some], balance, best=best), "balance"

        def told(done: int, total: int, loss: float) -> None:  # noqa: ARG001
            looks.tell("head", done, total)

        def sample(index: Tensor, seed: int) -> tuple[Evidence, Tensor]:
            return looks.orbits(images, index, seed)

        return fit_head(sample, targets, train, held_out, balance, self.recipe, seed=self.seed, progress=told), "head"


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
    if not all_finite(images):
        raise ShapeError("fit images must be finite; some pixels are NaN or infinite. Nothing was fitted.")
    if len(images) < FEWEST:
        raise DataError(f"fit images must be at least {FEWEST}, better some hundreds; got {len(images)}.")
    return images


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
