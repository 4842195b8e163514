"""Facts that no test stated until a mutant of the core lived through all of them."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.evidence import Evidence
from headtilt.search.anneal import Anneal


@pytest.mark.parametrize(("hot", "cold"), [(2.0, 0.02), (0.5, 0.5)])
def test_steps_of_annealing_shrink_from_hot_to_cold_by_the_root_of_a_geometric_series(hot, cold):
    """Where all poses are equally familiar every step is taken, so that the walk shows the steps themselves."""
    plan = Anneal([ht.rotation()], budget=30, confidence="energy", hot=hot, cold=cold, reach=1e-3, seed=5)
    found = plan.search(lambda index, poses: Evidence(torch.zeros(len(index), 3)), Evidence(torch.zeros(1, 3)))
    walked = found.trace[0].coordinates[0, -20:, 0]
    generator, steps = torch.Generator().manual_seed(5), []
    for number in range(20):
        heat = (cold / hot) ** (number / 19)
        steps.append(float(torch.randn(1, generator=generator)) * torch.pi * 1e-3 * heat**0.5)
        torch.rand((), generator=generator)
    assert_close(walked.diff(), torch.tensor(steps[1:]), rtol=1e-2, atol=1e-6)
