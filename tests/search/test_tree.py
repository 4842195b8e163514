"""The walk down the tree, on tables of energies and labels that say what every view looks like."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.evidence import Evidence
from headtilt.search.confidence import Orbit
from headtilt.search.found import root_beam
from headtilt.search.seen import select
from headtilt.search.tree import Tree, expand, search
from tests.toys import evidence_of

from .tables import DOWN, EYE, RIGHT, Table, places, random_table, seeds

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
