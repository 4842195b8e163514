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
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headtilt.errors import OptionError, positive
from headtilt.geometry.groups import FiniteGroup, Group, OneParameterGroup
from headtilt.model.evidence import Evidence

# In the group's own units, as a share of its reach: about 26° of a full turn (20° to 30° is best on rotated MNIST).
SMOOTHING_SHARE = 1 / 7


@dataclass(frozen=True)
class Orbit:
    """Which group was sampled, and how finely.

    Attributes:
        group: The group of the level.
        samples: Number of samples N along the orbit.
    """

    group: Group
    samples: int


Confidence = Callable[[Evidence, Orbit], Tensor]


def energy(evidence: Evidence, orbit: Orbit) -> Tensor:  # noqa: ARG001
    """Return the negative energy logsumexp_y f(y | x) (…, N); eq. 4."""
    return -evidence.energy


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


def group(evidence: Evidence, orbit: Orbit, *, width: float | None = None) -> Tensor:
    """Return the curvature of the smoothed energy along the orbit (…, N); eq. 7 and theorem "Group Confidence".

    Args:
        evidence: Along the last axis but one of the logits lie the N samples of the orbit.
        orbit: The group and its number of samples.
        width: Standard deviation of the Gaussian in the group's own units (radians, shear, …; log-factor for scale);
            None takes a seventh of the group's reach.

    On the finite reflection group, where no curvature exists, this is the negative energy.
    """
    if isinstance(orbit.group, FiniteGroup):
        return -evidence.energy
    operator = curvature_operator(orbit.group, orbit.samples, width)
    return evidence.energy @ operator.T.to(evidence.energy)


def curvature_operator(group: OneParameterGroup, samples: int, width: float | None = None) -> Tensor:
    """Return the (N, N) matrix that smooths along the orbit and takes the second difference over ‖T_ĝ − T_ĝ²‖²_F.

    Periodic groups wrap around; the others repeat their end values ("nearest"), which flattens the curvature there.
    """
    if width is not None:
        positive("width", width)
    check_curvature(samples)
    parameters = group.grid(samples)
    step = float(parameters[samples // 2 + 1])
    radius = samples
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    deviation = (width if width is not None else group.reach * SMOOTHING_SHARE) / step
    kernel = torch.softmax(-0.5 * (offsets / deviation) ** 2, dim=0)
    smooth = _along_orbit(samples, offsets, kernel, group.periodic)
    second = _along_orbit(
        samples, torch.arange(-1, 2), torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64), group.periodic
    )
    generator = group.generator(samples)
    length = torch.linalg.matrix_norm(generator - generator @ generator)
    return second @ smooth / length**2


def check_curvature(samples: int) -> None:
    """Raise `OptionError` unless an orbit of so many samples has a curvature."""
    if samples < 3:
        raise OptionError(f"samples must be at least 3 for group confidence, which is a curvature; got {samples}.")


def _along_orbit(samples: int, offsets: Tensor, weights: Tensor, periodic: bool) -> Tensor:
    """Return the (N, N) matrix of the correlation Σ_o weights[o] · value[n + o] with wrapped or repeated ends."""
    reached = torch.arange(samples)[:, None] + offsets.long()
    column = reached % samples if periodic else reached.clamp(0, samples - 1)
    return torch.zeros(samples, samples, dtype=torch.float64).scatter_add_(1, column, weights.expand(samples, -1))


MEASURES: dict[str, Confidence] = {"energy": energy, "bayesian": bayesian, "group": group, "multilabel": multilabel}


def resolve(confidence: str | Confidence, width: float | None = None) -> Confidence:
    """Return the measure of that name, or the callable itself."""
    if callable(confidence):
        return confidence
    if not isinstance(confidence, str) or confidence not in MEASURES:
        names = ", ".join(map(repr, MEASURES))
        raise OptionError(f"confidence must be one of {names} or a callable; got {confidence!r}.")
    return partial(group, width=width) if confidence == "group" else MEASURES[confidence]
