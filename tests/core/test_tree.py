"""The walk down the tree, on tables of energies and labels that say what every view looks like."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.confidence import Orbit
from headtilt.evidence import Evidence
from headtilt.search.tree import RANKINGS, Tree, count_labels, expand, rank, root_beam, search, select

from .toys import curvature_by_hand, evidence_of, stable_id

RIGHT, DOWN = ht.translate_x(1.0), ht.translate_y(1.0)
EYE = torch.eye(3, dtype=torch.float64)


class Table:
    """Views on a grid of shifts: energy and label of image b, shifted to column i and row j, stand in a table.

    Args:
        energy: (B, N, N), by image, step to the right, step down.
        labels: The same shape.
    """

    def __init__(self, energy: torch.Tensor, labels: torch.Tensor | None = None, classes: int = 6) -> None:
        self.energy = energy.double()
        self.labels = torch.zeros_like(energy, dtype=torch.long) if labels is None else labels
        self.classes = classes
        self.samples = energy.shape[1]
        self.seen: list[tuple[int, int, int]] = []

    def look(self, index: torch.Tensor, poses: torch.Tensor) -> Evidence:
        half = self.samples // 2
        column, row = ((poses[:, axis, 2] * half).round().long() + half for axis in (0, 1))
        # A level may lead beyond the table: beyond its edge the table goes on with its last entry.
        column, row = column.clamp(0, self.samples - 1), row.clamp(0, self.samples - 1)
        return evidence_of(self.energy[index, column, row], self.labels[index, column, row], self.classes)

    def evaluate(self, index: torch.Tensor, poses: torch.Tensor) -> Evidence:
        steps = (poses[:, :2, 2] * (self.samples // 2)).round().long()
        self.seen += [(int(i), int(x), int(y)) for i, (x, y) in zip(index, steps, strict=True)]
        return self.look(index, poses)

    def root(self) -> Evidence:
        batch = len(self.energy)
        return self.look(torch.arange(batch), EYE.expand(batch, 3, 3))

    def walk(self, levels=(RIGHT, DOWN), **options):
        options = {"confidence": "energy", "samples": self.samples, **options}
        return search(self.evaluate, self.root(), Tree(levels, **options))


def random_table(seed: int, batch: int = 2, samples: int = 5, classes: int = 4) -> Table:
    generator = torch.Generator().manual_seed(seed)
    energy = 3 * torch.randn(batch, samples, samples, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (batch, samples, samples), generator=generator)
    return Table(energy, labels, classes)


def places(pose: torch.Tensor, samples: int) -> list[tuple[int, int]]:
    """(column, row) of poses (…, 3, 3), counted from the identity."""
    return [tuple(step) for step in (pose[..., :2, 2] * (samples // 2)).round().long().reshape(-1, 2).tolist()]


seeds = st.integers(0, 10_000)


# --- selection --------------------------------------------------------------------------------------------------------


def select_by_hand(scores: list[float], labels: list[int], keep: int) -> list[int]:
    """Best first, each label once."""
    chosen, used = [], set()
    for place in sorted(range(len(scores)), key=lambda place: -scores[place]):
        if scores[place] > -math.inf and labels[place] not in used:
            chosen.append(place)
            used.add(labels[place])
    return (chosen + [-1] * keep)[:keep]


@given(
    seed=seeds, slots=st.integers(1, 4), samples=st.integers(1, 7), keep=st.integers(1, 6), classes=st.integers(1, 5)
)
def test_selection_takes_the_best_of_all_candidates_one_per_label(seed, slots, samples, keep, classes):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, slots, samples, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.2] = -math.inf
    labels = torch.randint(classes, scores.shape, generator=generator)
    chosen = select(scores, labels, keep)
    for image in range(3):
        expected = select_by_hand(scores[image].flatten().tolist(), labels[image].flatten().tolist(), keep)
        assert chosen[image].tolist() == expected


@given(seed=seeds, order=st.permutations(range(4)))
def test_selection_does_not_depend_on_the_order_of_the_hypotheses(seed, order):
    generator = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(2, 4, 5, generator=generator), torch.randint(4, (2, 4, 5), generator=generator)
    chosen, permuted = select(scores, labels, 3), select(scores[:, order], labels[:, order], 3)
    back = torch.tensor(order)[permuted.clamp_min(0) // 5] * 5 + permuted % 5
    assert torch.equal(torch.where(permuted < 0, -1, back), chosen)


def test_selection_leaves_its_inputs_alone():
    scores, labels = torch.tensor([[[3.0, 2.0, 1.0]]]), torch.tensor([[[0, 1, 2]]])
    assert select(scores, labels, 3).tolist() == [[0, 1, 2]]
    assert scores.tolist() == [[[3.0, 2.0, 1.0]]]


def test_a_hypothesis_may_get_two_children_and_another_none():
    """A joint beam: the best three candidates of level 2 stand under the first hypothesis and the third."""
    energy, labels = torch.zeros(1, 3, 3), torch.zeros(1, 3, 3, dtype=torch.long)
    energy[0, :, 1] = torch.tensor([-3.0, -2.0, -1.0])  # level 1 keeps columns 0, 1, 2, in this order
    labels[0, :, 1] = torch.tensor([0, 1, 2])
    energy[0, 0, 0], labels[0, 0, 0] = -10, 3  # two better children of column 0 …
    energy[0, 0, 2], labels[0, 0, 2] = -9, 4
    energy[0, 2, 0], labels[0, 2, 0] = -8, 5  # … one of column 2, and none of column 1
    found = Table(energy, labels).walk(hypotheses=3)
    assert places(found.trace[1].parents, 3) == [(-1, 0), (0, 0), (1, 0)]
    assert (found.trace[1].chosen[0] // 3).tolist() == [0, 0, 2]
    assert places(found.beam.pose, 3) == [(-1, -1), (-1, 1), (1, -1)]
    assert found.beam.labels.tolist() == [[3, 4, 5]]


def test_one_child_per_parent_would_often_give_another_beam():
    """The reference code keeps exactly one child of each hypothesis; random tables tell the two apart."""
    walks = [random_table(seed, batch=1, classes=6).walk(hypotheses=3) for seed in range(20)]
    shared = [len(set((found.trace[1].chosen[0] // 5).tolist())) < 3 for found in walks]
    assert sum(shared) > 10


# --- the whole walk against plain loops -------------------------------------------------------------------------------


def walk_by_hand(table: Table, image: int, keep: int) -> list[tuple[int, int, int]]:
    """The beam search over two levels of one image in plain loops, by energy: (column, row, label), best first."""
    half = table.samples // 2

    def at(column: int, row: int) -> tuple[float, int]:
        place = image, max(0, min(column + half, 2 * half)), max(0, min(row + half, 2 * half))
        return -float(table.energy[place]), int(table.labels[place])

    beam = [(0, 0)]
    for across in (True, False):
        steps = range(-half, half + 1)
        candidates = [(x + s, y) if across else (x, y + s) for x, y in beam for s in steps]
        ranked = sorted(candidates, key=lambda place: -at(*place)[0])
        beam, used = [], set()
        for place in ranked:
            if at(*place)[1] not in used and len(beam) < keep:
                beam.append(place)
                used.add(at(*place)[1])
    return [(x, y, at(x, y)[1]) for x, y in beam]


@given(seed=seeds, keep=st.integers(1, 6))
def test_the_walk_is_the_beam_search_in_plain_loops(seed, keep):
    table = random_table(seed)
    found = table.walk(hypotheses=keep)
    for image in range(2):
        expected = walk_by_hand(table, image, keep)
        active = found.beam.active[image]
        assert int(active.sum()) == len(expected)
        assert places(found.beam.pose[image][active], 5) == [(x, y) for x, y, _ in expected]
        assert found.beam.labels[image][active].tolist() == [label for _, _, label in expected]


@given(seed=seeds)
def test_an_image_is_searched_as_if_it_were_alone(seed):
    table = random_table(seed, batch=3)
    together = table.walk(traversal="boltzmann", seed=seed)
    for image in range(3):
        alone = Table(table.energy[image : image + 1], table.labels[image : image + 1], 4)
        found = alone.walk(traversal="boltzmann", seed=seed)
        active = together.beam.active[image]
        assert torch.equal(found.beam.active[0], active)
        assert_close(found.beam.pose[0][active], together.beam.pose[image][active])
        assert_close(found.marginal[0], together.marginal[image])
        assert int(found.views) == int(together.views[image])


@given(seed=seeds, order=st.permutations(range(3)))
def test_expansion_and_confidence_follow_the_order_of_the_hypotheses(seed, order):
    table = random_table(seed)
    beam = replace(
        root_beam(table.root()), pose=RIGHT.orbit(3)[None].expand(2, 3, 3, 3), active=torch.ones(2, 3).bool()
    )
    beam = replace(beam, evidence=Evidence(beam.evidence.logits.expand(2, 3, -1)))
    permuted = replace(beam, pose=beam.pose[:, order], evidence=Evidence(beam.evidence.logits[:, order]))
    orbit = Orbit(DOWN, 5)
    (poses, plain), (other_poses, other) = (expand(table.evaluate, one, orbit) for one in (beam, permuted))
    assert torch.equal(poses[:, order], other_poses)
    assert torch.equal(plain.logits[:, order], other.logits)


# --- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_every_view_is_evaluated_once_and_counted(keep):
    table = Table(torch.arange(50.0).reshape(2, 5, 5), torch.arange(50).reshape(2, 5, 5) % 25, 25)
    found = table.walk(hypotheses=keep)
    assert len(table.seen) == len(set(table.seen)) == 2 * (4 + keep * 4)
    assert found.views.tolist() == [1 + 4 + 4 * keep] * 2
    assert not any((x, y) == (0, 0) for _, x, y in table.seen)  # the image as it came is known already


def test_the_first_level_is_evaluated_once_not_once_per_hypothesis():
    table = random_table(0, batch=1)
    table.walk(levels=(RIGHT,), hypotheses=4)
    assert len(table.seen) == 4


def test_the_identity_sample_of_a_level_is_the_hypothesis_it_comes_from():
    table = random_table(1)
    found = table.walk(hypotheses=2)
    first, second = found.trace
    inherited = second.energy[:, :, 2]
    taken = first.energy.flatten(1).gather(1, first.chosen)
    assert torch.equal(inherited, taken)


def test_slots_without_a_hypothesis_are_not_looked_at():
    labels = torch.zeros(2, 5, 5, dtype=torch.long)
    labels[1, 0] = 1  # two labels in the second image, one in the first
    table = Table(random_table(0).energy, labels)
    found = table.walk(hypotheses=3)
    assert found.trace[1].active.tolist() == [[True, False, False], [True, True, False]]
    assert found.views.tolist() == [1 + 4 + 4, 1 + 4 + 8]
    assert len(table.seen) == 4 + 4 + 4 + 8
    empty = ~found.trace[1].active
    assert bool((found.trace[1].confidence[empty] == -math.inf).all())
    assert bool((found.trace[1].energy[empty] == math.inf).all())
    assert found.trace[0].chosen[0].tolist()[1:] == [-1, -1]
    assert found.beam.active[0].tolist() == [True, False, False]


def test_more_hypotheses_than_classes_leave_slots_empty_and_never_repeat_a_label():
    table = random_table(5, classes=3)
    found = table.walk(hypotheses=10)
    for image in range(2):
        labels = found.beam.labels[image][found.beam.active[image]].tolist()
        assert len(labels) == len(set(labels)) <= 3
        assert not bool(found.beam.active[image, len(labels) :].any())


@pytest.mark.parametrize("confidence", ["energy", "bayesian", "group"])
def test_empty_slots_disturb_no_measure(confidence):
    """Energies of +inf and probabilities of 0/0 stay where nobody looks."""
    table = Table(random_table(0).energy)  # one label only
    found = table.walk(hypotheses=4, confidence=confidence, levels=(RIGHT, DOWN, RIGHT))
    assert bool(found.beam.confidence[:, 0].isfinite().all())
    assert found.beam.active.sum(1).tolist() == [1, 1]
    alone = Table(table.energy).walk(hypotheses=1, confidence=confidence, levels=(RIGHT, DOWN, RIGHT))
    assert torch.equal(alone.beam.pose[:, 0], found.beam.pose[:, 0])


@given(seed=seeds, keep=st.integers(1, 4))
def test_the_marginal_is_the_logsumexp_over_all_views_seen(seed, keep):
    table = random_table(seed, batch=2)
    found = table.walk(hypotheses=keep)
    for image in range(2):
        shown = [(0, 0)] + [(x, y) for i, x, y in table.seen if i == image]
        poses = EYE.repeat(len(shown), 1, 1)
        poses[:, :2, 2] = torch.tensor(shown, dtype=torch.float64) / 2
        logits = table.look(torch.full((len(shown),), image), poses).logits
        assert_close(found.marginal[image], logits.logsumexp(0))
        assert int(found.views[image]) == len(shown)


def test_one_sample_per_level_looks_at_nothing_new():
    table = random_table(0)
    found = table.walk(samples=1)
    assert table.seen == []
    assert found.views.tolist() == [1, 1]
    assert_close(found.beam.evidence.logits[:, 0], table.root().logits)
    assert_close(found.marginal, table.root().logits)


def test_features_travel_with_the_hypotheses():
    table = random_table(2)

    def with_features(evidence, poses):
        return Evidence(evidence.logits, poses[:, :2, 2].clone())

    root = with_features(table.root(), EYE.expand(2, 3, 3))
    tree = Tree((RIGHT, DOWN), samples=5, hypotheses=3, confidence="energy")
    found = search(lambda index, poses: with_features(table.evaluate(index, poses), poses), root, tree)
    active = found.beam.active
    assert_close(found.beam.evidence.features[active], found.beam.pose[active][:, :2, 2])


# --- trace ------------------------------------------------------------------------------------------------------------


def test_the_trace_tells_what_each_level_saw():
    table = random_table(4)
    first, second = table.walk(hypotheses=3).trace
    assert (first.group, second.group) == (RIGHT, DOWN)
    assert first.parameters.tolist() == [-1, -0.5, 0, 0.5, 1]
    assert first.parents.shape == (2, 1, 3, 3)
    assert second.parents.shape == (2, 3, 3, 3)
    assert_close(first.energy[:, 0], table.energy[:, :, 2])
    assert torch.equal(first.labels[:, 0], table.labels[:, :, 2])
    assert_close(first.confidence, -first.energy)
    assert places(first.poses(), 5)[:5] == [(-2, 0), (-1, 0), (0, 0), (1, 0), (2, 0)]


def test_poses_are_always_the_product_of_the_steps_taken_last_on_the_left():
    levels = (ht.rotation(), ht.shear_x(), ht.translate_x())
    steps = {}

    def evaluate(index, poses):
        return evidence_of(-(poses * torch.linspace(0.3, 1.7, 9).reshape(3, 3)).sum((-1, -2)).sin())

    found = search(evaluate, evaluate(None, EYE[None]), Tree(levels, samples=5, hypotheses=1, confidence="energy"))
    pose = EYE
    for level in found.trace:
        steps[level.group.name] = level.group.matrix(level.parameters[int(level.chosen)])
        pose = steps[level.group.name] @ pose
    assert_close(found.beam.pose[0, 0], pose)
    assert float((found.beam.pose[0, 0] - EYE).norm()) > 0.1


# --- acceptance: Algorithm 1 ------------------------------------------------------------------------------------------


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
    for seed in range(60):
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


# --- measures and groups of the user ----------------------------------------------------------------------------------


def test_any_callable_may_be_the_confidence():
    def closest_to_label_one(evidence, orbit):
        assert orbit in (Orbit(RIGHT, 5), Orbit(DOWN, 5))
        return evidence.log_probs[..., 1]

    table = random_table(0)
    found = table.walk(confidence=closest_to_label_one)
    shows_it = (found.trace[0].labels == 1).flatten(1).any(1)
    assert bool((found.beam.labels[:, 0] == 1)[shows_it].all())


def test_reflection_has_four_samples_at_its_level_whatever_the_others_have():
    levels = (ht.reflection(), RIGHT)
    seen = []

    def evaluate(index, poses):
        seen.append(len(poses))
        return evidence_of(poses[:, 0, 0] + 0.1 * poses[:, 1, 1])

    found = search(evaluate, evaluate(None, EYE[None]), Tree(levels, samples=9, hypotheses=1, confidence="group"))
    assert seen == [1, 3, 8]
    assert found.trace[0].confidence.shape == (1, 1, 4)
    assert found.trace[0].chosen.tolist() == [[3]]  # both flips: x and y of −1 have the lowest energy
    assert found.views.tolist() == [1 + 3 + 8]
