"""The orbit head: a small network that scores views, trained on unlabelled upright images under random tilts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headtilt.calibrate import FEWEST_PER_CLASS, Balance
from headtilt.errors import OptionError, at_least, is_number, one_of, positive
from headtilt.evidence import Evidence, floored

OrbitSample = Callable[[Tensor, int], tuple[Evidence, Tensor]]
"""``(index (n,), seed) -> Evidence (n, V, …), aim (n, V)``: fit images under random tilts, each seen from V views.

The aim is how much of an image belongs to each of its views: most of it to those that undo its tilt.
"""


@dataclass(frozen=True)
class HeadRecipe:
    """How an orbit head is built and trained.

    Attributes:
        source: What the head reads: "features", "logits", or "auto" (features where there are any).
        hidden: Width of its two hidden layers.
        rounds: Most rounds; each draws fresh tilts for a pool of fit images and trains on them.
        pool: Fit images per round.
        steps: Optimiser steps per round.
        batch: Images per step.
        views: Views of each image's orbit per step, drawn anew each time.
        draws: After how many rounds the tilts of the first come again; None draws new ones each time, which costs
            another look at every image. A slow model on a CPU is served by 2.
        pose: Weight of finding the right view beside the right label: better poses, for little in labels.
        patience: Rounds without improvement on the held-out fit images before it stops.
        learning_rate: Of AdamW, falling with a cosine.
    """

    source: str = "auto"
    hidden: int = 256
    rounds: int = 24
    pool: int = 2048
    steps: int = 64
    batch: int = 128
    views: int = 24
    draws: int | None = None
    pose: float = 0.0
    patience: int = 10
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        one_of("source", self.source, ("auto", "features", "logits"))
        at_least("rounds", self.rounds, 0)
        for name in ("hidden", "pool", "steps", "batch", "views", "patience"):
            at_least(name, getattr(self, name), 1)
        if self.draws is not None:
            at_least("draws", self.draws, 1)
        positive("learning_rate", self.learning_rate)
        if not is_number(self.pose) or not 0 <= float(self.pose) < float("inf"):
            raise OptionError(f"pose must be a weight of at least 0; got {self.pose!r}.")


class OrbitHead(nn.Module):
    """A small network that scores each view for each class, on top of balanced logits.

    With few images per class it gives one number per view ("how canonical does this look") instead of one per class.
    Before training it adds nothing, so a head that cannot learn is the balance it started from.

    Args:
        bias: (Y,), the balance.
        mean: (D,), mean of the inputs.
        deviation: (D,), their standard deviation.
        source: "features" or "logits".
        hidden: Width of the hidden layers.
        per_class: Whether it scores classes or views.
    """

    bias: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(
        self, bias: Tensor, mean: Tensor, deviation: Tensor, *, source: str, hidden: int, per_class: bool
    ) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("bias", bias.detach().clone())
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("deviation", deviation.detach().clone())
        self.log_scale = nn.Parameter(mean.new_zeros(()))
        inputs, outputs, drop = len(mean), len(bias) if per_class else 1, 0.1 if per_class else 0.5
        last = nn.Linear(hidden, outputs)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(
            nn.Dropout(0.0 if per_class else drop),
            nn.Linear(inputs, hidden),
            nn.GELU(),
            nn.Dropout(drop),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Dropout(drop),
            last,
        ).to(mean)

    def forward(self, evidence: Evidence) -> Evidence:
        """Return the evidence with the head's scores (…, Y) as logits."""
        logits = floored(evidence.logits).to(self.bias)
        inputs = logits if self.source == "logits" else evidence.features
        if inputs is None:
            raise OptionError("this head reads features, and the evidence has none. Fit it with source='logits'.")
        standard = (inputs.to(self.mean) - self.mean) / self.deviation
        scores = (logits + self.bias) * self.log_scale.exp() + self.network(standard)
        return Evidence(scores)


def fit_head(
    sample: OrbitSample,
    targets: Tensor,
    train: Tensor,
    held_out: Tensor,
    balance: Balance,
    recipe: HeadRecipe,
    *,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> OrbitHead:
    """Return a head trained with the orbit-marginal likelihood; the same seed gives the same head.

    Args:
        sample: Draws fit images under random tilts and looks at their orbits.
        targets: (n,), the classifier's own label of every fit image upright.
        train: Indices of the images to train on.
        held_out: Indices of those kept for early stopping.
        balance: Where the head starts from.
        recipe: See `HeadRecipe`.
        seed: Seeds tilts, initial weights and batches.
        progress: Called after each round with (round, rounds, held-out loss).
    """
    classes = len(balance.bias)
    check, check_aim = sample(held_out, seed)
    source = recipe.source if recipe.source != "auto" else "features" if check.features is not None else "logits"
    inputs = floored(check.logits) if source == "logits" else check.features
    if inputs is None:
        raise OptionError("source='features' needs a model whose features can be read; use source='logits'.")
    rows = inputs.flatten(0, -2)
    per_class = len(train) >= FEWEST_PER_CLASS * classes
    with torch.random.fork_rng(devices=[rows.device] if rows.device.type == "cuda" else []):
        torch.manual_seed(seed)
        head = OrbitHead(
            balance.bias.to(rows),
            rows.mean(0),
            rows.std(0, correction=0).clamp_min(1e-3),
            source=source,
            hidden=recipe.hidden,
            per_class=per_class,
        )
        optimiser = torch.optim.AdamW(
            head.parameters(), lr=recipe.learning_rate, weight_decay=0.01 if per_class else 0.2
        )

        def held_out_loss() -> float:
            head.eval()
            with torch.no_grad():
                return float(_loss(head, check, check_aim, targets[held_out], recipe.pose))

        best, best_loss, waited = copy.deepcopy(head.state_dict()), held_out_loss(), 0
        kept: dict[int, tuple[Tensor, Evidence, Tensor]] = {}
        for number in range(recipe.rounds):
            draw = number % (recipe.draws or recipe.rounds)
            if draw not in kept:
                pool = train[torch.randperm(len(train))[: recipe.pool].to(train.device)]
                kept[draw] = pool, *sample(pool, hash((seed, number + 1)))
            pool, orbits, aim = kept[draw] if recipe.draws else kept.pop(draw)
            for step, batch in enumerate(_batches(len(pool), recipe.batch, recipe.steps)):
                done = (number + step / recipe.steps) / recipe.rounds
                for group in optimiser.param_groups:
                    group["lr"] = recipe.learning_rate * 0.5 * (1 + torch.cos(torch.tensor(done * torch.pi)).item())
                some = batch.to(train.device)
                seen = torch.randperm(orbits.logits.shape[1])[: recipe.views].to(train.device)
                head.train()
                with torch.enable_grad():
                    views = some[:, None], seen
                    loss = _loss(head, orbits.at(*views), aim[views], targets[pool[some]], recipe.pose)
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                    optimiser.step()
            told = held_out_loss()
            if told < best_loss:
                best, best_loss, waited = copy.deepcopy(head.state_dict()), told, 0
            else:
                waited += 1
            if progress is not None:
                progress(number + 1, recipe.rounds, told)
            if waited >= recipe.patience:
                break
    head.load_state_dict(best)
    return head.eval().requires_grad_(False)


def _batches(count: int, size: int, steps: int) -> Iterator[Tensor]:
    """Yield `steps` index batches, in permutations of all `count` rows."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(count)])
        yield order[:size]
        order = order[size:]


def _loss(head: OrbitHead, orbits: Evidence, aim: Tensor, targets: Tensor, pose: float) -> Tensor:
    """Return the cross-entropy of the labels pooled over views, and of the views for the right label."""
    scores = head(orbits).logits
    loss = F.cross_entropy(scores.logsumexp(1), targets)
    if pose:
        own = scores.gather(2, targets[:, None, None].expand(-1, scores.shape[1], 1))[:, :, 0]
        share = aim / aim.sum(1, keepdim=True).clamp_min(1e-12)  # of the views that are looked at
        loss = loss - pose * (share * own.log_softmax(1)).sum(1).mean()
    return loss
