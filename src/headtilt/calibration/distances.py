"""Calibrators that score a view by how far its features lie from those of upright images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headtilt.calibration.balance import InSingle
from headtilt.errors import OptionError
from headtilt.model.evidence import Evidence


class Prototypes(InSingle):
    """Class scores from the distance of a view's features to the mean feature vector of each class.

    Args:
        means: (Y, D).
        scale: One number: how many logits one mean within-class squared distance is worth.
    """

    means: Tensor
    scale: Tensor

    def __init__(self, means: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means.detach().clone())
        self.register_buffer("scale", scale.detach().clone())

    def forward(self, evidence: Evidence) -> Evidence:
        """Return the evidence with negative scaled squared distances as logits."""
        features = _need_features(evidence)
        flat = features.flatten(0, -2)
        # The same formula for any number of views: by default torch changes it with their number.
        distances = torch.cdist(flat, self.means.to(flat), compute_mode="use_mm_for_euclid_dist") ** 2
        return Evidence((-distances * self.scale).reshape(*features.shape[:-1], -1))


class Neighbours(InSingle):
    """Class scores from the cosine similarity of a view's features to its nearest upright ones of each class.

    Args:
        bank: (Y, S, D), unit feature vectors of each class, repeated where a class has fewer than S.
        nearest: How many of the nearest to average.
        scale: How many logits a similarity of one is worth.
        absent: (Y,), classes of which there was no upright image; None for those whose vectors are all zero.
    """

    bank: Tensor
    absent: Tensor

    def __init__(self, bank: Tensor, nearest: int = 3, scale: float = 20.0, absent: Tensor | None = None) -> None:
        super().__init__()
        self.nearest, self.scale = nearest, scale
        self.register_buffer("bank", bank.detach().clone())
        self.register_buffer("absent", (bank == 0).flatten(1).all(1) if absent is None else absent.detach().clone())

    def get_extra_state(self) -> Tensor:
        """Return the two numbers."""
        return torch.tensor([self.nearest, self.scale], dtype=torch.float32)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over two numbers."""
        nearest, self.scale = state.tolist()
        self.nearest = int(nearest)

    def forward(self, evidence: Evidence) -> Evidence:
        """Return the evidence with scaled similarities as logits."""
        features = _need_features(evidence)
        classes, size, _ = self.bank.shape
        scores = []
        for part in F.normalize(features.flatten(0, -2), dim=-1).split(4096):
            similarity = (part @ self.bank.to(part).flatten(0, 1).T).reshape(len(part), classes, size)
            nearest = similarity.topk(min(self.nearest, size), dim=-1).values.mean(-1)
            scores.append(nearest.masked_fill(self.absent.to(part.device), -2.0))  # below any cosine
        return Evidence((torch.cat(scores) * self.scale).reshape(*features.shape[:-1], -1))


def fit_prototypes(upright: Evidence, labels: Tensor) -> Prototypes:
    """Return class means of upright features (n, D) under the classifier's own labels; absent classes lie far away."""
    features, classes = _need_features(upright), upright.logits.shape[-1]
    member = F.one_hot(labels, classes).to(features)
    counts = member.sum(0)
    means = member.T @ features / counts.clamp_min(1)[:, None]
    means[counts == 0] = features.abs().max() * 100
    within = (features - means[labels]).square().sum(1).mean().clamp_min(1e-6)
    return Prototypes(means, 10 / within)


def fit_neighbours(upright: Evidence, labels: Tensor, *, per_class: int = 100) -> Neighbours:
    """Return the first upright unit features (n, D) of each class as a bank; classes without any never win."""
    features, classes = F.normalize(_need_features(upright), dim=-1), upright.logits.shape[-1]
    bank = features.new_zeros(classes, per_class, features.shape[-1])
    absent = torch.ones(classes, dtype=torch.bool, device=features.device)
    for label in range(classes):
        own = features[labels == label][:per_class]
        if len(own):
            bank[label] = own[torch.arange(per_class, device=own.device) % len(own)]
            absent[label] = False
    return Neighbours(bank, absent=absent)


def _need_features(evidence: Evidence) -> Tensor:
    if evidence.features is None:
        raise OptionError("distance scores need features. Wrap an nn.Module with a linear layer, or name the module.")
    return evidence.features
