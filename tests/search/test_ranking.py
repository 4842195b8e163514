"""The final order of the hypotheses, and the walk that draws them at random."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headtilt.search.found import root_beam
from headtilt.search.tree import RANKINGS, Tree, count_labels, rank, search
from tests.toys import evidence_of, stable_id

from .tables import DOWN, RIGHT, Table, places, random_table, seeds

# --- ranking ----------------------------------------------------------------------------------------------------------


def test_the_rankings_can_all_disagree():
    """Label 0 is best at the end, label 1 along the way, and label 2 is what most views show."""
    energy, labels = torch.full((1, 5, 5), 9.0), torch.full((1, 5, 5), 2)
    energy[0, 0, 2], labels[0, 0, 2] = -4, 0  # level 1: columns 0, 1 and 3 survive
    energy[0, 1, 2], labels[0, 1, 2] = -7, 1
    energy[0, 3, 2], labels[0, 3, 2] = -1, 2
    energy[0, 0, 0], labels[0, 0, 0] = -6, 0  # level 2: 6, 5 and 2
    energy[0, 1, 2] = -5.5
    energy[0, 3, 0] = -2
    table = Table(energy, labels)
    order = {ranking: table.walk(hypotheses=3, ranking=ranking).beam.labels[0].tolist() for ranking in RANKINGS}
    assert order == {"energy": [0, 1, 2], "last": [0, 1, 2], "accumulated": [1, 0, 2], "support": [2, 0, 1]}


def test_where_confidence_is_not_energy_the_two_rankings_differ():
    """Under −confidence the worst survivor at the end is the one of lowest energy."""
    walks = {
        ranking: random_table(1, batch=1, classes=5).walk(
            levels=(RIGHT,), hypotheses=3, ranking=ranking, confidence=lambda evidence, orbit: evidence.energy
        )
        for ranking in ("energy", "last")
    }
    energies = {ranking: found.beam.evidence.energy[0].tolist() for ranking, found in walks.items()}
    assert energies["energy"] == sorted(energies["energy"])
    assert energies["last"] == sorted(energies["last"], reverse=True)
    assert set(energies["energy"]) == set(energies["last"])


@pytest.mark.parametrize(
    ("confidence", "ranking"),
    [("group", "energy"), ("energy", "last"), ("bayesian", "last"), (lambda evidence, orbit: evidence.energy, "last")],
    ids=stable_id,
)
def test_only_curvatures_are_ranked_by_energy_unless_asked_for(confidence, ranking):
    assert Tree((RIGHT,), samples=5, confidence=confidence).ranking == ranking
    assert Tree((RIGHT,), samples=5, confidence=confidence, ranking="support").ranking == "support"


@given(seed=seeds, ranking=st.sampled_from(RANKINGS), depth=st.integers(1, 3))
def test_the_final_order_is_the_one_the_trace_implies(seed, ranking, depth):
    table = random_table(seed, batch=1, classes=5)
    found = table.walk(levels=(RIGHT, DOWN, RIGHT)[:depth], hypotheses=3, ranking=ranking)
    counts = dict.fromkeys(range(5), 0)
    counts[int(table.root().labels)] += 1
    sums = {0: 0.0}
    for level in found.trace:
        here = 2
        for slot, sample in itertools.product(range(level.active.shape[1]), range(5)):
            if bool(level.active[0, slot]) and sample != here:
                counts[int(level.labels[0, slot, sample])] += 1
        flat = level.confidence.flatten(1)[0]
        sums = {
            slot: sums[int(c) // 5] + float(flat[int(c)]) for slot, c in enumerate(level.chosen[0].tolist()) if c >= 0
        }
    last = found.trace[-1]
    slots = [slot for slot, c in enumerate(last.chosen[0].tolist()) if c >= 0]
    label = {slot: int(last.labels.flatten(1)[0, int(last.chosen[0, slot])]) for slot in slots}
    confidence = {slot: float(last.confidence.flatten(1)[0, int(last.chosen[0, slot])]) for slot in slots}
    keys = {
        "energy": lambda slot: confidence[slot],  # the confidence of these walks
        "last": lambda slot: confidence[slot],
        "accumulated": lambda slot: sums[slot],
        "support": lambda slot: (counts[label[slot]], confidence[slot]),
    }
    expected = sorted(slots, key=keys[ranking], reverse=True)
    active = found.beam.active[0]
    assert found.beam.labels[0][active].tolist() == [label[slot] for slot in expected]
    assert_close(found.beam.accumulated[0][active], torch.tensor([sums[slot] for slot in expected]).double())


def test_ranking_moves_pose_evidence_and_confidence_together():
    beam = root_beam(evidence_of(torch.zeros(1)))
    beam = replace(
        beam,
        pose=RIGHT.orbit(3)[None],
        evidence=evidence_of(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0, 1, 2]])),
        confidence=torch.tensor([[1.0, 3.0, 2.0]]),
        accumulated=torch.tensor([[9.0, 8.0, 7.0]]),
        active=torch.tensor([[True, True, False]]),
    )
    ranked = rank(beam, "last", torch.tensor([[5, 1, 9, 0]]))
    assert places(ranked.pose, 3) == [(0, 0), (-1, 0), (1, 0)]
    assert ranked.labels.tolist() == [[1, 0, 2]]
    assert ranked.confidence.tolist() == [[3, 1, 2]]
    assert ranked.accumulated.tolist() == [[8, 9, 7]]
    assert ranked.active.tolist() == [[True, True, False]]
    assert rank(beam, "accumulated", torch.zeros(1, 4)).labels.tolist() == [[0, 1, 2]]
    assert rank(beam, "support", torch.tensor([[5, 1, 9, 0]])).labels.tolist() == [[0, 1, 2]]


def test_confidence_decides_ties_of_support_but_never_outweighs_a_view():
    beam = replace(
        root_beam(evidence_of(torch.zeros(1))),
        pose=RIGHT.orbit(3)[None],
        evidence=evidence_of(torch.zeros(1, 3), torch.tensor([[0, 1, 2]])),
        confidence=torch.tensor([[-1e6, 1e6, 1.0]]),
        accumulated=torch.zeros(1, 3),
        active=torch.ones(1, 3, dtype=torch.bool),
    )
    assert rank(beam, "support", torch.tensor([[4, 3, 4, 0]])).labels.tolist() == [[2, 0, 1]]


def test_labels_are_counted_by_class_where_the_hypothesis_is_active():
    labels = torch.tensor([[[0, 1, 1], [2, 2, 2]]])
    assert count_labels(labels, 4).tolist() == [[1, 2, 3, 0]]
    assert count_labels(labels, 4, torch.tensor([[True, False]])).tolist() == [[1, 2, 0, 0]]


# --- Boltzmann traversal ----------------------------------------------------------------------------------------------


def test_boltzmann_probabilities_sum_to_one_for_each_active_hypothesis():
    found = Table(random_table(0).energy).walk(hypotheses=3)  # one label: slots 1 and 2 stay empty
    for level in found.trace:
        total = level.probabilities.sum(-1)
        assert_close(total, level.active.double())
    first = found.trace[0]
    assert_close(
        first.probabilities[:, 0], first.confidence[:, 0].exp() / first.confidence[:, 0].exp().sum(-1, keepdim=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_sampled_traversals_visit_candidates_as_often_as_boltzmann_says(temperature):
    energy = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.3])[None, :, None].expand(1, 5, 5)
    draws, counts = 800, torch.zeros(5)
    table = Table(energy)
    for seed in range(draws):
        tree = Tree(
            (RIGHT,),
            samples=5,
            hypotheses=1,
            confidence="energy",
            traversal="boltzmann",
            temperature=temperature,
            seed=seed,
        )
        counts[int(search(table.look, table.root(), tree).trace[0].chosen)] += 1
    expected = (-energy[0, :, 0] / temperature).softmax(0)
    chi_squared = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    assert chi_squared < 18.5  # the 99.9 % quantile with four degrees of freedom
    level = table.walk(levels=(RIGHT,), traversal="boltzmann", temperature=temperature).trace[0]
    assert level.temperature == temperature
    assert_close(level.probabilities[0, 0].float(), expected)


def test_the_second_draw_is_made_without_the_labels_already_taken():
    energy, labels = torch.zeros(1, 5, 5), torch.tensor([0, 0, 1, 1, 2])[None, :, None].expand(1, 5, 5).clone()
    for seed in range(20):
        found = Table(energy, labels).walk(levels=(RIGHT,), hypotheses=3, traversal="boltzmann", seed=seed)
        assert sorted(found.beam.labels[0].tolist()) == [0, 1, 2]


@given(seed=seeds)
def test_at_a_low_temperature_the_sampled_traversal_is_the_greedy_one(seed):
    table = random_table(seed)
    greedy = table.walk(hypotheses=3)
    cold = table.walk(hypotheses=3, traversal="boltzmann", temperature=1e-6, seed=seed)
    assert torch.equal(greedy.beam.active, cold.beam.active)
    assert torch.equal(greedy.beam.pose[greedy.beam.active], cold.beam.pose[cold.beam.active])


def test_a_sampled_traversal_follows_its_seed_and_leaves_the_global_stream_alone():
    table = random_table(0)
    state = torch.get_rng_state()
    walks = [table.walk(traversal="boltzmann", temperature=5.0, seed=seed).trace[0].chosen for seed in (1, 1, 2, 3, 4)]
    assert torch.equal(walks[0], walks[1])
    assert any(not torch.equal(walks[0], other) for other in walks[2:])
    assert torch.equal(torch.get_rng_state(), state)


@settings(max_examples=20)
@given(seed=seeds)
def test_confidence_reported_by_a_sampled_traversal_holds_no_noise(seed):
    found = random_table(seed).walk(hypotheses=1, traversal="boltzmann", temperature=2.0, seed=seed)
    assert_close(found.beam.confidence[:, 0], -found.beam.evidence.energy[:, 0])
