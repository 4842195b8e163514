"""The rows of table 1: whose rule each is, how many images it sees, and the method that stands for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torch import Tensor

from headtilt.calibration.head import thorough
from headtilt.geometry.warp import invert
from headtilt.paper.baselines.reference import ReferenceITS
from headtilt.paper.experiments.methods import Predict, Prediction, Setting, build
from headtilt.paper.experiments.reproduce.study import Study
from headtilt.paper.experiments.reproduce.trial import (
    QUICK_FITTING,
    QUICK_TRAINING,
    Fitting,
    Training,
    baseline,
    canonicalising,
)
from headtilt.paper.train import NOTEBOOK as NOTEBOOK_RECIPES

TRAINED = {"STN": "stn", "STN³": "icstn", "DTN": "dtn", "ETN": "etn-official"}  # ETN: the official architecture
# Two more of our own: one without strides finds any angle, trained on it or not; the same, cut open at 0°, does not.
OWN_ETN = {"ETN, ours": "etn", "ETN, ours, angle cut": "etn-cut"}
# Rules for the same tree, from those printed to ours; the methods of `headtilt evaluate` that stand for them.
RULES = {
    "ITS³": "paper3",
    "ITS³, by confidence": "paper3-confidence",
    "ITS³, by energy": "tree3-energy",
    "ITS³, sum over the tree": "tree3-sum",
    "ITS⁵": "paper5",
    "ITS⁵, by confidence": "paper5-confidence",
    "ITS⁵, by energy": "tree5-energy",
    "ITS⁵, sum over the tree": "tree5-sum",
}
UNFITTED = tuple(name for name in RULES if name.startswith("ITS³"))
PUBLIC = {"public code, ITS³": 3, "public code, ITS⁵": 5}
OURS = ("balanced", "head")  # ungated: all images here are tilted, and a gate is for those that are not
# Who a row's rule is from, for readers.
ORIGIN = {
    **dict.fromkeys(("CNN", *TRAINED, "ITS³", "ITS⁵", "ITS³, by confidence", "ITS⁵, by confidence"), "paper"),
    **dict.fromkeys(PUBLIC, "public code"),
}
Recipe = Literal["zoo", "notebook"]
Protocol = Literal["each", "run", "paper"]
Make = Callable[[int, Setting], Predict]  # of module-level functions, so that rows can be sent to workers


@dataclass(frozen=True)
class Share:
    """How much of a data set is used.

    Attributes:
        images: Test images per run with a transform for each image.
        run_images: Test images per run with one transform for all of them.
        paper_images: Test images of a run by the paper's protocol; one such run for each network.
        public_images: Test images per run for the public code, which runs every pass through the whole network.
        chosen_images: Validation images by which the unfitted rule is chosen, for each network.
        passes: Monte-Carlo passes.
        fewer: By what the images for training and fitting are divided, where their number is limited.
    """

    images: int
    run_images: int
    paper_images: int
    public_images: int
    chosen_images: int = 500
    passes: int = 50
    fewer: int = 1


@dataclass(frozen=True)
class Size:
    """How much to do.

    Attributes:
        runs: Draws of transforms; run r uses network r mod `networks`.
        networks: Trained networks.
        trained: Networks of each method that trains its own (STN, STN³, DTN, ETN, augmented); 0 leaves these out.
        share: Of a data set.
        shares: Of data sets with another share.
        training: How baselines are trained.
        fitting: How our own methods are fitted.
        head: Which of the methods of `headtilt evaluate` stands for the head.
        augmented: Whether to retrain with augmentation, which takes many times longer than the network itself.
        notebook: Whether to train networks as the authors' notebook does, and search with them, too.
    """

    runs: int
    networks: int
    trained: int
    share: Share
    shares: Mapping[str, Share] = field(default_factory=dict)
    training: Training = Training()  # noqa: RUF009 - frozen
    fitting: Fitting = Fitting()  # noqa: RUF009 - frozen
    head: str = "head-features"
    augmented: bool = True
    notebook: bool = True


# A dropout layer sits behind the first convolution of GTSRB's network, so that its passes share next to nothing: each
# costs as much as a whole network does on the other sets, and there are fewer images.
FULL = Size(
    25,
    5,
    5,
    Share(1000, 400, 5000, 100),
    {"mnist": Share(1000, 400, 3991, 100), "gtsrb": Share(60, 20, 392, 10, chosen_images=100)},
    fitting=Fitting(12_000, thorough()),
)
QUICK = Size(
    2,
    1,
    1,
    Share(24, 8, 40, 8, chosen_images=16, passes=2),
    {"gtsrb": Share(6, 2, 8, 2, chosen_images=4, passes=1, fewer=5)},
    training=QUICK_TRAINING,
    fitting=QUICK_FITTING,
    head="fast",
    augmented=False,
    notebook=False,
)


@dataclass(frozen=True)
class Row:
    """A row of the table for one data set.

    Attributes:
        name: What the table calls it.
        networks: How many networks share the runs.
        images: Test images per run, by protocol.
        predict: Makes the method from a seed and that seed's setting.
        batch: Images per call, where the method must be fed little by little.
        redrawn: Whether every run draws dropout masks of its own. Masks that all views share favour some classes: with
            one draw per network its five runs would share their luck.
        recipe: How its networks are trained.
    """

    name: str
    networks: int
    images: dict[Protocol, int]
    predict: Make
    batch: int | None = None
    redrawn: bool = False
    recipe: Recipe = "zoo"


def rows(study: Study, size: Size, dataset: str) -> list[Row]:
    """Return the rows of a data set."""
    part = size.shares.get(dataset, size.share)
    images: dict[Protocol, int] = {"each": part.images, "run": part.run_images, "paper": part.paper_images}
    training = size.training
    if training.images is not None:
        training = replace(training, images=training.images // part.fewer)

    def trained(method: str) -> Make:
        return partial(trained_by, study, method, dataset, training)

    searched = searches(size, part, images, 128 if study.device.startswith("cuda") else 16)
    table = [Row("CNN", size.networks, images, named("vanilla"))]
    if size.trained:
        table += [Row(name, size.trained, images, trained(method)) for name, method in (TRAINED | OWN_ETN).items()]
    table += searched
    if size.augmented and size.trained:
        table.append(Row("augmented CNN", size.trained, images, named("augmented")))
    others = {"TTA, mean": "tta-mean", "TTA, max": "tta-max", "annealing": "anneal", "balanced": "balanced"}
    table += [
        Row(name, size.networks, images, named(method)) for name, method in (others | {"head": size.head}).items()
    ]
    if size.notebook and dataset in NOTEBOOK_RECIPES:
        # For the printed numbers alone, which are those of the paper's protocol.
        table += [
            replace(row, recipe="notebook", images={"paper": row.images["paper"]}) for row in [table[0], *searched]
        ]
    return table


def searches(size: Size, part: Share, images: dict[Protocol, int], slow: int) -> list[Row]:
    """Return the rows of the tree and of the public code.

    Args:
        size: Of the item.
        part: Of the data set.
        images: Test images per run, by protocol.
        slow: Images per call of the public code.
    """
    few: dict[Protocol, int] = {"each": part.public_images, "paper": min(images["paper"], 10 * part.public_images)}
    table = [Row(name, size.networks, images, named(method), redrawn=True) for name, method in RULES.items()]
    table += [
        Row(name, size.networks, few, partial(public, levels), slow, redrawn=True) for name, levels in PUBLIC.items()
    ]
    return table


def named(method: str) -> Make:
    """Return what makes a method of `headtilt evaluate`."""
    return partial(_build, method)


def _build(method: str, _: int, given: Setting) -> Predict:
    return build(method, given)


def trained_by(study: Study, method: str, dataset: str, training: Training, seed: int, _: Setting) -> Predict:
    """Return the method that asks a canonicaliser trained with a seed."""
    return canonicalising(baseline(study, method, dataset, seed, training))


def public(levels: int, _: int, given: Setting) -> Predict:
    """Return the method that searches so many levels as the paper's public code does."""
    return public_code(ReferenceITS(given.model, levels=levels, passes=given.mc_passes, seed=given.seed))


def public_code(search: ReferenceITS) -> Predict:
    """Return the method that searches as the paper's public code does."""

    def predict(images: Tensor) -> Prediction:
        found = search.search(images)
        return Prediction(found.labels, invert(found.pose), 0)

    return predict
