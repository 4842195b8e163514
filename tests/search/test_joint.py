"""Searches over the whole group: lattices cover it evenly, refinement closes in, annealing follows its seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.groups import Group, matrices, wrap
from headtilt.model.evidence import Evidence
from headtilt.result import concatenate
from headtilt.search.anneal import Anneal
from headtilt.search.found import LatticeTrace
from headtilt.search.joint import Joint, look_where_likely, most_telling, told
from headtilt.search.lattice import closeness, covering, first_step, lattice, spread
from headtilt.search.seen import Seen, log_weights, near_identity
from tests.toys import TEMPLATES, TemplateMatcher, TinyNet, fingerprint, render, tiny_images, ungated

AFFINE = (ht.rotation(), ht.scale(0.25), ht.shear_x(0.25))
SETS = {
    "rotation": (ht.rotation(),),
    "scale": (ht.scale(0.25),),
    "affine": AFFINE,
    "turn last": (ht.scale(0.25), ht.shear_x(0.25), ht.rotation()),
    "bounded": (ht.scale(0.5), ht.translate_x(0.2), ht.translate_y(0.2)),
    "paper": (ht.rotation().paper(), ht.scale(0.25).paper()),
}
every_set = pytest.mark.parametrize("levels", SETS.values(), ids=SETS.keys())


def share(group: Group, t: Tensor) -> Tensor:
    """Where parameters lie in the range, as numbers in [0, 1]; the identity at a half."""
    return torch.where(t < 0, 0.5 - 0.5 * t / group.low, 0.5 + 0.5 * t / group.high)


def discrepancy(unit: Tensor) -> float:
    """Largest difference between the share of points below a number and the number."""
    ordered, rank = unit.sort().values, torch.arange(len(unit), dtype=torch.float64)
    return float(torch.maximum((rank + 1) / len(unit) - ordered, ordered - rank / len(unit)).max())


# --- lattices ---------------------------------------------------------------------------------------------------------


@every_set
@given(count=st.integers(1, 300))
def test_a_lattice_of_any_size_holds_the_identity_in_its_middle(levels, count):
    points = lattice(levels, count)
    assert points.shape == (count, len(levels))
    assert points[count // 2].tolist() == [0.0] * len(levels)
    assert_close(matrices(levels, points)[count // 2], torch.eye(3, dtype=torch.float64), rtol=0, atol=0)


@every_set
@pytest.mark.parametrize("count", [17, 54, 72, 216, 1000])
def test_a_lattice_covers_each_coordinate_far_more_evenly_than_chance(levels, count):
    points = lattice(levels, count)
    chance = 0.87 / math.sqrt(count)  # the mean discrepancy of random points
    for place, group in enumerate(levels):
        unit = share(group, points[:, place])
        assert float(unit.min()) >= 0
        assert float(unit.max()) <= 1
        assert discrepancy(unit) < (0.6 if count < 50 else 0.45) * chance


@pytest.mark.parametrize("count", [72, 216])
def test_any_stretch_of_the_turn_sees_the_whole_range_of_the_other_groups(count):
    points = lattice(AFFINE, count)
    for part in points.split(count // 6):
        for place in (1, 2):
            unit = share(AFFINE[place], part[:, place])
            assert float(unit.min()) < 0.25
            assert float(unit.max()) > 0.75


@every_set
def test_no_two_points_of_a_lattice_are_the_same(levels):
    points = lattice(levels, 216)
    assert len(points.unique(dim=0)) == 216


def test_the_full_turn_is_sampled_evenly_wherever_it_stands():
    for levels, place in ((AFFINE, 0), (SETS["turn last"], 2)):
        gaps = lattice(levels, 24)[:, place].diff()
        assert_close(gaps, torch.full_like(gaps, 2 * math.pi / 24))


@given(seed=st.integers(0, 99))
def test_a_shifted_lattice_stays_in_range_and_is_as_even(seed):
    shift = torch.rand(3, generator=torch.Generator().manual_seed(seed))
    points = lattice(AFFINE, 100, shift)
    for place, group in enumerate(AFFINE):
        unit = share(group, points[:, place])
        assert float(unit.min()) >= 0
        assert float(unit.max()) <= 1
        assert discrepancy(unit) < 0.05
    assert not torch.equal(points, lattice(AFFINE, 100))


def test_reflections_are_spread_over_all_four_with_the_identity_in_the_middle():
    points = lattice((ht.reflection(),), 4)[:, 0]
    assert sorted(points.tolist()) == [0, 1, 2, 3]
    assert points[2] == 0
    both = lattice((ht.rotation(), ht.reflection()), 80)
    assert both[:, 1].unique(return_counts=True)[1].tolist() == pytest.approx([20] * 4, abs=3)
    assert both[40].tolist() == [0, 0]


def test_numbers_are_spread_from_one_end_of_a_group_over_the_identity_to_the_other():
    group = ht.scale(0.25).paper()
    ends = spread(group, torch.tensor([0.0, 0.5, 0.999999], dtype=torch.float64)).exp()
    assert ends.tolist() == pytest.approx([0.75, 1.0, 1.25], abs=1e-5)


def test_poses_do_the_first_level_first():
    coordinates = torch.tensor([0.3, 0.2, -0.1], dtype=torch.float64)
    steps = [group.matrix(t) for group, t in zip(AFFINE, coordinates, strict=True)]
    assert_close(matrices(AFFINE, coordinates), ht.compose(*steps))
    assert matrices(AFFINE, torch.zeros(2, 5, 3)).shape == (2, 5, 3, 3)


def test_coordinates_wrap_where_periodic_and_stop_elsewhere():
    levels = (ht.rotation(), ht.scale(0.25), ht.reflection())
    wrapped = wrap(levels, torch.tensor([[4.0, 1.0, 5.0], [-4.0, -1.0, -1.0], [0.5, 0.1, 2.4]]))
    turn, reach = 2 * math.pi, -math.log(0.75)
    expected = [[4 - turn, reach, 1], [turn - 4, -reach, 3], [0.5, 0.1, 2]]
    assert_close(wrapped, torch.tensor(expected), rtol=0, atol=1e-5)


# --- joint search -----------------------------------------------------------------------------------------------------


def planted(count: int, seed: int, levels=AFFINE[:2]) -> tuple[Tensor, Tensor, Tensor]:
    """Images (n, 1, 32, 32) drawn under random poses, with those poses and their labels."""
    generator = torch.Generator().manual_seed(seed)
    units = torch.rand(count, len(levels), generator=generator, dtype=torch.float64)
    truth = matrices(levels, torch.stack([spread(group, units[:, k]) for k, group in enumerate(levels)], dim=1))
    labels = torch.arange(count) % 3
    images = torch.stack([render(TEMPLATES[int(y)], pose) for y, pose in zip(labels, truth, strict=True)])
    return images[:, None], truth.float(), labels


def errors(result, truth) -> Tensor:
    """How far the image is from upright after the search: ‖pose · truth − I‖."""
    return (result.pose @ truth - torch.eye(3)).flatten(1).norm(dim=1)


def test_refinement_finds_planted_poses_better_than_a_lattice_of_the_same_budget():
    images, truth, labels = planted(30, 0)
    matcher = TemplateMatcher(TEMPLATES, 32, 32)
    found = {
        rounds: ungated(matcher, AFFINE[:2], search="joint", budget=96, hypotheses=2, rounds=rounds).search(images)
        for rounds in (0, 5)
    }
    for result in found.values():
        assert torch.equal(result.labels, labels)
        assert result.views.tolist() == [96] * 30
    assert float(errors(found[5], truth).median()) < 0.5 * float(errors(found[0], truth).median())
    assert float(errors(found[5], truth).median()) < 0.04


def test_a_joint_search_undoes_groups_that_do_not_commute():
    images, truth, labels = planted(18, 1, AFFINE)
    result = ungated(TemplateMatcher(TEMPLATES, 32, 32), list(AFFINE), search="joint", budget=300, rounds=4).search(
        images
    )
    assert torch.equal(result.labels, labels)
    assert float(errors(result, truth).median()) < 0.12
    assert_close(result.perturbation @ result.pose, torch.eye(3).expand(18, 3, 3), rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [1, 2, 3, 24, 25])
@pytest.mark.parametrize("search", ["joint", "anneal"])
def test_the_budget_is_spent_exactly_and_each_view_is_looked_at_once(search, budget):
    net, images, rows = TinyNet(), tiny_images(4), []
    net.conv.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    if search == "anneal" and budget < 3:
        with pytest.raises(ht.OptionError, match="budget must be a whole number of at least 3"):
            ungated(net, search=search, budget=budget)
        return
    robust = ungated(net, search=search, budget=budget)
    robust.search(images)  # tries two views in both layouts
    rows.clear()
    result = robust.search(images)
    assert result.views.tolist() == [budget] * 4
    assert sum(rows) == 4 * budget


@pytest.mark.parametrize(
    ("rounds", "hypotheses", "survivors"), [(1, 1, [1]), (2, 3, [3, 1]), (3, 2, [2, 1, 1]), (3, 4, [4, 2, 1])]
)
def test_refinement_is_paid_from_the_budget_and_halves_the_hypotheses(rounds, hypotheses, survivors):
    options = {"search": "joint", "budget": 40, "rounds": rounds, "hypotheses": hypotheses}
    robust = ungated(TinyNet(), [ht.rotation(), ht.scale()], **options)
    assert robust.plan.survivors == survivors
    assert robust.plan.coarse == 40 - 4 * sum(survivors)
    assert robust.search(tiny_images(3)).views.tolist() == [40] * 3


def test_a_budget_that_leaves_nothing_for_the_lattice_is_refused():
    with pytest.raises(ht.OptionError, match=r"budget must leave views for the lattice after 8 for 2 rounds; got 8"):
        Joint((ht.rotation(),), budget=8, rounds=2)
    assert Joint((ht.rotation(),), budget=9, rounds=2).coarse == 1


@pytest.mark.parametrize("hypotheses", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("rounds", range(6))
def test_what_the_rounds_spend_is_counted_without_making_them(hypotheses, rounds):
    plan = Joint((ht.rotation(), ht.scale()), budget=200, rounds=rounds, hypotheses=hypotheses)
    assert plan.coarse == 200 - 4 * sum(plan.survivors)
    assert Joint((ht.rotation(),), budget=3 * 10**12, rounds=10**12).coarse > 0


@pytest.mark.parametrize("plan", [Joint, Anneal])
def test_curvature_needs_orbits(plan):
    with pytest.raises(ht.OptionError, match=r'"group" needs orbits. Use search="tree"'):
        plan((ht.rotation(),), confidence="group")
    with pytest.raises(ht.OptionError, match="confidence must be one of"):
        plan((ht.rotation(),), confidence=["energy"])


def test_the_marginal_is_the_weighed_logsumexp_over_all_views_and_near_over_those_that_move_little():
    seen = {}

    def evaluate(index, poses):
        seen["logits"] = torch.randn(len(poses), 4, generator=torch.Generator().manual_seed(0))
        return Evidence(seen["logits"])

    root = Evidence(torch.randn(1, 4, generator=torch.Generator().manual_seed(1)))
    found = Joint((ht.rotation(),), budget=36).search(evaluate, root)
    trace = found.trace[0]
    assert isinstance(trace, LatticeTrace)
    everything = torch.cat([seen["logits"][:18], root.logits, seen["logits"][18:]])
    weighed = everything + log_weights(trace.poses[0])[:, None]
    assert_close(weighed[18], root.logits[0])
    assert_close(found.marginal, weighed.logsumexp(0)[None])
    close = near_identity(trace.poses[0], trace.levels)
    assert 1 < int(close.sum()) < 6
    assert_close(found.near[0], weighed[close].logsumexp(0))
    assert_close(trace.energy[0], -everything.logsumexp(1))
    assert torch.equal(trace.labels[0], everything.argmax(1))


def test_hypotheses_are_the_best_views_one_per_label():
    result = ungated(TinyNet(), search="joint", budget=24, hypotheses=5).search(tiny_images(5))
    trace, beam = result.trace[0], result.hypotheses
    for image in range(5):
        best = {}
        for view in trace.confidence[image].argsort(descending=True).tolist():
            best.setdefault(int(trace.labels[image, view]), view)
        kept = beam.active[image]
        assert beam.labels[image][kept].tolist() == list(best)
        assert_close(beam.pose[image][kept], trace.poses[image, list(best.values())])


@pytest.mark.parametrize("rounds", [0, 2])
@given(cut=st.integers(1, 5))
def test_a_joint_search_does_not_depend_on_how_a_batch_is_split(rounds, cut):
    images = tiny_images(6)
    robust = ungated(TinyNet(), [ht.rotation(), ht.scale()], search="joint", budget=40, rounds=rounds)
    whole, parts = robust.search(images), concatenate([robust.search(images[:cut]), robust.search(images[cut:])])
    assert torch.equal(parts.labels, whole.labels)
    assert_close(parts.pose, whole.pose, rtol=0, atol=1e-5)
    assert_close(parts.trace[0].confidence, whole.trace[0].confidence, rtol=1e-4, atol=1e-4)


def test_reflections_are_found_beside_rotations():
    levels = [ht.rotation(), ht.reflection()]
    pose = ht.compose(ht.rotation().matrix(torch.tensor(1.0)), ht.reflection().matrix(torch.tensor(1.0)))
    images = torch.stack([render(blobs, torch.linalg.inv(pose)) for blobs in TEMPLATES])[:, None]
    result = ungated(TemplateMatcher(TEMPLATES, 32, 32), levels, search="joint", budget=144, rounds=3).search(images)
    assert result.labels.tolist() == [0, 1, 2]
    assert bool((torch.linalg.det(result.pose) < 0).all())
    assert float((result.pose - pose).flatten(1).norm(dim=1).max()) < 0.3


def test_a_first_step_is_a_lattice_step_of_the_turn_and_a_third_of_any_other_range():
    assert first_step(ht.rotation(), 24) == pytest.approx(2 * math.pi / 24)
    assert first_step(ht.shear_x(0.3), 24) == pytest.approx(0.1)
    assert first_step(ht.reflection(), 24) == 1


@pytest.mark.parametrize("search", ["joint", "anneal"])
def test_the_model_leaves_as_it_came(search):
    net = TinyNet().train()
    before = fingerprint(net)
    ungated(net, search=search, budget=9, mc_passes=2)(tiny_images(2))
    assert fingerprint(net) == before


# --- annealing --------------------------------------------------------------------------------------------------------


NET = TinyNet()


def annealed(images, **options):
    return ungated(NET, [ht.rotation(), ht.scale()], search="anneal", **{"budget": 30, **options}).search(images)


def test_annealing_follows_its_seed_and_leaves_the_global_stream_alone():
    images, state = tiny_images(4), torch.get_rng_state()
    first, again, other = (annealed(images, seed=seed).trace[0].coordinates for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first[:, :10], other[:, :10])  # the lattice it starts from


@given(cut=st.integers(1, 5))
def test_annealing_does_not_depend_on_how_a_batch_is_split(cut):
    images = tiny_images(6)
    whole, parts = annealed(images), concatenate([annealed(images[:cut]), annealed(images[cut:])])
    assert torch.equal(parts.labels, whole.labels)
    assert_close(parts.trace[0].coordinates, whole.trace[0].coordinates, rtol=0, atol=1e-4)
    assert_close(parts.pose, whole.pose, rtol=0, atol=1e-4)


def test_annealing_never_reports_less_than_the_lattice_it_starts_from():
    result = annealed(tiny_images(5))
    trace = result.trace[0]
    assert torch.equal(result.hypotheses.confidence[:, 0], trace.confidence.amax(1))
    assert bool((trace.confidence.amax(1) >= trace.confidence[:, :10].amax(1)).all())


def test_annealing_finds_planted_poses_better_than_its_own_lattice():
    images, truth, labels = planted(24, 2)
    matcher = TemplateMatcher(TEMPLATES, 32, 32)
    options = {"search": "anneal", "hypotheses": 1}
    result = ungated(matcher, AFFINE[:2], budget=120, reach=0.1, **options).search(images)
    start = ungated(matcher, AFFINE[:2], search="joint", budget=40, hypotheses=1).search(images)
    assert torch.equal(result.labels, labels)
    assert float(errors(result, truth).median()) < 0.5 * float(errors(start, truth).median())


def test_a_cold_walk_only_climbs_and_a_hot_one_wanders():
    images = tiny_images(5)
    cold = annealed(images, budget=90, hot=1e-6, cold=1e-6).trace[0]
    hot = annealed(images, budget=90, hot=1e6, cold=1e6).trace[0]

    def wandered(trace):
        start = trace.confidence[:, :30].argmax(1)
        centre = trace.coordinates[torch.arange(5), start]
        return float((trace.coordinates[:, 30:, 1] - centre[:, None, 1]).abs().mean())

    assert wandered(hot) > 1.1 * wandered(cold)
    assert bool((hot.coordinates[..., 1].abs() <= -math.log(0.75) + 1e-6).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hot": 0}, "hot must be a finite number above 0"),
        ({"cold": -1}, "cold must be a finite number above 0"),
        ({"reach": math.nan}, "reach must be a finite number above 0"),
        ({"hot": 0.1, "cold": 0.2}, "cold must not be above hot; got cold=0.2, hot=0.1"),
        ({"hypotheses": 0}, "hypotheses must be a whole number of at least 1"),
    ],
    ids=str,
)
def test_annealing_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ht.OptionError, match=message):
        Anneal((ht.rotation(),), **options)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("levels", [(ht.quarter_turns(), ht.reflection()), (ht.reflection(), ht.quarter_turns())])
def test_of_finite_groups_no_budget_shows_a_pose_twice(levels, count):
    points, poses = covering(levels, count, torch.zeros(1))
    assert len(poses.unique(dim=0)) == len(points) == count
    assert torch.equal(poses[count // 2], torch.eye(3))
    assert ht.Joint(levels, budget=72).most_views == 8


# --- near and far -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "levels",
    [
        (ht.scale(0.25),),
        (ht.translate_x(0.25),),
        (ht.rotation(0.2),),
        (ht.scale(0.1), ht.shear_x(0.1)),
        (ht.rotation(),),
    ],
    ids=lambda levels: "+".join(group.name for group in levels),
)
def test_some_poses_of_any_levels_are_near_upright_and_some_are_far(levels):
    _, poses = covering(levels, 36, torch.zeros(1))
    close = near_identity(poses, levels)
    assert bool(close[18])
    assert 0.1 < float(close.float().mean()) < 0.9


def test_where_all_poses_are_far_from_one_another_half_a_unit_is_near():
    turn = ht.rotation().matrix(torch.tensor([0.34, 0.37]))
    assert near_identity(turn, (ht.rotation(),)).tolist() == [True, False]
    flips = ht.reflection().matrix(torch.tensor([0, 1]))
    assert near_identity(flips, (ht.reflection(),)).tolist() == [True, False]


def test_a_mass_of_one_leaves_no_pose_out_however_sure_the_guess():
    levels = (ht.rotation(),)
    guesses = torch.randn(50, 72, generator=torch.Generator().manual_seed(0)).mul(6).log_softmax(1)
    root = Evidence(torch.zeros(50, 3), upright=torch.zeros(50, 1), poses=guesses)

    def evaluate(index, poses):
        return Evidence(torch.zeros(len(index), 3), upright=torch.zeros(len(index), 1))

    plan = Joint(levels, budget=72, lattice=72, mass=1.0, sure=1.0, upright=1.0)
    seen = look_where_likely(plan, evaluate, root)
    assert bool(seen.looked.all())
    _, poses = covering(levels, 72, guesses)
    found = (seen.poses[:, :, None] - poses).flatten(3).norm(dim=3).argmin(2)
    assert torch.equal(found.sort(1).values, torch.arange(72).expand(50, -1))


def test_a_view_beside_one_that_was_seen_is_worth_less():
    close = closeness((ht.rotation(),), 36, torch.zeros(1))
    likely, places = torch.full((1, 36), 0.01), torch.tensor([[18]])
    likely[0, [4, 5, 6]] = torch.tensor([0.25, 0.3, 0.25])
    likely[0, 27] = 0.2
    chosen, left = most_telling(likely, places, places == 18, close, 3)
    assert chosen[0, :2].tolist() == [5, 27], "the middle of the likely ones, then the other place"
    assert left[0, 0] > left[0, 1] > left[0, 2]
    every, _ = most_telling(likely, places, places == 18, close, 35)
    assert sorted(every[0].tolist()) == [place for place in range(36) if place != 18]
    unseen, _ = most_telling(likely, torch.tensor([[18, 5]]), torch.tensor([[True, False]]), close, 1)
    assert unseen.tolist() == [[5]], "a pose that was thought of, and not looked at, stands for nothing"


def test_what_a_head_says_of_views_speaks_for_the_poses_around_them():
    levels, guesses = (ht.rotation(),), torch.full((1, 36), 1 / 36).log()
    close, (coordinates, poses) = closeness(levels, 36, guesses), covering(levels, 36, guesses)
    places = torch.tensor([[18, 9, 27]])
    evidence = Evidence(torch.zeros(1, 3, 2), upright=torch.tensor([[[0.0], [3.0], [-3.0]]]))
    looked = torch.tensor([[True, True, True]])
    seen = Seen(coordinates[places], poses[places], evidence, looked, 35)
    likely = told(guesses, seen, places, close)[0]
    assert likely.argmax() == 9
    assert likely[10] > likely[13] > likely[28] > likely[27]
    assert abs(float(likely.sum()) - 1) < 1e-5
    unseen = replace(seen, looked=torch.tensor([[True, False, False]]))
    assert_close(told(guesses, unseen, places, close), guesses.exp())
    silent = replace(seen, evidence=Evidence(torch.zeros(1, 3, 2)))
    assert_close(told(guesses, silent, places, close), guesses.exp())


@pytest.mark.parametrize("levels", [(ht.rotation(),), (ht.translate_x(0.25),), AFFINE, (ht.rotation(0.3),)])
def test_a_pose_stands_for_itself_and_for_few_others(levels):
    close = closeness(levels, 36, torch.zeros(1))
    assert_close(close.diagonal(), torch.ones(36), atol=1e-4, rtol=0)
    assert bool((close >= 0).all())
    assert bool((close <= 1).all())
    assert float(close.mean()) < 0.5, "also where all poses are close to one another"
