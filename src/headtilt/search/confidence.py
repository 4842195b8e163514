"""The paper's three measures of how canonical a view looks, as pure functions on sampled orbits.

Convention:
    Confidence is higher where a view looks more canonical, always. The word *energy* means E = −logsumexp, which is low
    there. The paper prints the group confidence with a minus before the second derivative of the energy; taken at its
    word that prefers hills. What it means, and what is computed here, is the curvature of the energy's valley.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.compiler import is_compiling

from headtilt.errors import OptionError, one_of, positive
from headtilt.geometry.groups import FiniteGroup, Group, OneParameterGroup
from headtilt.model.evidence import Evidence

# In the group's own units, as a share of its reach: about 26° of a full turn (20° to 30° is best on rotated MNIST).
SMOOTHING_SHARE = 1 / 7
Border = Literal["straight", "nearest"]
BORDERS = ("straight", "nearest")


@dataclass(frozen=True)
class Orbit:
    """Which group was sampled, and how finely.

    Attributes:
        group: The group of the level.
        samples: Number of samples N along the orbit.
    """

    group: Group
    samples: int


@dataclass(frozen=True)
class Scattered(Orbit):
    """Views that lie in no order: what your own measure is given in a joint search or in annealing.

    Attributes:
        group: The first of the levels.
        samples: Number of views V.
        levels: All of them, of which every view has a parameter.
    """

    levels: tuple[Group, ...] = ()


Confidence = Callable[[Evidence, Orbit], Tensor]


def energy(evidence: Evidence, orbit: Orbit) -> Tensor:  # noqa: ARG001
    """Return the negative energy logsumexp_y f(y | x) (…, N); eq. 4."""
    return evidence.logits.logsumexp(-1)


def bayesian(evidence: Evidence, orbit: Orbit) -> Tensor:  # noqa: ARG001
    """Return the negative entropy, in bits, of the mean prediction (…, N); eqs. 5 and 6."""
    probabilities = evidence.log_probs.exp()
    # xlogy is 0 at p = 0, where p·log p would be NaN.
    return torch.special.xlogy(probabilities, probabilities).sum(-1) / math.log(2)


def multilabel(evidence: Evidence, orbit: Orbit) -> Tensor:  # noqa: ARG001
    """Return the joint energy Σ_y log(1 + exp z_y), negated (…, N), of labels that are each there or not.

    A sure no counts nothing: where a view shows nothing that the model knows, it says no to everything (Wang et al.,
    "Can multi-label classification networks know what they don't know?", 2021).
    """
    return F.softplus(evidence.logits).sum(-1)


def group(evidence: Evidence, orbit: Orbit, *, width: float | None = None, border: Border = "straight") -> Tensor:
    """Return the curvature of the smoothed energy along the orbit (…, N); eq. 7 and theorem "Group Confidence".

    Args:
        evidence: Along the last axis but one of the logits lie the N samples of the orbit.
        orbit: The group and its number of samples.
        width: Standard deviation of the Gaussian in the group's own units (radians, shear, …; log-factor for scale);
            None takes a seventh of the group's reach.
        border: See `curvature_operator`.

    On the finite reflection group, where no curvature exists, this is the negative energy.
    """
    if isinstance(orbit.group, FiniteGroup):
        return -evidence.energy
    operator = curvature_operator(orbit.group, orbit.samples, width, border)
    return evidence.energy @ operator.T.to(evidence.energy)


def curvature_operator(
    group: OneParameterGroup, samples: int, width: float | None = None, border: Border = "straight"
) -> Tensor:
    """Return the (N, N) matrix that smooths along the orbit and takes the second difference over ‖T_ĝ − T_ĝ²‖²_F.

    The energy is padded once, smoothed at the positions −1 … N, and then differenced.

    Args:
        group: Periodic ones wrap around, whatever the border.
        samples: Number of samples N along the orbit.
        width: See `group`.
        border: What lies beyond the ends of an orbit. "straight" goes on along the line through the last two samples,
            so that an energy without curvature scores 0 everywhere. "nearest" repeats the last sample, as the paper
            does: an energy that falls towards an end then has a kink there, which scores like a shallow valley.
    """
    if width is not None:
        positive("width", width)
    check_curvature(samples)
    one_of("border", border, BORDERS)
    return torch.tensor(_curvature(group, samples, width, border), dtype=torch.float64)


@lru_cache(maxsize=256)
def _curvature(
    group: OneParameterGroup, samples: int, width: float | None, border: Border
) -> tuple[tuple[float, ...], ...]:
    """Return the rows of `curvature_operator`.

    Plain numbers, worked out by numpy: a graph that is being traced holds neither tensors from outside of it nor the
    loops that make these.
    """
    step = group.step(samples)
    deviation = (width if width is not None else group.reach * SMOOTHING_SHARE) / step
    offsets = np.arange(-samples, samples + 1)
    weights = np.exp(-0.5 * (offsets / deviation) ** 2)
    padded = _padding(samples, samples + 1, group.periodic, border)
    smooth = np.lib.stride_tricks.sliding_window_view(padded, len(offsets), axis=0) @ (weights / weights.sum())
    second = smooth[:-2] - 2 * smooth[1:-1] + smooth[2:]
    generator = _exponential(step * np.array(group.algebra))
    length = np.linalg.norm(generator - generator @ generator)
    return tuple(map(tuple, (second / length**2).tolist()))


def _padding(samples: int, beyond: int, periodic: bool, border: Border) -> NDArray[np.float64]:
    """Return the matrix (N + 2 · beyond, N) that pads an orbit at both ends."""
    place = np.arange(-beyond, samples + beyond)
    identity = np.eye(samples)
    if periodic:
        return identity[place % samples]
    end = place.clip(0, samples - 1)
    if border == "nearest":
        return identity[end]
    # The line through an end and its neighbour, as far beyond the end as the place is.
    inner = np.where(end == 0, 1, samples - 2)
    return identity[end] + np.abs(place - end)[:, None] * (identity[end] - identity[inner])


def _exponential(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp of a small matrix (3, 3), by its series."""
    term = total = np.eye(3)
    for order in range(1, 40):
        term = term @ matrix / order
        total = total + term
    return total


def check_curvature(samples: int) -> None:
    """Raise `OptionError` unless an orbit of so many samples has a curvature."""
    if samples < 3:
        raise OptionError(f"samples must be at least 3 for group confidence, which is a curvature; got {samples}.")


# The group confidence, and the same with the paper's padding, to reproduce it.
CURVATURES: dict[str, Border] = {"group": "straight", "group-nearest": "nearest"}
MEASURES: dict[str, Confidence] = {
    "energy": energy,
    "bayesian": bayesian,
    "multilabel": multilabel,
    **{name: partial(group, border=border) for name, border in CURVATURES.items()},
}


def resolve(confidence: str | Confidence, width: float | None = None) -> Confidence:
    """Return the measure of that name, or the callable itself."""
    if callable(confidence):
        return confidence
    if not isinstance(confidence, str) or confidence not in MEASURES:
        names = ", ".join(map(repr, MEASURES))
        raise OptionError(f"confidence must be one of {names} or a callable; got {confidence!r}.")
    return (
        partial(group, width=width, border=CURVATURES[confidence]) if is_curvature(confidence) else MEASURES[confidence]
    )


def confidence_of_views(measure: str | Confidence, evidence: Evidence, orbit: Orbit, active: Tensor) -> Tensor:
    """Return the confidence (B, K, N) of views, −inf where the hypothesis (B, K) is not active; NaN is an error."""
    confidence = resolve(measure)(evidence, orbit)
    expected = evidence.logits.shape[:-1]
    if not isinstance(confidence, Tensor) or confidence.shape != expected:
        got = tuple(confidence.shape) if isinstance(confidence, Tensor) else type(confidence).__name__
        raise OptionError(f"confidence must return a tensor (B, K, N) = {tuple(expected)}; got {got}.")
    confidence = confidence.masked_fill(~active[..., None], float("-inf"))
    if not is_compiling() and bool(confidence.isnan().any()):
        raise OptionError("confidence returned NaN. Check the measure on logits that are very large or −inf.")
    return confidence


def confidence_of_scattered(
    measure: str | Confidence, evidence: Evidence, looked: Tensor, levels: tuple[Group, ...]
) -> Tensor:
    """Return the confidence (B, V) of views that lie in no order, −inf where the model was not shown them.

    Args:
        measure: A pointwise one.
        evidence: (B, 1, V, …), see `Evidence.as_orbit`.
        looked: (B, V), which views the model was shown.
        levels: The groups, of which every view has a parameter.
    """
    orbit, one = Scattered(levels[0], looked.shape[1], levels), torch.ones_like(looked[:, :1])
    said = confidence_of_views(measure, evidence, orbit, one)[:, 0]
    return said.masked_fill(~looked, float("-inf"))


def is_curvature(confidence: str | Confidence) -> bool:
    """Return whether a measure of that name is a group confidence, whose values differ in scale from group to group."""
    if isinstance(confidence, str):
        return confidence in CURVATURES
    return getattr(confidence, "func", confidence) is group
