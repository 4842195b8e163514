"""The ruler: methods side by side on one perturbed test set, over several trained networks."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from headtilt.calibration.fit_images import HELD_OUT_IMAGES
from headtilt.calibration.gate import Promise
from headtilt.calibration.head import HeadRecipe
from headtilt.errors import DataError, OptionError, at_least, one_of
from headtilt.geometry.groups import rotation
from headtilt.geometry.warp import Padding
from headtilt.model.predictor import Predictor
from headtilt.paper import zoo
from headtilt.paper.data import load as load_data
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.perturb import (
    Mode,
    TestSet,
    draw,
    draw_nearly,
    draw_quarters,
    perturb_dataset,
    schedule,
    turn_dataset,
)
from headtilt.paper.experiments.methods import METHODS, Predict, Setting, ask, build, check_method
from headtilt.paper.experiments.retrain import retrained
from headtilt.paper.experiments.scores import CONDITIONS, CONFUSED, Walk, confusions, intervals, row, summarise
from headtilt.progress import Progress
from headtilt.sources import zoo as networks


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
class Measured:
    """What was measured of one network, most of it by the name of a method.

    Attributes:
        conditions: Those that mean something for what it sees.
        rows: What is reported.
        rights: Which images were right, by condition.
        mistakes: Which class was taken for which other, and how often.
        curves: Accuracy at each angle.
        fits: Reports of what was fitted.
    """

    conditions: tuple[str, ...]
    rows: dict[str, dict[str, float | None]]
    rights: dict[str, dict[str, Tensor]]
    mistakes: dict[str, Counter[tuple[str, str]]]
    curves: dict[str, list[float]]
    fits: list[dict[str, Any]]


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
        fit_split: Where these come from: "fit", or "train" for images that the network was trained on.
        mc_passes: Monte-Carlo passes of the paper's methods.
        promise: Points of upright accuracy that a gate may cost.
        recipe: How heads are trained.
        device: Where to run.
        folders: Where to look for data.
        batch: Images per call of a method.
        size: Side to which images of a folder are resized before they are perturbed; None takes them as they are.
        bundle: What the method of that name measures; see `Setting`.
        angles: Degrees at which to measure accuracy with all images turned alike.
        jobs: Networks of the zoo that are measured at a time, each in a process of its own; their images per second
            are then those of a shared machine.
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
    fit_split: str = "fit"
    mc_passes: int = 10
    promise: float = 0.5
    recipe: HeadRecipe = HeadRecipe()  # noqa: RUF009 - frozen
    device: str = "cpu"
    folders: list[Path] | None = None
    batch: int = 500
    size: int | None = None
    bundle: Path | None = None
    angles: tuple[float, ...] = ()
    jobs: int = 1

    def __post_init__(self) -> None:
        at_least("networks", self.networks, 1)
        if at_least("jobs", self.jobs, 1) > 1 and self.models:
            raise OptionError("jobs must be 1 for a model of your own; several are for the networks of the zoo.")
        if not self.methods:
            raise OptionError(f"method must name at least one of: {', '.join(METHODS)}.")
        for name in self.methods:
            check_method(name)
        schedule(self.perturb)
        one_of("mode", self.mode, get_args(Mode))
        one_of("fit_split", self.fit_split, ("fit", "train"))

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return the report: mean and spread over networks for every method.

        Args:
            progress: Called with (what is being measured, steps done, steps in all).
        """
        data = self._load(self.split, self.limit)
        networks = len(self.models) or self.networks
        each = self._side_by_side(progress) if self.jobs > 1 else self._in_turn(data, progress)
        mistakes = {name: sum((one.mistakes[name] for one in each), Counter()) for name in self.methods}
        return {
            "dataset": self.dataset,
            "perturb": self.perturb,
            "seed": self.seed,
            "count": len(data),
            "networks": networks,
            "split": self.split,
            "mode": self.mode,
            "fit_images": self.fit_images,
            "fit_split": self.fit_split,
            "recipe": asdict(self.recipe),
            "conditions": [name for name in CONDITIONS if all(name in one.conditions for one in each)],
            **({"models": [network.name for network in self.models]} if self.models else {}),
            "methods": {
                name: {**summarise([one.rows[name] for one in each]), **intervals([one.rights[name] for one in each])}
                for name in self.methods
            },
            "per_network": {name: [one.rows[name] for one in each] for name in self.methods},
            "fits": [one.fits for one in each],
            "most_confused": {
                name: [[*pair, 100 * times / networks / len(data)] for pair, times in found.most_common(CONFUSED)]
                for name, found in mistakes.items()
            },
            **(
                {
                    "angles": list(self.angles),
                    "accuracy_at_angle": {name: [one.curves[name] for one in each] for name in self.methods},
                }
                if self.angles
                else {}
            ),
        }

    def _in_turn(self, data: Dataset, progress: Progress | None) -> list[Measured]:
        networks = self.models or tuple(self._zoo(seed, progress) for seed in range(self.networks))
        walks = sum(
            -(-len(data) // self.batch) * len(self._conditions(data, network)) + len(self.angles)
            for network in networks
        )
        steps = Steps(progress, len(self.methods) * walks)
        fit_data = cache(lambda: self._load(self.fit_split, self.fit_images))
        return [self._measured(data, number, network, fit_data, steps) for number, network in enumerate(networks)]

    def _side_by_side(self, progress: Progress | None) -> list[Measured]:
        """Return what `_in_turn` would, several networks at a time: a small network leaves most of a GPU idle."""
        steps = Steps(progress, self.networks)
        steps.begin(f"{self.networks} networks, {self.jobs} at a time")
        # A process that was forked could not use the GPU.
        with ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            tasks = [pool.submit(self._alone, number) for number in range(self.networks)]
            for _ in as_completed(tasks):
                steps.advance()
            return [task.result() for task in tasks]

    def _alone(self, number: int) -> Measured:
        data = self._load(self.split, self.limit)
        fit_data = cache(lambda: self._load(self.fit_split, self.fit_images))
        return self._measured(data, number, self._zoo(number, None), fit_data, Steps(None, 0))

    def _measured(
        self, data: Dataset, number: int, network: Network, fit_data: Callable[[], Dataset], steps: Steps
    ) -> Measured:
        """Return what every method makes of one network."""
        own = network.relabelled(data)
        conditions = self._conditions(data, network)
        tests = {name: self._test(name, own, network.crop) for name in conditions}
        network.check(tests["tilted"].images[:1].to(self.device), own.classes)
        setting = self._setting(network, number, fit_data)
        measured = Measured(conditions, {}, {}, {}, {}, [])
        for name in self.methods:
            steps.begin(f"{network.name}: {name}")
            predict = build(name, setting)
            found = self._measure(predict, tests, steps)
            measured.rows[name] = row(found, tests)
            measured.rights[name] = {condition: walk.right for condition, walk in found.items()}
            measured.mistakes[name] = confusions(own, found["tilted"].labels)
            measured.curves[name] = curve(predict, own, self.angles, self.device, network.crop, steps)
        measured.fits.extend(robust.report for robust in setting.fits.values())
        return measured

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
            held_out=held_out if self.dataset in networks.SHAPES and self.split == "test" else None,
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
