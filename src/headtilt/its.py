"""The product: a module that stands where the classifier stood and answers for tilted images too."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from headtilt.calibration.balance import balance_of_batch, checked_calibrator
from headtilt.calibration.fitter import Fitter, Method
from headtilt.calibration.gate import CautiousGate, Gate, Promise, checked_gate
from headtilt.calibration.head import HeadRecipe
from headtilt.calibration.verdict import hint
from headtilt.errors import DataError, OptionError, ShapeError, one_of
from headtilt.estimator import Estimator
from headtilt.geometry.groups import Group
from headtilt.geometry.warp import Interpolation, Padding, all_finite, check_images, checked_padding, warn_of_range
from headtilt.io import bundle, export
from headtilt.model.evidence import Calibrator
from headtilt.model.fingerprint import difference, fingerprint_of
from headtilt.model.predictor import Predictor
from headtilt.model.state import Model
from headtilt.model.taps import checked_features
from headtilt.progress import Progress, on_terminal
from headtilt.result import SearchResult, concatenate, result_of
from headtilt.search.plan import Plan, made_plan, name_of, plans_with_option
from headtilt.search.run import Searcher

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("headtilt")
CHECKED: dict[str, Callable[[object], object]] = {"calibrator": checked_calibrator, "gate": checked_gate}
SEVERAL_LABELS = (
    'confidence="multilabel" answers with the best view alone: readout="incumbent", no gate, no calibrator.'
)


class ITS(Estimator, nn.Module):
    """A classifier with Inverse Transformation Search around it.

    ``robust(images)`` returns logits of the model's shape; ``robust.search(images)`` also says how each image was
    transformed and why. The model is never changed and leaves every call in the mode it came in. No gradient passes
    through a search. The model inside may be compiled; `torch.compile` around the wrapper changes nothing.

    Args:
        model: An `nn.Module` or a callable from raw images (B, C, H, W) to logits (B, Y). Normalisation belongs to it.
            A single logit (B, 1) is taken for no or yes, and comes back as one.
        levels: Groups to search, from the root of the tree down; the full turn by default.
        search: How to search, with its own options: ``Tree(samples=17, hypotheses=3)`` walks level by level as the
            paper does, ``Joint(budget=48)`` covers the product of the levels with a lattice, ``Anneal(budget=72)``
            walks it by simulated annealing. "tree", "joint" and "anneal" are these with their default options.
        mc_passes: Dropout passes to average over; 1 is the deterministic model.
        mc_sampled: Sample dropout even for a single pass.
        seed: Seed of the dropout masks.
        readout: "incumbent" answers with the best hypothesis, "marginal" sums the evidence over all views seen.
        padding: What lies outside the image: "zeros", "border", "reflection", a number, or a number per channel. "auto"
            goes on with the colour of an image's frame where it is one colour, and reflects the image elsewhere; `fit`
            then tries the others, too, and keeps the best.
        interpolation: "bicubic", "bilinear" or "nearest". Views that are as sharp as the image tell a model more: with
            "bilinear", as the paper has it, labels of small photographs are right less often by up to five points.
        chunk: Views per forward pass; None chooses.
        autocast: Reduced-precision dtype for `torch.autocast`, or None.
        output_key: Where the logits are if the model returns a dict or an object.
        features: What a fitted head reads beside the logits: names of modules, for what they are given, or with
            ":out" behind them for what they give. "auto" finds the outputs of the model's blocks and the inputs of its
            last linear layers, where there are any; None uses logits alone.
        calibrator: From Evidence to Evidence; usually set by `fit`. "batch" balances each batch by itself, assuming
            that all classes are equally frequent in it.
        gate: How strongly the search must beat the bare model's answer: "cautious" (fits any model, and costs upright
            images about a point), plain log-odds, a `Gate`, or None for no gate. `fit` sets a far better one.

    Examples:
        >>> from headtilt import Joint, rotation, scale
        >>> from headtilt.sources import zoo
        >>> robust = ITS(zoo.load("digits"), [rotation(), scale(0.25)], search=Joint(budget=24))
        >>> robust(torch.rand(2, 1, 28, 28)).shape
        torch.Size([2, 9])
    """

    def __init__(
        self,
        model: Model,
        levels: Sequence[Group] | None = None,
        *,
        search: Plan | Literal["tree", "joint", "anneal"] = "tree",
        mc_passes: int = 1,
        mc_sampled: bool = False,
        seed: int = 0,
        readout: Literal["incumbent", "marginal"] = "incumbent",
        padding: Padding = "auto",
        interpolation: Interpolation = "bicubic",
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
        output_key: str = "logits",
        features: str | Sequence[str] | None = "auto",
        calibrator: Calibrator | Literal["batch"] | None = None,
        gate: float | Gate | CautiousGate | Literal["cautious"] | None = "cautious",
        **unknown: Any,
    ) -> None:
        super().__init__()
        for name in unknown:
            _refuse_option(name)
        given = locals()
        self._given = {name: given[name] for name in self._parameters_taken()}
        one_of("readout", readout, ("incumbent", "marginal"))
        one_of("interpolation", interpolation, ("bilinear", "nearest", "bicubic"))
        self.model = model
        self.plan = made_plan(search, levels)
        self._predictor = Predictor(
            model,
            mc_passes=mc_passes,
            mc_sampled=mc_sampled,
            seed=seed,
            chunk=chunk,
            autocast=autocast,
            output_key=output_key,
        )
        self.features = checked_features(features)
        self.readout: Literal["incumbent", "marginal"] = readout
        self.padding: Padding = checked_padding(padding)
        self.interpolation: Interpolation = interpolation
        self.calibrator = checked_calibrator(calibrator)
        if self.plan.confidence == "multilabel" and gate == "cautious":
            gate = None  # it weighs one answer against another, and here any number of labels may be right
        self.gate = checked_gate(gate)
        if self.plan.confidence == "multilabel" and readout != "incumbent":
            raise OptionError(SEVERAL_LABELS)
        self.report: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a calibrator and a gate are what they are for the constructor: ``robust.gate = 2.0``."""
        if name in CHECKED:
            value = CHECKED[name](value)
            if value is not None and self.plan.confidence == "multilabel":
                raise OptionError(SEVERAL_LABELS)
            if value is not None and not isinstance(value, nn.Module):
                self._modules.pop(name, None)  # which torch would let only another module or None replace
        super().__setattr__(name, value)

    @property
    def predictor(self) -> Predictor:
        """What asks the model; it follows where `model` is replaced."""
        if self._predictor.model is not self.model:
            self._predictor = self._predictor.with_model(self.model)
        return self._predictor

    @predictor.setter
    def predictor(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def train(self, mode: bool = True) -> ITS:
        """Set the mode of the model; what was fitted around it stays in eval mode, since it is done learning."""
        super().train(mode)
        for part in self._fitted():
            part.eval()
        return self

    def _fitted(self) -> list[nn.Module]:
        """Return what was fitted around the model and has weights."""
        return [part for part in (self.calibrator, self.gate) if isinstance(part, nn.Module)]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, Y) of the images (B, C, H, W) in their most familiar pose."""
        if torch.compiler.is_compiling():  # a search follows what the model says: no graph can hold it
            return _uncompiled(self, images)
        return torch.cat([block.logits for block in self._blocks(images)])  # what else was found need not pile up

    def fit(
        self,
        images: Tensor | Iterable[Any],
        labels: object = None,
        *,
        held_out: Tensor | Iterable[Any] | None = None,
        method: Method = "head",
        promise: Promise | float | None = 0.5,
        recipe: HeadRecipe | None = None,
        early_exit: bool = True,
        crop: int | None = None,
        seed: int = 0,
        progress: Progress | bool | None = None,
    ) -> ITS:
        """Fit a calibrator and a gate from unlabelled upright images, and return the wrapper itself.

        Args:
            images: (n, C, H, W) raw pixels, or a loader of such batches (labels beside them are ignored).
            labels: Not needed and not used; here because scikit-learn passes some.
            held_out: Other upright images, from which the gate's thresholds come. None sets a fifth of many `images`
                aside; few take turns. A classifier is surer of the images it was trained on than it will be of new
                ones, so that a promise is worth more if these were not among them.
            method: "head" (the best), "balance" (a linear map of the logits), "bias" (one number per class),
                "prototypes", "neighbours", or "keep" (a gate alone, for the calibrator there is).
            promise: Points of upright accuracy that the search may cost at most; None fits no gate.
            recipe: How a head is trained; see `HeadRecipe`.
            early_exit: Whether the gate may let images go after a single view.
            crop: Side of the centre square that the model sees, where the fit images are larger.
            seed: Seeds everything random.
            progress: True shows on a terminal how far it is and how long it will take; a function is called with
                (stage, views done, views in all).

        Nothing changes unless the whole fit succeeds. The classifier never changes.
        """
        if labels is not None:
            _warn_of_labels(labels)
        if isinstance(images, Tensor) and images.is_floating_point() and images.numel():
            warn_of_range(images)
        if self.plan.confidence == "multilabel":
            raise OptionError('fit is for one label per image; with confidence="multilabel" nothing needs fitting.')
        if method == "keep" and self.calibrator == "batch":
            raise OptionError(
                'method="keep" fits a gate for a fixed calibrator, and calibrator="batch" is another for each batch.'
            )
        reads = method in ("head", "prototypes", "neighbours")
        predictor = (
            self.predictor if method == "keep" else self.predictor.with_features(self.features if reads else None)
        )
        fitter = Fitter(
            predictor,
            self.plan,
            padding=self.padding,
            interpolation=self.interpolation,
            method=method,
            calibrator=None if self.calibrator == "batch" else self.calibrator,
            recipe=recipe or HeadRecipe(),
            readout=self.readout,
            promise=promise if promise is None or isinstance(promise, Promise) else Promise(promise),
            early_exit=early_exit,
            crop=crop,
            seed=seed,
            progress=on_terminal() if progress is True else progress or None,
        )
        with torch.inference_mode(False), torch.no_grad():  # a head is trained, which inference mode would forbid
            fitted = fitter.fit(images, held_out)
        self.predictor, self.calibrator, self.gate = predictor, fitted.calibrator, fitted.gate
        self.padding, self.report = fitted.padding, fitted.report
        log.info("fitted: %s", self.report)
        if advice := hint(self.report):
            log.warning("%s", advice)
        return self

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write everything but the model to a folder, as JSON and safetensors; see `load`.

        Of a model that has been shown images its answers to a few noise images are written as well, by which `load`
        knows it again.

        Args:
            folder: New, empty, or that of a bundle.
            overwrite: Whether a bundle that is there may be replaced.
        """
        predictor = self.predictor
        options = {
            "search": self.plan,
            "mc_passes": predictor.passes,
            "mc_sampled": predictor.sampled and predictor.passes == 1,
            "seed": predictor.seed,
            "readout": self.readout,
            "padding": self.padding,
            "interpolation": self.interpolation,
            "chunk": predictor.chunk,
            "autocast": predictor.autocast,
            "output_key": predictor.output_key,
            "features": predictor.features or self.features,
            "calibrator": self.calibrator,
            "gate": self.gate,
        }
        report = {**self.report, "reads_features": bool(predictor.features)}
        bundle.write(folder, options, report, fingerprint_of(predictor), overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: Model, *, strict: bool = True) -> ITS:
        """Return the wrapper that `save` wrote to a folder, around the same model.

        Args:
            folder: The bundle.
            model: The model that it was saved around. It may have been moved, compiled, exported, wrapped for several
                devices or cast to half precision since.
            strict: Whether a model that answers otherwise than that one did is refused.
        """
        options, report, known = bundle.read(folder)
        try:
            robust = cls(model, **options)
        except TypeError as error:
            raise DataError(f"{folder} holds options that mean nothing here: {error}. Save it again.") from error
        if report.pop("reads_features", False):
            robust.predictor = robust.predictor.with_features(robust.features)
        robust.report = report
        device, _ = robust.predictor.device_and_dtype(torch.empty(0))
        for part in robust._fitted():
            part.to(device)
        if known is not None and strict and (other := difference(robust.predictor, known)):
            raise DataError(
                f"{os.fspath(folder)} was fitted for another model: {other}. Load it around its own model, fit one for "
                "this model (robust.fit, headtilt fit), or, where the two belong together, pass strict=False "
                "(--no-strict)."
            )
        return robust

    def export(
        self,
        path: str | os.PathLike[str],
        example: Tensor | Sequence[int] | None = None,
        *,
        labels: Sequence[str] | None = None,
    ) -> None:
        """Write the whole search as one graph that runs without headtilt: ".onnx" for onnxruntime, ".pt2" for torch.

        Raw pixels (B, C, H, W), any B, go in; logits (B, Y), pose (B, 3, 3) and gated (B,) come out. All views of a
        batch are looked at together and nothing leaves early, so memory grows with B and the budget.

        Args:
            path: Written whole or not at all.
            example: Images as the model will get them, or their (C, H, W); None takes the size seen last.
            labels: Names of the classes, kept in the file beside headtilt's version and the options.
        """
        predictor = self.predictor
        shape = (
            predictor.seen if example is None else tuple(example.shape[1:] if isinstance(example, Tensor) else example)
        )
        graph = export.Graph(
            predictor, self.plan, self.calibrator, self.gate, self.readout, self.padding, self.interpolation
        )
        export.write(graph, path, shape, labels)
        log.info("exported the search to %s", path)

    def embed(self, images: Tensor) -> Tensor:
        """Return the penultimate features (B, D) of the images (B, C, H, W) turned back: what the last layer reads."""
        canonical = self.search(images).canonical()
        reader = self.predictor.with_features(self.features)
        reader(canonical[:1])  # finds the layers where they are to be found
        if not reader.features:
            raise OptionError("embed needs a model with a linear layer at its end, or features= to name the module.")
        features = reader.with_features(reader.features[-1])(canonical).features
        return cast(Tensor, features)

    def search(self, images: Tensor) -> SearchResult:
        """Return labels, poses and the trace of the search for images (B, C, H, W) of raw pixels."""
        result = concatenate(list(self._blocks(images)))
        if log.isEnabledFor(logging.DEBUG):  # the sums wait for the device
            seen, kept = int(result.views.sum()), int(result.gated.sum())
            log.debug("searched %d images: %d views, %d kept by the gate", len(result), seen, kept)
        return result

    @torch.no_grad()
    def _blocks(self, images: Tensor) -> Iterator[SearchResult]:
        """Yield what the search finds, for as many images at a time as memory should hold."""
        predictor = self.predictor
        check_images(images)
        if not all_finite(images):
            raise ShapeError(
                "images must be finite; some pixels are NaN or infinite. Clean them first: images.nan_to_num()."
            )
        warn_of_range(images)
        device, _ = predictor.device_and_dtype(images)
        images = images.to(device)
        how: dict[str, Any] = {"padding": self.padding, "interpolation": self.interpolation, "readout": self.readout}
        with predictor.borrowed():
            bare = predictor(images)
            calibrator = self.calibrator
            if calibrator == "batch":
                calibrator = balance_of_batch(predictor, images, self.plan.levels, **how)
            searcher = Searcher(predictor, self.plan, calibrator, self.gate, **how)
            for rows, answer in searcher.blocks(images, bare):
                yield result_of(
                    images[rows],
                    bare.logits[rows],
                    answer,
                    single_logit=predictor.single_logit,
                    padding=self.padding,
                    interpolation=self.interpolation,
                    multilabel=self.plan.confidence == "multilabel",
                )

    def but(self, **changes: Any) -> Self:
        """Return another wrapper around the same model, fitted as this one is, with some arguments of `ITS` changed.

        Examples:
            >>> bare = lambda images: images.flatten(1)[:, :10]
            >>> ITS(bare).but(gate=None).gate is None
            True
        """
        fitted = {"calibrator": self.calibrator, "gate": self.gate, "padding": self.padding}
        other = type(self)(**{**self._given, "model": self.model, **fitted, **changes})
        if self.predictor.features and "features" not in changes:
            other.predictor = other.predictor.with_features(self.predictor.features)
        other.predictor.seen = self.predictor.seen
        other.report = self.report
        other.training = self.training  # and not `train`, which would reach the model
        return other

    @classmethod
    def _parameters_taken(cls) -> list[str]:
        taken = inspect.signature(ITS.__init__).parameters
        return [name for name, kind in taken.items() if name != "self" and kind.kind is not kind.VAR_KEYWORD]

    def extra_repr(self) -> str:
        """Return the levels and the main options."""
        names = " → ".join(group.name for group in self.plan.levels)
        return f"search={name_of(self.plan)}, levels={names}, hypotheses={self.plan.hypotheses}"


def _refuse_option(option: str) -> None:
    """Raise `OptionError` for an option that `ITS` does not take, saying who does."""
    plan = plans_with_option(option)
    close = difflib.get_close_matches(option, ITS._parameters_taken(), n=1)
    advice = f"Did you mean {close[0]}=?" if close else "See help(headtilt.ITS)."
    if plan:
        advice = f"It belongs to the search: ITS(model, search={plan})."
    raise OptionError(f"ITS takes no option {option!r}. {advice}")


def _warn_of_labels(labels: object) -> None:
    """Say that labels are not needed; raise `OptionError` for what looks like images."""
    if getattr(labels, "ndim", 1) > 2:
        raise OptionError("fit takes one set of images. Others are held out by name: fit(images, held_out=others).")
    warnings.warn("fit needs no labels, and uses none: it learns from the model's own answers.", stacklevel=3)


def _uncompiled(robust: ITS, images: Tensor) -> Tensor:
    """Return what `forward` does, outside of a graph that is being made; importing what it takes costs a second."""
    eager: Callable[[ITS, Tensor], Tensor] = torch.compiler.disable(ITS.forward)
    return eager(robust, images)
