"""Every method that `headtilt evaluate` compares, by name: a function from a setting to a predictor of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.calibration.gate import Promise
from headtilt.calibration.head import HeadRecipe
from headtilt.errors import OptionError
from headtilt.geometry.groups import Group, rotation
from headtilt.geometry.warp import Padding, invert, warp
from headtilt.its import ITS
from headtilt.model.predictor import Predictor
from headtilt.paper.baselines.orient import fit_orienter
from headtilt.paper.baselines.tta import tta
from headtilt.paper.experiments.recall import Memory, Recalling
from headtilt.presets import accurate, affine_levels, fast, paper3, paper5
from headtilt.search.anneal import Anneal
from headtilt.search.tree import Tree

BUNDLE = "bundle"
ORACLE = "oracle"
ORIENT = "orient"


@dataclass(frozen=True)
class Prediction:
    """What a method says of a batch.

    Attributes:
        labels: (B,).
        perturbation: (B, 3, 3), how it thinks each image was transformed; None where it does not say.
        views: How many views of each image the model was shown, on average.
    """

    labels: Tensor
    perturbation: Tensor | None
    views: float


Predict = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class Told:
    """The bare classifier, told how each image was transformed: what perfect poses would be worth.

    Attributes:
        predictor: The classifier.
        padding: How the images are padded when they are turned back.
    """

    predictor: Predictor
    padding: Padding = "auto"

    def __call__(self, images: Tensor) -> Prediction:
        """Raise `OptionError`: nobody told it."""
        raise OptionError(f"{ORACLE} must be told the true transforms of its {len(images)} images; ask it with `ask`.")

    def told(self, images: Tensor, transforms: Tensor) -> Prediction:
        """Return what it says of images (B, C, H, W) whose transforms (B, 3, 3) are undone by one warp."""
        back = invert(transforms.to(images.device))
        upright = warp(images, back, padding=self.padding, interpolation="bicubic")  # as sharp as the search's views
        return Prediction(self.predictor(upright).labels, transforms, 1)


def ask(predict: Predict, images: Tensor, transforms: Tensor) -> Prediction:
    """Return what a method says of images (B, C, H, W); the true transforms (B, 3, 3) are for `Told` alone."""
    return predict.told(images, transforms) if isinstance(predict, Told) else predict(images)


@dataclass(frozen=True)
class Setting:
    """What a method is given.

    Attributes:
        model: The trained classifier, in eval mode.
        levels: The groups to search.
        fit_images: Returns unlabelled upright images (n, C, H, W) in [0, 1], or raises where there are none.
        held_out: Returns other such images, unseen in training, for gates, if there are any.
        padding: How views are padded.
        crop: Side of the square that the model sees, where fit images are larger.
        mc_passes: Monte-Carlo passes of the paper's methods.
        promise: What a gate must keep.
        recipe: How heads are trained.
        seed: Seeds everything random.
        retrained: Returns the network that users would train instead, by name ("augmented", "last-layer").
        fits: Wrappers fitted so far, each with a gate: a method with it and the same one without share a calibrator.
        bundle: A folder that `ITS.save` wrote for the model, for the method of that name.
        memory: What unfitted searches of the model were told already; None asks anew, as whoever measures time must.
    """

    model: nn.Module
    levels: tuple[Group, ...]
    fit_images: Callable[[], Tensor]
    held_out: Callable[[], Tensor] | None = None
    padding: Padding = "auto"
    crop: int | None = None
    mc_passes: int = 10
    promise: Promise = Promise()  # noqa: RUF009 - frozen
    recipe: HeadRecipe = HeadRecipe()  # noqa: RUF009 - frozen
    seed: int = 0
    retrained: Callable[[str], nn.Module] | None = None
    fits: dict[Any, ITS] = field(default_factory=dict)
    bundle: Path | None = None
    memory: Memory | None = None


def _vanilla(setting: Setting) -> Predict:
    predictor = Predictor(setting.model)

    def predict(images: Tensor) -> Prediction:
        identity = torch.eye(3).expand(len(images), 3, 3)
        return Prediction(predictor(images).labels, identity, 1)

    return predict


def _oracle(setting: Setting) -> Predict:
    return Told(Predictor(setting.model), setting.padding)


def _orient(setting: Setting) -> Predict:
    orienter = fit_orienter(
        Predictor(setting.model, features="auto"),
        setting.fit_images(),
        setting.levels,
        padding=setting.padding,
        crop=setting.crop,
        hidden=setting.recipe.hidden,
        seed=setting.seed,
    )

    def predict(images: Tensor) -> Prediction:
        labels, poses = orienter(images)
        return Prediction(labels, invert(poses), 2)

    return predict


def _tta(merge: Any) -> Callable[[Setting], Predict]:
    def build(setting: Setting) -> Predict:
        predictor = Predictor(setting.model)

        def predict(images: Tensor) -> Prediction:
            probabilities, undone = tta(predictor, images, merge, padding=setting.padding)
            return Prediction(probabilities.argmax(1), None if merge == "mean" else undone, 17)

        return predict

    return build


def searching(robust: ITS) -> Predict:
    """Return the method that asks a wrapper."""

    def predict(images: Tensor) -> Prediction:
        result = robust.search(images)
        return Prediction(result.labels, result.perturbation, float(result.views.float().mean()))

    return predict


def _its(options: Callable[[Setting], dict[str, Any]]) -> Callable[[Setting], Predict]:
    def build(setting: Setting) -> Predict:
        chosen = {"gate": None, **options(setting)}
        robust = ITS(setting.model, padding=setting.padding, seed=setting.seed, **chosen)
        if setting.memory is not None:
            robust.predictor = Recalling.of(robust.predictor, setting.memory)
        return searching(robust)

    return build


def fitted(setting: Setting, method: Any, options: dict[str, Any], *, gate: bool) -> ITS:
    """Return a wrapper fitted on the setting's unlabelled images.

    Every fit has a gate, since images that take turns tell it of the calibrator while that is fitted; without one, the
    same calibrator answers alone. What a head learns does not depend on which views are looked at later, so that all
    searches with the same other options share a fit.
    """
    search = options["search"]
    learns = {**options, "search": fast(setting.levels)["search"]} if method == "head" else options
    key = (
        method,
        *sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in learns.items()),
    )
    known = setting.fits.get(key)
    if known is None:
        known = setting.fits[key] = _fit(setting, method, learns)
    return known.but(search=search, **({} if gate else {"gate": None}))


def _fit(setting: Setting, method: Any, options: dict[str, Any]) -> ITS:
    return ITS(setting.model, padding=setting.padding, seed=setting.seed, **options).fit(
        setting.fit_images(),
        held_out=None if setting.held_out is None else setting.held_out(),
        method=method,
        promise=setting.promise,
        recipe=setting.recipe,
        crop=setting.crop,
        seed=setting.seed,
    )


def _fitted(
    method: str, options: Callable[[Setting], dict[str, Any]], gate: bool = False
) -> Callable[[Setting], Predict]:
    def build(setting: Setting) -> Predict:
        return searching(fitted(setting, method, options(setting), gate=gate))

    return build


def _retrained(name: str) -> Callable[[Setting], Predict]:
    def build(setting: Setting) -> Predict:
        if setting.retrained is None:
            raise OptionError(f"{name} retrains a network of the zoo; it has no meaning for a model of your own.")
        predictor = Predictor(setting.retrained(name))
        return lambda images: Prediction(predictor(images).labels, None, 1)

    return build


def _bundle(setting: Setting) -> Predict:
    if setting.bundle is None:
        raise OptionError("bundle measures what headtilt fit wrote: give its folder with --bundle.")
    return searching(ITS.load(setting.bundle, setting.model))


def _joint(setting: Setting, **changes: Any) -> dict[str, Any]:
    return {**accurate(setting.levels), **changes}


def by_confidence(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `paper3` or `paper5` with the most confident hypothesis as the answer."""
    return {**options, "search": replace(options["search"], ranking="last")}


def ours(options: dict[str, Any], readout: str) -> dict[str, Any]:
    """Return our walk in place of that of `paper3` or `paper5`: grids that close, straight ends, no acceptance.

    Args:
        options: Of the preset.
        readout: "incumbent" answers by the hypothesis of lowest energy, "marginal" by the sum over the whole tree.
    """
    search = Tree(samples=options["search"].samples, hypotheses=options["search"].hypotheses)
    levels = affine_levels()
    return {
        **options,
        "levels": [*levels, *levels[: len(options["levels"]) - len(levels)]],
        "search": search,
        "readout": readout,
    }


METHODS: dict[str, Callable[[Setting], Predict]] = {
    "vanilla": _vanilla,
    ORACLE: _oracle,
    "tta-mean": _tta("mean"),
    "tta-max": _tta("max"),
    "energy": _its(lambda _: {"levels": [rotation()], "search": Tree(hypotheses=1, confidence="energy")}),
    "default": _its(lambda setting: {"levels": setting.levels, "gate": "cautious"}),
    "paper3": _its(lambda setting: paper3(setting.mc_passes)),
    "paper5": _its(lambda setting: paper5(setting.mc_passes)),
    "paper3-confidence": _its(lambda setting: by_confidence(paper3(setting.mc_passes))),
    "paper5-confidence": _its(lambda setting: by_confidence(paper5(setting.mc_passes))),
    "tree3-energy": _its(lambda setting: ours(paper3(setting.mc_passes), "incumbent")),
    "tree5-energy": _its(lambda setting: ours(paper5(setting.mc_passes), "incumbent")),
    "tree3-sum": _its(lambda setting: ours(paper3(setting.mc_passes), "marginal")),
    "tree5-sum": _its(lambda setting: ours(paper5(setting.mc_passes), "marginal")),
    "joint": _its(lambda setting: _joint(setting, readout="incumbent")),
    "anneal": _its(
        lambda setting: _joint(
            setting, search=Anneal(budget=accurate(setting.levels)["search"].budget), readout="incumbent"
        )
    ),
    "balanced-batch": _its(lambda setting: _joint(setting, calibrator="batch")),
    ORIENT: _orient,
    "augmented": _retrained("augmented"),
    "last-layer": _retrained("last-layer"),
}
FITTED: dict[str, tuple[str, Callable[[Setting], dict[str, Any]]]] = {
    "bias": ("bias", _joint),
    "balanced": ("balance", _joint),
    "head": ("head", lambda setting: _joint(setting, features=None)),
    "head-features": ("head", _joint),
    "knn": ("neighbours", lambda setting: _joint(setting, readout="incumbent")),
    "prototype": ("prototypes", lambda setting: _joint(setting, readout="incumbent")),
    "fast": ("head", lambda setting: fast(setting.levels)),
    "accurate": ("head", lambda setting: accurate(setting.levels)),
}
for _name, (_method, _options) in FITTED.items():
    METHODS[_name] = _fitted(_method, _options)
    METHODS[f"{_name}+gate"] = _fitted(_method, _options, gate=True)


def build(name: str, setting: Setting) -> Predict:
    """Return the method of that name, fitted where it needs fitting; "bundle" is what was fitted before."""
    check_method(name)
    return _bundle(setting) if name == BUNDLE else METHODS[name](setting)


def reads_fit_images(name: str) -> bool:
    """Return whether the method of that name is fitted on the setting's unlabelled images."""
    return name == ORIENT or name.removesuffix("+gate") in FITTED


def check_method(name: str) -> None:
    """Raise `OptionError` unless there is a method of that name."""
    if name not in METHODS and name != BUNDLE:
        raise OptionError(f"method must be one of {', '.join([*METHODS, BUNDLE])}; got {name!r}.")
