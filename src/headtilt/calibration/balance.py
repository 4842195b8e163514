"""Calibrators: what removes the classifier's bias towards some classes, fitted from unlabelled upright images.

A calibrator maps Evidence to Evidence (features are used up on the way) and is frozen once fitted; the classifier
itself never changes. The class score of an image is the logsumexp (or the maximum) of its views' scores, and the target
is the classifier's own answer on the upright image, so no label is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.errors import OptionError
from headtilt.geometry.groups import Group, matrices
from headtilt.geometry.warp import Interpolation, Padding
from headtilt.model.evidence import Calibrator, Evidence, floored
from headtilt.model.predictor import Predictor
from headtilt.search.lattice import elements, lattice

FEWEST_PER_CLASS = 20
BATCH_BALANCE = 1000  # images, at most, by which a batch balances itself


class InSingle(nn.Module):
    """What was fitted: it stays in single precision where the model around it is cast to less.

    Gates and poses are read from small differences of what it says, which half precision would round away.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InSingle:
        def moved(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if tensor.is_meta else tensor.to(changed.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


class Balance(InSingle):
    """One number per class, added to its logit, so that classes win over orbits as often as they occur upright.

    With enough images it is a linear map of the logits, which also knows which classes are mistaken for which.

    Args:
        bias: (Y,).
        weight: (Y, Y), or None for the identity.
    """

    bias: Tensor
    weight: Tensor | None

    def __init__(self, bias: Tensor, weight: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("bias", bias.detach().clone())
        self.register_buffer("weight", None if weight is None else weight.detach().clone())

    def forward(self, evidence: Evidence) -> Evidence:
        """Return the evidence with balanced logits."""
        logits = evidence.logits
        mapped = logits if self.weight is None else floored(logits) @ self.weight.to(logits).T
        return Evidence(mapped + self.bias.to(logits))


def fit_balance(orbit_scores: Tensor, prior: Tensor, *, iterations: int = 200) -> Balance:
    """Return the balance under which the classes won match the prior.

    Minimises mean_i logsumexp_y(R_iy + b_y) − prior·b + ridge·‖b‖²/2, whose gradient is the share of the classes won
    minus the prior. The ridge is a Gaussian prior on b some times as wide as the scores themselves vary: it vanishes
    with many images per class and keeps 1,000 classes sane with few.

    Args:
        orbit_scores: (n, Y), each image's largest logit per class over its orbit (or its logsumexp).
        prior: (Y,), how often each class should win; sums to one.
        iterations: Damped Newton steps.
    """
    scores, prior = orbit_scores.double(), prior.to(orbit_scores).double()
    # A class ruled out by −∞ has no deviation.
    width = scores.std(dim=0, correction=0).nanmean().nan_to_num(1.0).clamp_min(1e-6)
    ridge = 0.1 / (len(scores) * width**2)
    bias = torch.zeros_like(prior)
    for _ in range(iterations):
        share = (scores + bias).softmax(dim=1)
        gradient = share.mean(0) - prior + ridge * bias
        curvature = (share * (1 - share)).mean(0) + ridge
        # Half of a diagonal Newton step, bounded: classes that never win have next to no curvature.
        bias = bias - (0.5 * gradient / curvature.clamp_min(1e-8)).clamp(-1, 1)
        bias = bias - bias.mean()
    return Balance(bias.to(orbit_scores.dtype))


def fit_map(orbits: Tensor, targets: Tensor, balance: Balance, *, best: bool = False, iterations: int = 60) -> Balance:
    """Return the balance widened to a linear map of the logits, where there are images enough to fit one.

    Maximises the likelihood of the classifier's own upright answers under the scores pooled over each orbit, with a
    ridge that draws the map towards the identity: the fewer images, the stronger. A map from fewer than 20 images per
    class would only memorise those images, so the balance is returned as it was.

    Args:
        orbits: (n, V, Y), logits of the views of each fit image.
        targets: (n,), the classifier's own label of each image upright.
        balance: One number per class, where the map starts.
        best: Whether an image is read out by its best view; else over all of them.
        iterations: Of L-BFGS.
    """
    count, _, classes = orbits.shape
    if count < FEWEST_PER_CLASS * classes:
        return balance
    identity = torch.eye(classes, device=orbits.device, dtype=orbits.dtype)
    weight, bias = identity.clone().requires_grad_(), balance.bias.to(orbits).clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=iterations, line_search_fn="strong_wolfe")
    views = floored(orbits)

    def closure() -> Tensor:
        optimiser.zero_grad()
        scores = views @ weight.T + bias
        pooled = scores.amax(1) if best else scores.logsumexp(1)
        loss = F.cross_entropy(pooled, targets) + 2 / count * (weight - identity).square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return Balance(bias, weight)


def checked_calibrator(calibrator: object) -> Calibrator | Literal["batch"] | None:
    """Return the calibrator; raise `OptionError` unless it is a callable, "batch" or None."""
    if calibrator is not None and calibrator != "batch" and not callable(calibrator):
        raise OptionError(f'calibrator must be a callable, "batch" or None; got {calibrator!r}.')
    return cast("Calibrator | Literal['batch'] | None", calibrator)


def balance_of_batch(
    predictor: Predictor,
    images: Tensor,
    levels: Sequence[Group],
    *,
    readout: str,
    padding: Padding,
    interpolation: Interpolation,
) -> Balance:
    """Return the balance under which all classes win equally often over the orbits of this very batch (B, C, H, W)."""
    views = elements(levels) or (24 if len(levels) == 1 else 72)
    poses = matrices(levels, lattice(levels, views).to(images))
    # Evenly from the whole batch, which may have come sorted by class.
    some = images[torch.linspace(0, len(images) - 1, min(len(images), BATCH_BALANCE)).long().to(images.device)]
    seen = predictor.all_views(some, poses, padding=padding, interpolation=interpolation)
    orbits = seen.logits.reshape(len(some), len(poses), -1)
    pooled = orbits.amax(1) if readout == "incumbent" else orbits.logsumexp(1)
    return fit_balance(pooled, torch.full_like(pooled[0], 1 / pooled.shape[1]))
