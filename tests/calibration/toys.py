"""What several tests of fitting need: small searches to fit, and what is read off them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import headtilt as ht
from headtilt.model.evidence import Evidence
from headtilt.search.found import Found, root_beam
from tests.toys import ungated


def joint(net: nn.Module, **options) -> ht.ITS:
    return ungated(net, **{"search": "joint", "budget": 24, "readout": "marginal", **options})


def bias_of(net: nn.Module, images, **options) -> torch.Tensor:
    return joint(net, padding="zeros").fit(images, method="bias", promise=None, **options).calibrator.bias


def parts(robust: ht.ITS) -> tuple[object, ...]:
    return robust.calibrator, robust.gate, robust.predictor, robust.padding, robust.report


def twin(robust: ht.ITS) -> ht.ITS:
    """Another wrapper of the same parts, which may be given others."""
    other = copy.copy(robust)
    other._modules = dict(robust._modules)
    return other


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


def found(marginal: torch.Tensor, near: torch.Tensor, root: torch.Tensor | None = None) -> Found:
    root = marginal if root is None else root
    return Found(root_beam(Evidence(marginal)), (), root, marginal, near, torch.ones(len(marginal), dtype=torch.long))
