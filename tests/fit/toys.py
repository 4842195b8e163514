"""What several tests of fitting need: small searches to fit, and what is read off them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import headtilt as ht
from core.toys import ungated
from headtilt.evidence import Evidence
from headtilt.result import Found
from headtilt.search.tree import root_beam


def joint(net: nn.Module, **options) -> ht.ITS:
    return ungated(net, **{"search": "joint", "budget": 24, "readout": "marginal", **options})


def bias_of(net: nn.Module, images, **options) -> torch.Tensor:
    return joint(net).fit(images, method="balance", promise=None, views=12, **options).calibrator.bias


def parts(robust: ht.ITS) -> tuple[object, ...]:
    return robust.calibrator, robust.gate, robust.predictor, robust.report


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


def found(marginal: torch.Tensor, near: torch.Tensor) -> Found:
    return Found(root_beam(Evidence(marginal)), (), marginal, near, torch.ones(len(marginal), dtype=torch.long))
