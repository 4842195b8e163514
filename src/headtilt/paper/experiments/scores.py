"""What is reported of a method: accuracies in four conditions, pose errors, views, speed, and how sure that is."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.perturb import TestSet, angles_left, pose_errors, quarters_found, turned_more

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
