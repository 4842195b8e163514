"""A network and images whose every number is written down."""

from __future__ import annotations

import pytest
import torch

from .toys import TinyNet, tiny_images


@pytest.fixture
def net() -> TinyNet:
    """A small network with dropout and weights written down, not drawn."""
    return TinyNet().eval()


@pytest.fixture
def images() -> torch.Tensor:
    """Five different smooth images (5, 1, 12, 12)."""
    return tiny_images(5)
