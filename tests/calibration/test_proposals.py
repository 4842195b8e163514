"""Proposals: the fitted head guesses which poses are worth a view, and only these are looked at."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration import fitter
from headtilt.calibration.head import OrbitHead
from headtilt.calibration.proposals import Proposals, above_chance, steps
from headtilt.io import bundle
from headtilt.model.evidence import Evidence
from headtilt.search import joint
from headtilt.search.joint import look_where_likely
from headtilt.search.lattice import NEARNESS, covering, nearness
from headtilt.search.seen import log_weights, prior_at
from tests.toys import TinyNet, tiny_images, whole_fits

LEVELS = (ht.rotation(), ht.scale(0.25))


# --- which views are looked at ----------------------------------------------------------------------------------------


class Asked:
    """An evaluator that keeps what it was asked."""

    def __init__(self) -> None:
        self.views: list[tuple[int, torch.Tensor]] = []

    def __call__(self, index, poses):
        self.views += list(zip(index.tolist(), poses, strict=True))
        return Evidence(torch.zeros(len(index), 3), upright=torch.zeros(len(index), 1))


def likely(*rows):
    return torch.tensor(rows).log()


def test_the_likeliest_poses_are_looked_at_until_they_hold_the_mass():
    _, poses = covering(LEVELS, 5, torch.zeros(1))
    guesses = likely([0.6, 0.1, 0.2, 0.05, 0.05], [0.01, 0.01, 0.96, 0.01, 0.01], [0.2, 0.2, 0.2, 0.2, 0.2])
    root = Evidence(torch.zeros(3, 3), upright=torch.zeros(3, 1), poses=guesses)
    asked = Asked()
    seen = look_where_likely(
        ht.Joint(LEVELS, budget=4, lattice=len(poses), first=4, mass=0.85, sure=1.0, upright=1.0), asked, root
    )
    assert [index for index, _ in asked.views] == [0, 0, 2, 2, 2]
    assert torch.equal(asked.views[0][1], poses[0])
    assert torch.equal(asked.views[1][1], poses[1])
    assert seen.looked.tolist() == [[True, True, True, False], [True, False, False, False], [True] * 4]
    assert torch.equal(seen.poses[:, 0], torch.eye(3).expand(3, 3, 3))
    assert seen.others == 4
    assert bool((seen.weights[~seen.looked] == -torch.inf).all())


def test_a_pose_that_was_guessed_counts_more():
    _, poses = covering(LEVELS, 5, torch.zeros(1))
    guesses = likely([0.6, 0.1, 0.2, 0.05, 0.05], [0.2] * 5)
    prior = 0.5 * above_chance(guesses)
    root = Evidence(torch.zeros(2, 3), upright=torch.zeros(2, 1), poses=guesses, pose_prior=prior)
    seen = look_where_likely(
        ht.Joint(LEVELS, budget=5, lattice=len(poses), first=5, mass=1.0, sure=1.0, upright=1.0), Asked(), root
    )
    added = seen.weights - log_weights(seen.poses, seen.others)
    assert_close(added[0].sort().values, prior[0].sort().values)
    assert_close(added[0, :2], prior[0, [2, 0]])  # the identity, and the likeliest other
    assert_close(added[1], torch.zeros(5))


def test_off_the_lattice_the_nearest_pose_of_it_tells_the_prior():
    turns = ht.rotation().matrix(torch.tensor([-1.0, 0.0, 1.0]))
    between = ht.rotation().matrix(torch.tensor([[0.4, 0.6, -2.0]]))
    assert prior_at(torch.tensor([[1.0, 2.0, 7.0]]), turns, between).tolist() == [[2.0, 7.0, 1.0]]


def test_refined_views_count_by_the_guess_next_to_them():
    plan = ht.Joint(LEVELS, budget=13, lattice=5, rounds=1, hypotheses=2, mass=1.0, sure=1.0, upright=1.0)
    guesses = likely([0.6, 0.1, 0.2, 0.05, 0.05])
    root = Evidence(torch.zeros(1, 3), upright=torch.zeros(1, 1), poses=guesses, pose_prior=guesses)
    with mock.patch.object(joint, "harvest", side_effect=lambda levels, seen, *_: seen):
        seen = plan.search(Asked(), root)
    _, poses = covering(LEVELS, 5, torch.zeros(1))
    assert seen.prior.shape == (1, 13)
    assert_close(seen.prior, prior_at(guesses, poses, seen.poses))


@pytest.mark.parametrize(("views", "wanted"), [(100, 500), (32_000, 1000), (10**9, 4000)])
def test_the_more_views_the_longer_guessing_is_learned(views, wanted):
    with whole_fits():
        assert steps(views) == wanted


def test_a_sure_guess_of_upright_takes_no_view_at_all():
    _, poses = covering(LEVELS, 5, torch.zeros(1))
    root = Evidence(torch.ones(1, 3), poses=likely([1e-9, 1e-9, 1 - 4e-9, 1e-9, 1e-9]))
    asked = Asked()
    seen = look_where_likely(
        ht.Joint(LEVELS, budget=4, lattice=len(poses), first=4, mass=0.9, sure=1.0, upright=1.0), asked, root
    )
    assert asked.views == []
    assert torch.equal(seen.evidence.logits[:, 0], root.logits)


def test_guesses_of_another_lattice_are_refused():
    with pytest.raises(ht.OptionError, match="another lattice than one of 7"):
        look_where_likely(
            ht.Joint(LEVELS, budget=4, lattice=7), Asked(), Evidence(torch.ones(1, 3), poses=torch.zeros(1, 5))
        )


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", float("nan")])
@pytest.mark.parametrize("name", ["mass", "sure", "upright"])
def test_what_is_no_probability_is_refused(name, value):
    with pytest.raises(ht.OptionError, match=f"{name} must be a probability above 0"):
        ht.Joint(**{name: value})


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"budget": 16}, (2, 4, 8, 16)),
        ({"budget": 14, "first": 3}, (3, 6, 12, 14)),
        ({"budget": 48, "first": 6}, (6, 12, 24, 48)),
        ({"budget": 3, "first": 9}, (3,)),
        ({"budget": 12, "lattice": 5}, (2, 4, 5)),
    ],
)
def test_likely_poses_are_looked_at_in_stages_that_double(options, stages):
    assert ht.Joint([ht.rotation()], **{"lattice": 48, **options}).stages == stages


class Told:
    """An evaluator whose second view says a class for sure, and whose others say nothing."""

    def __init__(self, poses) -> None:
        self.poses, self.rounds = poses, []

    def __call__(self, index, poses):
        self.rounds.append(index.tolist())
        logits = torch.zeros(len(index), 3)
        logits[[bool(torch.equal(pose, self.poses[0])) for pose in poses], 1] = 20.0
        return Evidence(logits, upright=torch.zeros(len(index), 1))


def test_images_whose_label_is_sure_are_not_looked_at_again():
    _, poses = covering(LEVELS, 9, torch.zeros(1))
    first = torch.full((9,), 0.1)
    first[0] = 0.2  # the telling pose is this one's best guess, and the other's last one
    last = torch.full((9,), 0.1)
    last[0], last[4] = 0.01, 0.19
    root = Evidence(torch.zeros(2, 3), upright=torch.full((2, 1), -3.0), poses=torch.stack([first, last]).log())
    asked = Told(poses)
    seen = look_where_likely(
        ht.Joint(LEVELS, budget=8, lattice=len(poses), first=2, mass=1.0, sure=0.99, upright=0.9), asked, root
    )
    assert asked.rounds == [[0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], "two views may both be wrong"
    assert seen.looked.sum(1).tolist() == [4, 8]


def test_images_that_are_surely_upright_and_surely_right_are_not_looked_at_again():
    _, poses = covering(LEVELS, 9, torch.zeros(1))
    logits = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    root = Evidence(logits, upright=torch.tensor([[4.0], [0.0], [4.0]]), poses=torch.full((3, 9), 1 / 9).log())
    for upright, views in ((0.9, [2, 4, 4]), (0.99, [4, 4, 4]), (1.0, [4, 4, 4]), (0.3, [2, 2, 2])):
        plan = ht.Joint(LEVELS, budget=4, lattice=len(poses), first=2, mass=1.0, sure=1.0, upright=upright)
        assert look_where_likely(plan, Asked(), root).looked.sum(1).tolist() == views


def test_nearness_is_one_where_a_pose_undoes_the_transform():
    turns, shear = ht.rotation().matrix(torch.tensor([0.0, 0.1, 3.0])), ht.shear_x().matrix(torch.tensor([0.2]))
    found = nearness(turns, torch.cat([torch.eye(3)[None], shear]))
    assert_close(found[0, 0], torch.tensor(1.0))
    assert 0.99 > found[0, 1] > 0.9
    assert found[0, 2] < 1e-9
    left = turns @ shear - torch.eye(3)
    assert_close(found[1], (-left.flatten(1).square().sum(1) / (2 * NEARNESS**2)).exp())


# --- fitted -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(digits_net, upright) -> ht.ITS:
    robust = ht.ITS(digits_net, LEVELS, search=ht.Joint(budget=8, lattice=32), readout="marginal")
    with whole_fits():
        return robust.fit(upright, recipe=ht.HeadRecipe(looks=2, views=12, epochs=16, hidden=48), promise=1.0)


def test_a_fit_teaches_it_and_says_so(quick):
    assert quick.report["proposes"] is True
    assert isinstance(quick.calibrator.proposals, Proposals)
    assert quick.calibrator.proposals.poses == 32


def test_the_heads_that_tell_the_gate_guess_too_and_saw_no_image_that_they_are_asked_about(
    digits_net, upright, monkeypatch
):
    shown = []
    fit = fitter.fit_proposals
    monkeypatch.setattr(
        fitter, "fit_proposals", lambda orbits, rows, *rest: shown.append(rows) or fit(orbits, rows, *rest)
    )
    robust = ht.ITS(digits_net, LEVELS, search=ht.Joint(budget=8, lattice=32), readout="marginal")
    robust.fit(upright[:60], recipe=ht.HeadRecipe(looks=1, views=4, epochs=1, hidden=8))
    *parts, everything = [set(rows.tolist()) for rows in shown]
    assert len(parts) == 4
    assert all(part < everything for part in parts)
    assert not set.intersection(*parts)


def test_few_guessed_views_do_what_the_whole_lattice_does(quick, tilted):
    """As many views without guesses fall behind."""
    whole = quick.but(levels=LEVELS, search=ht.Joint(budget=32), gate=None).search(tilted)
    guessed = quick.but(gate=None).search(tilted)
    coarse = quick.but(levels=LEVELS, search=ht.Joint(budget=8), gate=None).search(tilted)
    agrees = [float((other.labels == whole.labels).float().mean()) for other in (guessed, coarse)]
    assert agrees[0] >= 0.9
    assert agrees[0] > agrees[1]
    assert int(guessed.views.max()) <= 8
    assert bool((whole.views == 32).all())


def test_the_answer_to_an_image_does_not_depend_on_the_batch_or_the_chunk(quick, tilted):
    robust = quick.but(gate=None)
    whole = robust.search(tilted[:7])
    for index in range(7):
        alone = robust.search(tilted[index : index + 1])
        assert_close(alone.logits, whole.logits[index : index + 1], rtol=1e-4, atol=1e-4)
        assert alone.views.tolist() == whole.views[index : index + 1].tolist()
    assert_close(robust.but(chunk=3).search(tilted[:7]).logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_a_bundle_carries_it_and_one_that_does_not_match_its_lattice_is_refused(quick, digits_net, tilted, tmp_path):
    quick.save(tmp_path / "b")
    again = ht.ITS.load(tmp_path / "b", digits_net)
    assert torch.equal(again(tilted[:9]), quick(tilted[:9]))
    path = tmp_path / "b" / bundle.CONFIG
    config = json.loads(path.read_text())
    for place, key, value, message in (
        (config["options"]["search"], "lattice", 33, "another lattice"),
        (config["calibrator"], "poses", 31, "speaks of 31 proposed poses"),
    ):
        before, place[key] = place[key], value
        path.write_text(json.dumps(config))
        with pytest.raises(ht.DataError, match=message):
            ht.ITS.load(tmp_path / "b", digits_net)
        place[key] = before


def test_an_exported_graph_guesses_as_the_search_does(quick, tilted, tmp_path):
    quick.export(tmp_path / "quick.pt2", tilted[:2])
    program = torch.export.load(tmp_path / "quick.pt2").module()
    logits, pose, gated = program(tilted[:9])
    result = quick.search(tilted[:9])
    assert_close(logits, result.logits, rtol=1e-3, atol=1e-3)
    assert_close(pose, result.pose, rtol=0, atol=1e-4)
    assert torch.equal(gated, result.gated)


def test_half_precision_and_copies_keep_what_it_guesses(quick, tilted):
    other = quick.but(gate=None)
    root = other.calibrator.as_it_came(other.predictor(tilted[:3]))
    assert root.poses.dtype == torch.float32
    assert_close(root.poses.exp().sum(1), torch.ones(3))
    assert other.calibrator.to(torch.bfloat16).proposals.mean.dtype == torch.float32


def test_a_model_without_features_searches_the_coarse_lattice():
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=6, lattice=12), readout="marginal", features=None)
    robust.fit(tiny_images(60), recipe=ht.HeadRecipe(looks=1, views=4, epochs=1, hidden=8), promise=None)
    assert isinstance(robust.calibrator, OrbitHead)
    assert robust.report["proposes"] is False
    assert robust.search(tiny_images(2)).views.tolist() == [6, 6]


def test_a_search_without_a_fit_looks_at_the_coarse_lattice():
    robust = ht.ITS(TinyNet(), **ht.fast())
    assert robust.search(tiny_images(2)).views.tolist() == [20, 20]
