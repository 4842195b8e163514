"""Results of some images put back among all, and ready-made options that do what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor
from headtilt.presets import accurate, affine_levels, fast
from headtilt.search.found import LatticeTrace, LevelTrace, Posture, scatter
from headtilt.search.joint import Joint
from headtilt.search.plan import settled
from headtilt.search.tree import Tree
from tests.toys import TinyNet, its, tiny_images

PLANS = {"tree": Tree((ht.rotation(), ht.scale()), samples=5), "joint": Joint((ht.rotation(), ht.scale()), budget=12)}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def search(plan, images):
    predictor = Predictor(TinyNet())
    return plan.search(lambda index, poses: predictor.views(images, index, poses), predictor(images))


@every_plan
def test_what_was_found_for_some_images_is_put_in_their_rows(plan):
    images, rows = tiny_images(6), torch.tensor([4, 1])
    root = Predictor(TinyNet())(images)
    found = search(plan, images[rows])
    whole = settled(root, found, rows, 3)
    rest = torch.tensor([0, 2, 3, 5])
    assert_close(whole.marginal[rows], found.marginal)
    assert_close(whole.near[rows], found.near)
    assert_close(whole.beam.pose[rows], found.beam.pose)
    assert_close(whole.beam.evidence.logits[rows], found.beam.evidence.logits)
    assert torch.equal(whole.views[rows], found.views)
    for value in (whole.marginal, whole.near, whole.beam.evidence.logits[:, 0]):
        assert torch.equal(value[rest], root.logits[rest])
    assert whole.views[rest].tolist() == [1] * 4
    assert whole.beam.active[rest].tolist() == [[True, False, False]] * 4
    assert torch.equal(whole.beam.pose[rest, 0], torch.eye(3).expand(4, 3, 3))


@every_plan
def test_in_the_trace_all_other_images_hold_nothing(plan):
    images, rows = tiny_images(6), torch.tensor([4, 1])
    found = search(plan, images[rows])
    whole = settled(Predictor(TinyNet())(images), found, rows, 3)
    rest = torch.tensor([0, 2, 3, 5])
    assert len(whole.trace) == len(found.trace)
    for level, part in zip(whole.trace, found.trace, strict=True):
        assert_close(level.confidence[rows], part.confidence)
        assert torch.equal(level.labels[rows], part.labels)
        assert bool(level.confidence[rest].isnan().all())
        assert level.labels[rest].unique().tolist() == [-1]
        if isinstance(level, LevelTrace):
            assert torch.equal(level.parameters, part.parameters)
            assert level.chosen[rest].unique().tolist() == [-1]
            assert not bool(level.active[rest].any())
            assert level.temperature == part.temperature
            assert float(level.probabilities[rest].abs().max()) == 0
        else:
            assert isinstance(level, LatticeTrace)
            assert level.levels == part.levels
            assert bool(level.coordinates[rest].isnan().all())


@every_plan
def test_scattering_over_all_images_changes_nothing(plan):
    images = tiny_images(4)
    found = search(plan, images)
    order = torch.tensor([2, 0, 3, 1])
    whole = scatter(
        settled(Predictor(TinyNet())(images), None, order[:0], 3),
        found,
        order,
    )
    assert_close(whole.marginal[order], found.marginal)
    assert_close(whole.trace[0].confidence[order], found.trace[0].confidence)


def test_images_that_all_leave_early_have_one_hypothesis_each_in_as_many_slots_as_others():
    root = Evidence(torch.randn(3, 5), torch.ones(3, 2))
    whole = settled(root, None, torch.arange(0), 4)
    assert whole.beam.active.tolist() == [[True, False, False, False]] * 3
    assert whole.beam.pose.shape == (3, 4, 3, 3)
    assert whole.trace == ()
    assert whole.views.tolist() == [1, 1, 1]


def test_images_that_leave_early_lie_as_they_came_with_the_confidence_of_the_head():
    root = Evidence(torch.zeros(3, 5), upright=torch.tensor([[2.0], [-1.0], [0.5]]))
    gone = settled(root, None, torch.arange(0), 2)
    assert torch.equal(gone.posture.pose, torch.eye(3).expand(3, 3, 3))
    assert_close(gone.posture.confidence, root.upright[:, 0].sigmoid())
    assert_close(gone.posture.tilted, -root.upright[:, 0])
    assert settled(Evidence(torch.zeros(3, 5)), None, torch.arange(0), 2).posture is None
    turn = ht.rotation().matrix(torch.tensor([1.0]))
    found = replace(settled(root.at(slice(1, 2)), None, torch.arange(0), 2), trace=())
    found = replace(found, posture=Posture(turn, torch.tensor([7.0]), torch.tensor([0.9])))
    whole = settled(root, found, torch.tensor([1]), 2)
    assert whole.posture.tilted.tolist() == pytest.approx([-2.0, 7.0, -0.5])
    assert torch.equal(whole.posture.pose[1], turn[0])
    assert torch.equal(whole.posture.pose[2], torch.eye(3))


# --- presets ----------------------------------------------------------------------------------------------------------


def test_affine_levels_undo_the_papers_perturbations():
    assert affine_levels() == [ht.rotation(), ht.scale(0.25), ht.shear_x(0.25)]


@pytest.mark.parametrize(
    ("levels", "few", "many"),
    [(None, 20, 36), ([ht.rotation()], 20, 36), ((ht.rotation(), ht.scale()), 20, 72)],
    ids=["default", "one", "two"],
)
def test_fast_looks_at_far_fewer_views_than_accurate(levels, few, many):
    slow, quick = accurate(levels), fast(levels)
    assert (quick["search"].budget, quick["search"].lattice, slow["search"].budget) == (few, many, many)
    assert {**slow, "search": None} == {**quick, "search": None}
    assert slow["levels"] == ([ht.rotation()] if levels is None else list(levels))
    images = tiny_images(2)
    for options in (slow, quick):
        result = its(TinyNet(), **options).search(images)
        assert result.views.tolist() == [options["search"].budget] * 2
        assert len(result.trace) == 1


def test_presets_for_levels_of_ones_own_do_not_keep_the_callers_list():
    levels = [ht.rotation()]
    options = accurate(levels)
    levels.clear()
    assert options["levels"] == [ht.rotation()]


@pytest.mark.parametrize("preset", [ht.paper3, ht.paper5, accurate, fast, ht.documents])
def test_every_preset_makes_a_wrapper_that_answers(preset):
    options = preset(2) if preset in (ht.paper3, ht.paper5) else preset()
    assert its(TinyNet(), **options)(tiny_images(2)).shape == (2, 5)
