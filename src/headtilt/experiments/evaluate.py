"""The ruler: methods side by side on one perturbed test set, over several trained networks."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from headtilt.data import load as load_data
from headtilt.data.dataset import Dataset
from headtilt.data.perturb import (
    Mode,
    TestSet,
    angles_left,
    draw,
    draw_nearly,
    draw_quarters,
    perturb_dataset,
    pose_errors,
    quarters_found,
    schedule,
    turn_dataset,
    turned_more,
)
from headtilt.errors import DataError, OptionError, at_least, one_of
from headtilt.experiments.methods import METHODS, Predict, Setting, ask, build, check_method
from headtilt.experiments.retrain import retrained
from headtilt.fit_input import HELD_OUT_IMAGES
from headtilt.gate import Promise
from headtilt.groups import rotation
from headtilt.head import HeadRecipe
from headtilt.models import zoo
from headtilt.predictor import Predictor
from headtilt.warp import Padding

# Each condition, and what its accuracy is called. The order is that of the bootstrap's draws: add at the end.
CONDITIONS = {
    "tilted": "accuracy",
    "upright": "upright_accuracy",
    "nearly": "nearly_accuracy",
    "quarter": "quarter_accuracy",
}
WITHIN, TURNED = 15, 10  # degrees: left of a tilt that counts as undone; of an upright image that counts as turned
POSES = ("angle_error_deg", "angle_within_15", "frobenius", "frobenius_batch128", "quarter_found", "upright_turned")
FIELDS = (
    *CONDITIONS.values(),
    *POSES,
    "views_per_image",
    "upright_views_per_image",
    "images_per_second",
)
CONFUSED = 10  # pairs of classes that a report names

Progress = Callable[[str, int, int], None]


class Steps:
    """Batches done so far, told to whoever listens.

    Args:
        progress: Called with (what is being measured, steps done, steps in all); None tells nobody.
        total: Steps in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done, self.what = progress, total, 0, ""

    def begin(self, what: str) -> None:
        """Say what is being measured from now on."""
        self.what = what
        self._tell()

    def advance(self) -> None:
        """Count one more batch."""
        self.done += 1
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)


@dataclass(frozen=True)
class Network:
    """A classifier under test.

    Attributes:
        model: Raw pixels in, logits out.
        name: What the report calls it.
        crop: Side of the square it sees, where the images are larger; None for the whole image.
        padding: How its views should be padded.
        outputs: Which of its outputs stands for each class of the data; None where they are in the same order.
    """

    model: nn.Module
    name: str
    crop: int | None = None
    padding: Padding = "auto"
    outputs: tuple[int, ...] | None = None

    def relabelled(self, data: Dataset) -> Dataset:
        """Return the data with its classes numbered as the network numbers its outputs."""
        if self.outputs is None:
            return data
        names = dict(zip(self.outputs, data.classes, strict=True))
        classes = tuple(names.get(output, "") for output in range(max(self.outputs) + 1))
        return replace(data, labels=torch.tensor(self.outputs)[data.labels], classes=classes)

    def check(self, image: Tensor, classes: Sequence[str]) -> None:
        """Raise `DataError` where the network has fewer outputs for an image (1, C, H, W) than the data has classes."""
        outputs = Predictor(self.model)(image).logits.shape[1]
        if outputs < len(classes):
            raise DataError(f"{self.name} has {outputs} outputs, too few for the {len(classes)} classes of the data.")


@dataclass(frozen=True)
class Walk:
    """What a method said of a test set.

    Attributes:
        right: (n,), whether its label is right.
        labels: (n,), what it said.
        poses: (n, 3, 3), how it thinks each image was transformed; None where it does not say.
        views: Views per image.
        seconds: For all of them.
    """

    right: Tensor
    labels: Tensor
    poses: Tensor | None
    views: float
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """What to measure, in four conditions.

    *upright* images are as they are; *nearly* upright ones are off by ± 3°, ± 3 % in scale and ± half a pixel, so that
    all of them are resampled; *tilted* ones are perturbed by the schedule; *quarter* ones are turned by exactly 90°,
    180° or 270°, no pixel resampled. There are none of the last where the schedule has no whole turn, or where what
    the network sees is not square.

    Attributes:
        dataset: Name or folder.
        methods: Names from `METHODS`, or "bundle".
        perturb: Named schedule.
        networks: How many zoo networks, seeds 0, 1, …; ignored where `models` are given.
        models: Networks of one's own.
        seed: Seeds the transforms and everything that is fitted.
        limit: Test images; None for all.
        split: "test", or "validation" for choosing.
        mode: See `draw`.
        fit_images: Most unlabelled images to fit on.
        mc_passes: Monte-Carlo passes of the paper's methods.
        promise: Points of upright accuracy that a gate may cost.
        recipe: How heads are trained.
        device: Where to run.
        folders: Where to look for data.
        batch: Images per call of a method.
        size: Side to which images of a folder are resized before they are perturbed; None takes them as they are.
        bundle: What the method of that name measures; see `Setting`.
        angles: Degrees at which to measure accuracy with all images turned alike.
    """

    dataset: str
    methods: tuple[str, ...]
    perturb: str = "affine"
    networks: int = 1
    models: tuple[Network, ...] = ()
    seed: int = 0
    limit: int | None = None
    split: str = "test"
    mode: Mode = "each"
    fit_images: int = 6000
    mc_passes: int = 10
    promise: float = 0.5
    recipe: HeadRecipe = HeadRecipe()  # noqa: RUF009 - frozen
    device: str = "cpu"
    folders: list[Path] | None = None
    batch: int = 500
    size: int | None = None
    bundle: Path | None = None
    angles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        at_least("networks", self.networks, 1)
        if not self.methods:
            raise OptionError(f"method must name at least one of: {', '.join(METHODS)}.")
        for name in self.methods:
            check_method(name)
        schedule(self.perturb)
        one_of("mode", self.mode, get_args(Mode))

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return the report: mean and spread over networks for every method.

        Args:
            progress: Called with (what is being measured, steps done, steps in all).
        """
        data = self._load(self.split, self.limit)
        networks = self.models or tuple(self._zoo(seed, progress) for seed in range(self.networks))
        each = [self._conditions(data, network) for network in networks]
        walks = sum(-(-len(data) // self.batch) * len(names) + len(self.angles) for names in each)
        steps = Steps(progress, len(self.methods) * walks)
        rows: dict[str, list[dict[str, float | None]]] = {name: [] for name in self.methods}
        rights: dict[str, list[dict[str, Tensor]]] = {name: [] for name in self.methods}
        mistakes: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in self.methods}
        curves: dict[str, list[list[float]]] = {name: [] for name in self.methods}
        fit_data = cache(lambda: self._load("fit", self.fit_images))
        for number, network in enumerate(networks):
            own = network.relabelled(data)
            tests = {name: self._test(name, own, network.crop) for name in each[number]}
            network.check(tests["tilted"].images[:1].to(self.device), own.classes)
            setting = self._setting(network, number, fit_data)
            for name in self.methods:
                steps.begin(f"{network.name}: {name}")
                predict = build(name, setting)
                found = self._measure(predict, tests, steps)
                rows[name].append(row(found, tests))
                rights[name].append({condition: walk.right for condition, walk in found.items()})
                mistakes[name].update(confusions(own, found["tilted"].labels))
                curves[name].append(curve(predict, own, self.angles, self.device, network.crop, steps))
        return {
            "dataset": self.dataset,
            "perturb": self.perturb,
            "seed": self.seed,
            "count": len(data),
            "networks": len(networks),
            "split": self.split,
            "mode": self.mode,
            "conditions": [name for name in CONDITIONS if all(name in names for names in each)],
            **({"models": [network.name for network in self.models]} if self.models else {}),
            "methods": {name: {**summarise(rows[name]), **intervals(rights[name])} for name in self.methods},
            "per_network": rows,
            "most_confused": {
                name: [[*pair, 100 * times / len(networks) / len(data)] for pair, times in found.most_common(CONFUSED)]
                for name, found in mistakes.items()
            },
            **({"angles": list(self.angles), "accuracy_at_angle": curves} if self.angles else {}),
        }

    def _load(self, split: str, limit: int | None) -> Dataset:
        return load_data(self.dataset, split, folders=self.folders, limit=limit, size=self.size)  # type: ignore[arg-type]

    def _zoo(self, seed: int, progress: Progress | None) -> Network:
        spec = f"{self.dataset}:{seed}"

        def told(done: int, total: int, loss: float) -> None:  # noqa: ARG001
            if progress is not None:
                progress(f"training {spec}", done, total)

        return Network(zoo.load(spec, device=self.device, folders=self.folders, progress=told), spec)

    def _setting(self, network: Network, number: int, fit_data: Callable[[], Dataset]) -> Setting:
        def held_out() -> Tensor:
            return self._load("validation", HELD_OUT_IMAGES).floats()

        return Setting(
            model=network.model,
            levels=schedule(self.perturb).searched,
            fit_images=lambda: fit_data().floats(),
            held_out=held_out if self.dataset in zoo.SHAPES and self.split == "test" else None,
            padding=network.padding,
            crop=network.crop,
            mc_passes=self.mc_passes,
            promise=Promise(self.promise),
            recipe=self.recipe,
            seed=self.seed,
            bundle=self.bundle,
            retrained=None
            if self.models
            else lambda name: retrained(name, self.dataset, number, self.device, self.folders),
        )

    def _conditions(self, data: Dataset, network: Network) -> tuple[str, ...]:
        """Return the conditions that mean something for what a network sees."""
        height, width = data.images.shape[-2:]
        square = network.crop is not None or height == width
        turns = schedule(self.perturb).whole_turn and square
        return tuple(name for name in CONDITIONS if name != "quarter" or turns)

    def _test(self, condition: str, data: Dataset, crop: int | None) -> TestSet:
        """Return the images in one condition."""
        count = len(data)
        if condition == "upright":
            return turn_dataset(data, torch.zeros(count, dtype=torch.long), crop=crop)
        if condition == "quarter":
            return turn_dataset(data, draw_quarters(count, self.seed), crop=crop)
        if condition == "nearly":
            return perturb_dataset(data, draw_nearly(count, max(data.images.shape[-2:]), self.seed), crop=crop)
        return perturb_dataset(data, draw(self.perturb, count, seed=self.seed, mode=self.mode), crop=crop)

    def _measure(self, predict: Predict, tests: Mapping[str, TestSet], steps: Steps) -> dict[str, Walk]:
        """Return what a method says in each condition."""
        first = tests["tilted"]
        # The first call sets things up, which is not to be timed.
        ask(predict, first.images[:1].to(self.device), first.transforms[:1].to(self.device))
        return {condition: self._walk(predict, test, steps) for condition, test in tests.items()}

    def _walk(self, predict: Predict, test: TestSet, steps: Steps) -> Walk:
        """Return what a method says of a test set, batch by batch."""
        said, views, poses = [], 0.0, []
        start = time.perf_counter()
        for rows in torch.arange(len(test)).split(self.batch):
            answer = ask(predict, test.images[rows].to(self.device), test.transforms[rows].to(self.device))
            said.append(answer.labels.cpu())
            views += answer.views * len(rows)
            if answer.perturbation is not None:
                poses.append(answer.perturbation.cpu())
            steps.advance()
        seconds = time.perf_counter() - start
        labels = torch.cat(said)
        found = torch.cat(poses) if poses else None
        return Walk(labels == test.labels, labels, found, views / len(test), seconds)


def row(walks: Mapping[str, Walk], tests: Mapping[str, TestSet]) -> dict[str, float | None]:
    """Return what is reported of one method with one network, by the names in `FIELDS`; None for what is not known."""
    tilted, upright, quarter = walks["tilted"], walks["upright"], walks.get("quarter")
    found: dict[str, float | None] = dict.fromkeys(FIELDS)
    found |= {CONDITIONS[condition]: percent(walk.right) for condition, walk in walks.items()}
    if tilted.poses is not None:
        truth = tests["tilted"].transforms
        found |= pose_errors(tilted.poses, truth)
        found["angle_within_15"] = percent(angles_left(tilted.poses, truth) <= WITHIN)
    if quarter is not None and quarter.poses is not None:
        found["quarter_found"] = percent(quarters_found(quarter.poses, tests["quarter"].transforms))
    if upright.poses is not None:
        found["upright_turned"] = percent(turned_more(upright.poses, TURNED))
    found["views_per_image"], found["upright_views_per_image"] = tilted.views, upright.views
    found["images_per_second"] = len(tilted.right) / tilted.seconds
    return found


def percent(right: Tensor) -> float:
    """Return the share of true entries in percent."""
    return 100 * float(right.double().mean())


def summarise(rows: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of every field over networks, and the sample standard deviation of the accuracies."""
    summary: dict[str, float | None] = {}
    for name in FIELDS:
        known = [value for value in (row[name] for row in rows) if value is not None]
        summary[name] = statistics.fmean(known) if known else None
        if name.endswith("accuracy"):
            summary[f"{name}_std"] = statistics.stdev(known) if len(known) > 1 else 0.0 if known else None
    return summary


def confusions(data: Dataset, said: Tensor) -> Counter[tuple[str, str]]:
    """Return how often which class was taken for which other, by their names; `said` are labels (n,)."""
    names = dict(enumerate(data.classes))
    pairs = zip(data.labels.tolist(), said.tolist(), strict=True)
    # An output of the network that is no class of the data has an empty name or none.
    return Counter((names[true], names.get(label) or str(label)) for true, label in pairs if true != label)


def intervals(rights: Sequence[Mapping[str, Tensor]], *, draws: int = 2000) -> dict[str, list[float] | None]:
    """Return 95 % bootstrap intervals over the images, of the accuracies averaged over networks.

    Args:
        rights: For each network which images it got right (n,), by condition; an interval is None where a condition is
            not there for every network.
        draws: Resamples.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float] | None] = {}
    for condition, name in CONDITIONS.items():
        found[f"{name}_interval"] = None
        if all(condition in right for right in rights):
            mean = torch.stack([right[condition] for right in rights]).double().mean(0)
            picks = torch.randint(len(mean), (draws, len(mean)), generator=generator)
            spread = (100 * mean[picks].mean(1)).quantile(torch.tensor([0.025, 0.975]).double())
            found[f"{name}_interval"] = spread.tolist()
    return found


def curve(
    predict: Predict,
    data: Dataset,
    angles: Sequence[float],
    device: str,
    crop: int | None = None,
    steps: Steps | None = None,
) -> list[float]:
    """Return the accuracy in percent with all images turned by each angle in degrees."""
    accuracies = []
    for angle in angles:
        turn = rotation().matrix(torch.tensor(angle).deg2rad()).expand(len(data), 3, 3)
        test = perturb_dataset(data, turn, crop=crop)
        right = 0
        for rows in torch.arange(len(test)).split(500):
            answer = ask(predict, test.images[rows].to(device), test.transforms[rows].to(device))
            right += int((answer.labels.cpu() == test.labels[rows]).sum())
        accuracies.append(100 * right / len(test))
        if steps is not None:
            steps.advance()
    return accuracies
