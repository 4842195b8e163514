"""One hypothesis profile and one thread for everybody: the same examples and sums on every machine, and no clock."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

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
