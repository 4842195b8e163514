"""The orbit head: a small network that scores views, trained on unlabelled upright images under random tilts.

It reads what the classifier says of one view, at several depths, and gives a score for every class and the log-odds
that the view shows the image upright. An image's class scores are the logsumexp over its views; the target is what the
classifier itself says of the image upright, so no label is needed. The classifier never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.calibration.balance import FEWEST_PER_CLASS, InSingle
from headtilt.calibration.layers import SeededDropout, linear, seed_layers
from headtilt.calibration.proposals import Proposals, above_chance
from headtilt.calibration.sampler import Orbits
from headtilt.errors import ModelError, OptionError, at_least, is_number, one_of, positive
from headtilt.model.evidence import Evidence, floored
from headtilt.search.seen import log_weights

FEWEST_STEPS, MOST_STEPS = 500, 8000
FEWEST_LOOKS, MOST_LOOKS = 3, 12
FIT_VIEWS = 29_000  # of the model: looks that few images leave room for within these are free to take
FEWEST_BALANCED = 5  # images per class from which on a balance tells more than chance
TRUST = 0.5
FARTHEST = 10  # deviations from the mean that a head takes seriously
WEIGHT_DECAY = (0.1, 0.2)  # of a head that scores classes, and of one that scores views
DROPOUT = (0.3, 0.5)  # of a head that has seen more images than it reads numbers, and of one that learns by heart


@dataclass(frozen=True)
class HeadRecipe:
    """How an orbit head is built and trained.

    Attributes:
        source: What the head reads: "features", "logits", or "auto" (features where there are any).
        hidden: Width of its two hidden layers.
        looks: Tilts under which each fit image is looked at; more take longer and help a little. None takes 3, and up
            to 12 where images are few.
        views: Views of each of these, beside the image as it came.
        upright: Share of the looks at which the image is upright, or nearly.
        epochs: Passes over the looks, within 500 to 8,000 optimiser steps; 0 leaves the head untrained.
        batch: Looks per step.
        pose: Weight of finding the right pose beside the right label.
        learning_rate: Of AdamW, falling with a cosine.
    """

    source: str = "auto"
    hidden: int = 256
    looks: int | None = None
    views: int = 15
    upright: float = 0.4
    epochs: int = 8
    batch: int = 32
    pose: float = 0.3
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        one_of("source", self.source, ("auto", "features", "logits"))
        at_least("epochs", self.epochs, 0)
        for name in ("hidden", "looks", "views", "batch"):
            if name != "looks" or self.looks is not None:
                at_least(name, getattr(self, name), 1)
        positive("learning_rate", self.learning_rate)
        if not is_number(self.pose) or not 0 <= float(self.pose) < float("inf"):
            raise OptionError(f"pose must be a weight of at least 0; got {self.pose!r}.")
        if not is_number(self.upright) or not 0 <= float(self.upright) < 1:
            raise OptionError(f"upright must be a share from 0 up to, but not, 1; got {self.upright!r}.")

    def looks_at(self, images: int, views: int) -> int:
        """Return under how many tilts each of so many images is looked at, from so many views under each."""
        if self.looks is not None:
            return self.looks
        return min(max(FIT_VIEWS // (images * views), FEWEST_LOOKS), MOST_LOOKS)

    def steps(self, looks: int) -> int:
        """Return how many optimiser steps so many looks are worth."""
        wanted = -(-looks * self.epochs // self.batch)
        return min(max(wanted, FEWEST_STEPS), MOST_STEPS) if self.epochs else 0


def thorough() -> HeadRecipe:
    """Return a recipe for those who have many images, and a GPU or time: `--thorough` on the command line.

    Wider head; every image is seen under 24 tilts (default: 3, or up to 12 if images are few).
    """
    return HeadRecipe(hidden=512, looks=24, views=22, epochs=12, batch=256)


class OrbitHead(InSingle):
    """A small network that scores each view for each class, on top of balanced logits, and tells if it is upright.

    With few images per class it gives one number per view ("how canonical does this look") instead of one per class.
    Before training it adds nothing, so a head that cannot learn is the balance it started from.

    Args:
        bias: (Y,), the balance.
        mean: (D,), mean of the inputs.
        deviation: (D,), their standard deviation.
        source: "features" or "logits".
        hidden: Width of the hidden layers.
        per_class: Whether it scores classes or views.
        dropout: Share of what each layer reads that is hidden from it while it is trained.
    """

    bias: Tensor
    mean: Tensor
    deviation: Tensor
    # Chosen with the gate, on images that had no part in the fit:
    bare_weight: Tensor  # of the bare answer beside the head's, see `search.run.with_bare`
    guess_weight: Tensor  # of a guess of which poses are likely, beside what the head says of their views

    def __init__(
        self,
        bias: Tensor,
        mean: Tensor,
        deviation: Tensor,
        *,
        source: str,
        hidden: int,
        per_class: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("bias", bias.detach().clone())
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("deviation", deviation.detach().clone())
        self.register_buffer("bare_weight", mean.new_ones(()))
        self.register_buffer("guess_weight", mean.new_zeros(()))
        self.log_scale = nn.Parameter(mean.new_zeros(()))
        self.prior = nn.Parameter(mean.new_zeros(()))
        self.trust = nn.Parameter(mean.new_full((), TRUST))
        self.proposals: Proposals | None = None
        outputs = len(bias) if per_class else 1
        self.network = nn.Sequential(
            SeededDropout(dropout),
            linear(len(mean), hidden),
            nn.GELU(),
            SeededDropout(dropout),
            linear(hidden, hidden),
            nn.GELU(),
            SeededDropout(dropout),
            linear(hidden, outputs + 1),
        ).to(mean)

    def forward(self, evidence: Evidence) -> Evidence:
        """Return the head's scores (…, Y) as logits, and the log-odds (…, 1) that a view is upright."""
        logits = floored(evidence.logits).to(self.bias)
        inputs = logits if self.source == "logits" else evidence.features
        if inputs is None:
            raise OptionError("this head reads features, and the evidence has none. Fit it with source='logits'.")
        # Far outside of what it was fitted on, a network says anything: what it reads is bounded.
        standard = ((inputs.to(self.mean) - self.mean) / self.deviation).clamp(-FARTHEST, FARTHEST)
        outputs = self.network(standard)
        added, upright = outputs[..., :-1], outputs[..., -1:]
        return Evidence((logits + self.bias) * self.log_scale.exp() + added + self.trust * upright, upright=upright)

    def as_it_came(self, evidence: Evidence) -> Evidence:
        """Return the same of images as they came, which are upright more often than under any other pose."""
        said = self(evidence)
        if self.proposals is None or evidence.features is None:
            return Evidence(said.logits + self.prior, upright=said.upright)
        guesses = self.proposals(evidence.features)
        prior = self.guess_weight * above_chance(guesses)
        return Evidence(said.logits + self.prior, upright=said.upright, poses=guesses, pose_prior=prior)


def fit_head(
    orbits: Orbits,
    targets: Tensor,
    bias: Tensor,
    recipe: HeadRecipe,
    seed: np.random.SeedSequence,
    progress: Callable[[int, int], None] | None = None,
    rows: Tensor | None = None,
    images: int | None = None,
) -> OrbitHead:
    """Return a head trained with the orbit-marginal likelihood; the same seed gives the same head.

    Args:
        orbits: Fit images under some tilt, (n, V, …).
        targets: (n, Y), what the classifier says of each of them upright, as probabilities.
        bias: (Y,), the balance, where the head starts from; with very few images per class it starts from none.
        recipe: See `HeadRecipe`.
        seed: Seeds initial weights, dropout and batches.
        progress: Called with (steps done, steps in all).
        rows: Which of the orbits are fitted on; all of them where nothing is said.
        images: By how many images its kind is chosen; one for each row where nothing is said. The heads of one fit are
            of one kind.
    """
    evidence = orbits.evidence
    rows = torch.arange(len(targets), device=targets.device) if rows is None else rows
    images = len(rows) if images is None else images
    source = recipe.source if recipe.source != "auto" else "features" if evidence.features is not None else "logits"
    inputs = floored(evidence.logits) if source == "logits" else evidence.features
    if inputs is None:
        raise OptionError("source='features' needs a model whose features can be read; use source='logits'.")
    per_class = images >= FEWEST_PER_CLASS * len(bias)
    generator = torch.Generator(inputs.device).manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
    mean, deviation = moments(inputs, rows)
    dropout = DROPOUT[0 if per_class and images >= len(mean) else 1]
    if images < FEWEST_BALANCED * len(bias):
        bias = torch.zeros_like(bias)
    head = OrbitHead(
        bias.to(mean), mean, deviation, source=source, hidden=recipe.hidden, per_class=per_class, dropout=dropout
    )
    seed_layers(head.network, generator)
    head.train()
    steps = recipe.steps(len(rows))
    fused = inputs.device.type == "cuda"  # a GPU starts a hundred small operations a step, and waits for each
    optimiser = torch.optim.AdamW(_groups(head, per_class, recipe.learning_rate), fused=fused)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    order = torch.empty(0, dtype=torch.long, device=inputs.device)
    weights = log_weights(orbits.poses)
    with torch.enable_grad():
        for step in range(steps):
            if progress is not None and step % 20 == 0:
                progress(step, steps)
            if len(order) < recipe.batch:
                fresh = torch.randperm(len(rows), generator=generator, device=inputs.device)
                order = torch.cat([order, rows[fresh]])
            some, order = order[: recipe.batch], order[recipe.batch :]
            loss = label_loss(head, said := head(evidence.at(some)), weights[some], targets[some])
            if recipe.pose:
                loss = loss + recipe.pose * pose_loss(said, orbits.aim[some], orbits.upright[some])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return head.eval().requires_grad_(False)


def label_loss(head: OrbitHead, said: Evidence, weights: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of the labels (n, Y) pooled over views (n, V, …) whose evidence counts by `weights`."""
    first = said.logits[:, :1] + head.prior
    return F.cross_entropy((torch.cat([first, said.logits[:, 1:]], dim=1) + weights[..., None]).logsumexp(1), targets)


def pose_loss(said: Evidence, aim: Tensor, came_upright: Tensor) -> Tensor:
    """Return the cross-entropy of the pose: which of the views is upright, and whether the image as it came is.

    Args:
        said: What the head says of views (n, V, …).
        aim: (n, V), how close to upright each view comes.
        came_upright: (n,), whether the first is upright, or nearly.
    """
    if said.upright is None:
        raise OptionError("a pose loss needs a head that tells upright views.")
    upright = said.upright[..., 0]
    share = aim / aim.sum(1, keepdim=True).clamp_min(1e-6)
    which = -(share * upright.log_softmax(1)).sum(1).mean()
    return which + F.binary_cross_entropy_with_logits(upright[:, 0], came_upright.to(upright))


def moments(inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation (D,) of inputs (n, V, D) at `rows`, which may be in half precision, in single."""
    count, total, squares = 0, torch.zeros((), device=inputs.device), torch.zeros((), device=inputs.device)
    for some in rows.split(1024):
        views = inputs[some].flatten(0, 1).double()
        count, total, squares = count + len(views), total + views.sum(0), squares + views.square().sum(0)
    mean = total / count
    if not bool(squares.isfinite().all()):
        raise ModelError(
            "the model's features are NaN or infinite. Check its weights, or name other modules with features=. "
            "Nothing was fitted."
        )
    deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
    return mean.float(), deviation.float().clamp_min(1e-3)


def _groups(head: OrbitHead, per_class: bool, rate: float) -> list[dict[str, Any]]:
    """Return the parameters by kind: scale and prior are two numbers, learn faster, and nothing draws them to zero."""
    decay = WEIGHT_DECAY[0 if per_class else 1]
    return [
        {"params": list(head.network.parameters()), "weight_decay": decay, "lr": rate},
        {"params": [head.log_scale, head.prior, head.trust], "weight_decay": 0.0, "lr": 5 * rate},
    ]
