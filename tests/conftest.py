"""One hypothesis profile, one thread and short fits for everybody: the same on every machine, and no clock."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.toys import TinyNet, shorten_fits, tiny_images

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    # Fixtures here are values that no test changes.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ci")
# The tensors here are tiny: more threads cost more than they give.
torch.set_num_threads(1)
# Most tests are of what is done with a fit, and not of how good it is: a few steps of training will do.
shorten_fits()


@pytest.fixture
def net() -> TinyNet:
    """A small network with dropout and weights written down, not drawn."""
    return TinyNet().eval()


@pytest.fixture
def images() -> torch.Tensor:
    """Five different smooth images (5, 1, 12, 12)."""
    return tiny_images(5)
