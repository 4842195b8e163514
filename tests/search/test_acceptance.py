"""Algorithm 1's rule of acceptance, against the algorithm written down step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

import headtilt as ht
from headtilt.search.tree import Tree, search
from tests.toys import curvature_by_hand, evidence_of

from .tables import EYE, RIGHT, Table, places, random_table, seeds


def algorithm_1(energy_of, levels, samples: int, confidence: str, start: str) -> tuple[torch.Tensor, bool]:
    """The paper's pseudocode, line by line: the pose h, and whether an improvement ever left h where it was."""
    primal, pose, stayed = 0.0 if start == "zero" else None, EYE, False
    for group in levels:
        orbit = group.orbit(samples)
        energies = [float(energy_of(step @ pose)) for step in orbit]
        rho = [-e for e in energies] if confidence == "energy" else curvature_by_hand(energies, group).tolist()
        if primal is None:
            primal = rho[samples // 2]
        best = max(range(samples), key=lambda place: rho[place])
        if rho[best] > primal:
            primal, pose = rho[best], orbit[best] @ pose
            stayed |= best == samples // 2
    return pose, stayed


def surface(seed: int):
    """A smooth random energy over all poses."""
    weights = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def energy_of(pose: torch.Tensor) -> torch.Tensor:
        return 2 * (2.5 * (pose.flatten(-2) @ weights.T)).sin().sum(-1)

    return energy_of


def searched(seed: int, confidence: str, start: str, levels) -> torch.Tensor:
    energy_of = surface(seed)
    tree = Tree(levels, samples=7, hypotheses=1, confidence=confidence, accept=start)
    found = search(lambda index, poses: evidence_of(energy_of(poses)), evidence_of(energy_of(EYE[None])), tree)
    return found.beam.pose[0, 0]


LEVELS = (ht.rotation(), ht.scale(0.5), ht.shear_x(0.5), ht.translate_x(0.5))
every_start = pytest.mark.parametrize("start", ["zero", "identity"])
every_confidence = pytest.mark.parametrize("confidence", ["energy", "group"])


@every_start
@every_confidence
def test_with_one_hypothesis_the_walk_is_algorithm_1(confidence, start):
    compared, moved = 0, 0
    for seed in range(90):
        expected, stayed = algorithm_1(surface(seed), LEVELS, 7, confidence, start)
        if not stayed:
            assert_close(searched(seed, confidence, start, LEVELS), expected, rtol=0, atol=1e-9)
            compared, moved = compared + 1, moved + (float((expected - EYE).norm()) > 0.01)
    assert compared > 15
    assert moved > 10


@pytest.mark.parametrize(("confidence", "start"), [("energy", "zero"), ("group", "zero"), ("group", "identity")])
def test_an_improvement_that_stays_where_it_is_raises_the_bar_too(confidence, start):
    """Algorithm 1: if the identity is the arg max and beats ρ_primal, h stays and ρ_primal rises."""
    for seed in range(60):
        expected, stayed = algorithm_1(surface(seed), LEVELS, 7, confidence, start)
        if stayed:
            assert_close(searched(seed, confidence, start, LEVELS), expected, rtol=0, atol=1e-9)


def test_without_an_acceptance_rule_a_level_always_moves_to_its_best_view():
    energy = torch.zeros(1, 3, 3)
    energy[0, 0, 1], energy[0, 1, 1], energy[0, 2, 1] = 5.0, 4.0, 6.0
    assert places(Table(energy).walk(levels=(RIGHT,)).beam.pose[:, :1], 3) == [(0, 0)]
    energy[0, 2, 1] = 3.9
    assert places(Table(energy).walk(levels=(RIGHT,)).beam.pose[:, :1], 3) == [(1, 0)]


def test_accepting_from_zero_refuses_views_of_negative_confidence():
    """Confidence −E: all views below 0 is all energies above 0."""
    energy = torch.tensor([[[1.0] * 3, [2.0] * 3, [3.0] * 3]])
    assert places(Table(energy).walk(levels=(RIGHT,)).beam.pose[:, :1], 3) == [(-1, 0)]
    assert places(Table(energy).walk(levels=(RIGHT,), accept="zero").beam.pose[:, :1], 3) == [(0, 0)]
    assert places(Table(energy).walk(levels=(RIGHT,), accept="identity").beam.pose[:, :1], 3) == [(-1, 0)]


def test_accepting_from_the_identity_needs_a_strict_improvement():
    energy = torch.tensor([[[2.0] * 3, [2.0] * 3, [2.0] * 3]])
    assert places(Table(energy).walk(levels=(RIGHT,), accept="identity").beam.pose[:, :1], 3) == [(0, 0)]


@pytest.mark.parametrize("start", ["identity", "zero"])
def test_acceptance_also_compares_with_what_the_level_before_had_reached(start):
    """A second level that offers nothing better leaves the pose of the first."""
    energy = torch.full((1, 3, 3), 9.0)
    energy[0, :, 1] = torch.tensor([-5.0, 0.5, 0.5])
    found = Table(energy).walk(accept=start)
    assert places(found.beam.pose[:, :1], 3) == [(-1, 0)]
    assert float(found.beam.confidence[0, 0]) == 5


@given(seed=seeds)
def test_accepted_hypotheses_never_get_worse_from_level_to_level(seed):
    table = random_table(seed)
    found = table.walk(hypotheses=3, accept="identity")
    start = -table.root().energy
    for image in range(2):
        for confidence in found.beam.confidence[image][found.beam.active[image]].tolist():
            assert confidence >= float(start[image]) - 1e-9
