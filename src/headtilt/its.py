"""The product: a module that stands where the classifier stood and answers for tilted images too."""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

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
from headtilt.model.state import Model, alone
from headtilt.model.taps import checked_features
from headtilt.progress import Progress, on_terminal
from headtilt.result import SearchResult, concatenate, result_of
from headtilt.search.plan import Plan, made_plan, name_of, plans_with_option
from headtilt.search.run import Searcher

if TYPE_CHECKING:
    from typing_extensions import Self

Joined = TypeVar("Joined")

log = logging.getLogger("headtilt")
CHECKED: dict[str, Callable[[object], object]] = {"calibrator": checked_calibrator, "gate": checked_gate}
SEVERAL_LABELS = (
    'confidence="multilabel" answers with the best view alone: readout="incumbent", no gate, no calibrator.'
)


class ITS(Estimator, nn.Module):
    """A classifier with Inverse Transformation Search around it.

    ``robust(images)`` returns logits in the shape of the model's own. ``robust.search(images)`` also returns how each
    image was tilted. The model is not changed, and has the same mode after each call. No gradient passes through a
    search. The model inside may be compiled; `torch.compile` around the wrapper has no effect.

    Args:
        model: An `nn.Module` or a callable from raw pixels (B, C, H, W) in 0 … 1 to logits (B, Y). It includes its
            normalisation. A single logit (B, 1) means no or yes, and the result has that shape, too.
        levels: Groups to search, from the root of the tree down; the full turn by default.
        search: How to search, with options: ``Tree(samples=17, hypotheses=3)`` searches level by level, as in the
            paper; ``Joint(budget=48)`` covers the product of the levels with a lattice; ``Anneal(budget=72)`` uses
            simulated annealing. "tree", "joint" and "anneal" are the same with default options.
        mc_passes: Dropout passes to average over; 1 is the deterministic model.
        mc_sampled: Sample dropout even for a single pass.
        seed: Seed of the dropout masks.
        readout: "incumbent" takes the answer of the best hypothesis, "marginal" the sum over all views.
        padding: Pixels outside of the image: "zeros", "border", "reflection", a number, or a number per channel. "auto"
            continues a frame of one colour, and reflects all other images; `fit` then also tries the others, and keeps
            the best.
        interpolation: "bicubic", "bilinear" or "nearest". Sharp views are easier to classify: with "bilinear", as in
            the paper, accuracy on small photographs is lower by up to five points.
        chunk: Views per forward pass; None chooses.
        autocast: Reduced-precision dtype for `torch.autocast`, or None.
        output_key: Where the logits are if the model returns a dict or an object.
        features: What a fitted head reads in addition to the logits: names of modules for their inputs, or with ":out"
            after the name for their outputs. "auto" finds the outputs of the model's blocks and the inputs of its last
            linear layers; None uses logits only.
        calibrator: From Evidence to Evidence; usually set by `fit`. "batch" balances each batch alone, and assumes that
            all classes are equally frequent in it.
        gate: How much better than the bare model's answer a new answer must be: "cautious" (works for any model, and
            costs up to two points on upright images), a number (at 0 a new answer must gain as much as it may lose;
            larger numbers, up to 2.3, are stricter), a `Gate`, or None for no gate. `fit` sets a far better one.

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

    def __copy__(self) -> Self:
        """Return a wrapper with the same parts, of which either may be given others."""
        other = type(self).__new__(type(self))
        other.__dict__.update({**self.__dict__, "_modules": dict(self._modules)})
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a wrapper with parts of its own; waits for other threads' searches, whose hooks would come along."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        with alone(self.model):
            other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: modules as they are while no other thread searches, around the same tensors."""
        if not isinstance(self.model, nn.Module):
            return dict(self.__dict__)
        with alone(self.model):
            parts = [part for module in self.modules() for part in vars(module).values()]
            tensors = [part for part in (*parts, *self.parameters(), *self.buffers()) if isinstance(part, Tensor)]
            return copy.deepcopy(self.__dict__, {id(tensor): tensor for tensor in tensors})

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
        return self._blocks(images, torch.cat, keep=attrgetter("logits"))  # what else was found need not pile up

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
            images: (n, C, H, W) raw pixels in 0 … 1, or a loader of such batches (labels in the batches are ignored).
            labels: Not needed and not used; only for scikit-learn, which passes them.
            held_out: Other upright images, on which the gate's thresholds are set. With None, a fifth of many `images`
                is held out; with few images, each quarter is held out once. Give images that the classifier was not
                trained on, if you can: it is too sure of its training images.
            method: "head" (the best; needs 50 images, else "balance"), "balance" (a linear map of the logits), "bias"
                (one number per class), "prototypes", "neighbours", or "keep" (only a gate, for the present calibrator).
            promise: Points of upright accuracy that the search may cost at most; None fits no gate.
            recipe: How a head is trained; see `HeadRecipe`.
            early_exit: Whether surely upright images may get their answer after one view.
            crop: Side of the centre square that the model sees, if the fit images are larger.
            seed: Seed of all random choices.
            progress: True shows progress and the time left on a terminal; a function is called with (stage, views done,
                views in all).

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
        result = self._blocks(images, concatenate)
        if log.isEnabledFor(logging.DEBUG):  # the sums wait for the device
            seen, kept = int(result.views.sum()), int(result.gated.sum())
            log.debug("searched %d images: %d views, %d kept by the gate", len(result), seen, kept)
        return result

    @torch.no_grad()
    def _blocks(
        self, images: Tensor, join: Callable[[list[Any]], Joined], *, keep: Callable[[SearchResult], Any] | None = None
    ) -> Joined:
        """Return what the search finds, for as many images at a time as memory should hold.

        Args:
            images: (B, C, H, W), raw pixels.
            join: Makes one of the results of all blocks.
            keep: What of each result is joined; all of it where nothing is said.
        """
        predictor = self.predictor
        check_images(images)
        if images.is_meta:
            raise ShapeError("images must have numbers; these lie on the meta device, which holds shapes alone.")
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
            parts = []
            for rows in searcher.rows(images, bare):
                result = result_of(
                    images[rows],
                    bare.logits[rows],
                    searcher.answer(images, bare, rows),
                    single_logit=predictor.single_logit,
                    padding=self.padding,
                    interpolation=self.interpolation,
                    multilabel=self.plan.confidence == "multilabel",
                )
                parts.append(result if keep is None else keep(result))
            return join(parts)

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
        if other.calibrator is self.calibrator:
            _check_lattice(self.calibrator, self.plan, other.plan)
        other.predictor.seen = self.predictor.seen
        other.report = copy.deepcopy(self.report)
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


def _check_lattice(calibrator: object, fitted: Plan, plan: Plan) -> None:
    """Raise `OptionError` where a head that proposes poses of the lattice it was fitted with would be asked for others.

    Args:
        calibrator: What was fitted.
        fitted: The plan that it was fitted for.
        plan: The plan that it shall serve.
    """
    proposals = getattr(calibrator, "proposals", None)
    if proposals is None or plan.lattice is None:
        return
    if proposals.poses != plan.choices or fitted.levels != plan.levels:
        raise OptionError(
            "the fitted head proposes poses of another lattice than this search has. Fit again, or use lattice=None."
        )


def _warn_of_labels(labels: object) -> None:
    """Say that labels are not needed; raise `OptionError` for what looks like images."""
    if getattr(labels, "ndim", 1) > 2:
        raise OptionError("fit takes one set of images. Others are held out by name: fit(images, held_out=others).")
    warnings.warn("fit needs no labels, and uses none: it learns from the model's own answers.", stacklevel=3)


def _uncompiled(robust: ITS, images: Tensor) -> Tensor:
    """Return what `forward` does, outside of a graph that is being made; importing what it takes costs a second."""
    eager: Callable[[ITS, Tensor], Tensor] = torch.compiler.disable(ITS.forward)
    return eager(robust, images)
