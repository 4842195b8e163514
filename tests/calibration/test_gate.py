"""The gate keeps the bare answer unless it is clearly beaten, and holds its promise without a label."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.balance import Balance
from headtilt.calibration.gate import (
    CautiousGate,
    Gate,
    Promise,
    exit_for,
    expected_cost,
    for_replacing,
    for_turning,
    lead_of_rival,
    margin_for,
    quantile_for,
)
from headtilt.calibration.head import HeadRecipe
from headtilt.calibration.verdict import straight
from headtilt.geometry.warp import warp
from headtilt.model.evidence import Evidence
from headtilt.paper import data as ht_data
from headtilt.paper.data.perturb import draw, perturb_dataset
from headtilt.result import concatenate
from headtilt.search.found import Posture
from headtilt.search.run import decide, read_out, with_bare
from tests.toys import its

from .toys import found, twin

# --- thresholds by hand -----------------------------------------------------------------------------------------------


def scores(count: int, seed: int, changed: float = 0.05) -> torch.Tensor:
    """What speaks for changing answers to upright images: of five in a hundred anything, and of the others nothing."""
    unit = torch.rand(2, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(unit[0] < changed, 2 * unit[1] - 1.5, -math.inf)


def margin(score, points, each=1.0, images=None):
    """The margin where every change costs the same."""
    return margin_for(score, torch.full_like(score, each), points, images)


@pytest.mark.parametrize("each", [1.0, 0.3])
@pytest.mark.parametrize("count", [100, 300, 1000, 10_000])
def test_a_margin_costs_about_what_was_promised_or_less_on_images_to_come(count, each):
    """Whatever is usual: these images lose more than others, at margins where others lose next to nothing."""
    future, spent = scores(20_000, 999), []
    for seed in range(60):
        replaced = future >= margin(scores(count, seed), 0.5, each)
        spent.append(100 * each * float(replaced.double().mean()))
    assert 0.2 < sum(spent) / len(spent) < 0.75


def test_the_fewer_images_the_nearer_the_margin_stays_to_the_usual_one():
    """Where no image changes its answer, only what is usual speaks against it."""
    nothing = [margin(torch.full((count,), -math.inf), 0.5) for count in (10, 100, 1000)]
    assert nothing == pytest.approx([-0.51, -0.69, -1.2])
    assert margin(scores(10, 0, changed=1.0), 0.5) < 1.0


def test_what_costs_more_makes_a_larger_margin_and_what_is_won_pays_for_no_loss():
    score = scores(300, 0, changed=0.5)
    margins = [margin(score, 0.5, each) for each in (1.0, 0.5, 0.05, 0.0, -1.0)]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] > margins[1] > margins[2] > margins[3] == margins[4]


def test_only_the_changes_that_are_let_through_count():
    """Of 1,100 images 5.5 may be lost, and as usual hardly any: fifty changes that cost a tenth each."""
    score = torch.linspace(2, -2, 1000, dtype=torch.float64)
    dear = torch.where(torch.arange(1000) < 50, 0.1, 1.0)
    found = margin_for(score, dear, 0.5)
    assert score[50] < found < score[48]
    assert found == margin_for(score, torch.where(score >= found, dear.double(), 9.0), 0.5)


def test_the_cost_of_a_change_is_by_how_much_the_bare_answer_is_more_probable_as_the_image_came():
    """Three halves of the bare model's log-odds and of the head's: 2, 0 and −1 for what the search says."""
    bare = Evidence(torch.tensor([[3.0, 0.0, 1.0]]).log_softmax(1).expand(3, 3) + 5)
    root = torch.tensor([[1.0, 0.0, 9.0], [-3.0, 0.0, 0.0], [-5.0, 0.0, 0.0]]) - 7
    answer = torch.tensor([[9.0, 2.0, 1.0]]).expand(3, 3)
    odds = (bare.logits + root) / 2
    truth = odds.softmax(1)
    assert (odds[:, 0] - odds[:, 1]).tolist() == pytest.approx([2.0, 0.0, -1.0], abs=1e-5)
    assert_close(expected_cost(bare, root, answer), truth[:, 0] - truth[:, 1])
    assert_close(expected_cost(bare, root, torch.tensor([[0.0, 1.0, 2.0]]).expand(3, 3)), truth[:, 0] - truth[:, 2])


def test_a_class_that_model_and_head_rule_out_costs_no_nan():
    never = torch.tensor([[0.0, -math.inf]])
    assert expected_cost(Evidence(never), never, torch.zeros(1, 2)).tolist() == [1.0]


def even(odds, count=1):
    """What a model and a head say of two classes that agree: as log-odds of the second over the first."""
    return torch.tensor([[0.0, odds]]).expand(count, 2)


def test_what_speaks_for_a_change_is_what_it_gains_over_what_it_may_cost():
    bare, answer = even(-2.0), even(3.0)
    gain, cost = math.tanh(1.5), math.tanh(1.0)
    score = for_replacing(Evidence(bare), bare, answer, None)
    assert score.tolist() == pytest.approx([math.log(gain / cost)], abs=1e-5)
    half = for_replacing(Evidence(bare), bare, answer, posture(0.0))  # as probably tilted as not
    assert half.tolist() == pytest.approx([math.log(gain / cost) + math.log(0.5) / 2], abs=1e-5)


@pytest.mark.parametrize("odds", [0.01, 5.0, -math.inf, 50.0])
def test_a_change_that_costs_nothing_is_no_better_than_one_that_costs_a_tenth(odds):
    bare = Evidence(even(-0.001))
    score = for_replacing(bare, even(odds), even(3.0), None)
    cost = 1.0 if odds == -math.inf else 0.1
    assert score.tolist() == pytest.approx([math.log(math.tanh(1.5) / cost)], abs=1e-4)


def test_nothing_speaks_for_an_answer_that_is_the_bare_one_or_as_good():
    bare = Evidence(even(-2.0, 3))
    answer = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, -math.inf]])
    assert for_replacing(bare, bare.logits, answer, posture(9.0, 9.0, 9.0)).tolist() == [-math.inf] * 3


@pytest.mark.parametrize("shift", [-5000.0, 5000.0])
def test_a_constant_that_is_added_to_all_logits_changes_nothing(shift):
    bare, answer = even(-2.0), even(3.0)
    score = for_replacing(Evidence(bare), bare, answer, posture(4.0))
    moved = for_replacing(Evidence(bare + shift), bare + shift, answer + shift, posture(4.0))
    assert_close(moved, score, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_speaks_for_a_change_is_told_in_any_precision(dtype):
    bare, answer = even(-2.0).to(dtype), even(3.0).to(dtype)
    score = for_replacing(Evidence(bare), bare, answer, Posture(torch.eye(3)[None], torch.tensor([4.0]), torch.ones(1)))
    assert score.dtype == dtype
    assert float(score) == pytest.approx(0.163, abs=0.02)


def test_what_gets_another_label_is_sooner_turned():
    lead, tilted = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0]), torch.tensor([0.0, 4.0, -4.0, 9.0, -4.0])
    assert for_turning(lead, tilted).tolist() == [1.0, 5.0, -3.0, 9.0, -4.0]


def posture(*tilted):
    count = len(tilted)
    return Posture(torch.eye(3).expand(count, 3, 3), torch.tensor(tilted), torch.ones(count))


def test_the_bare_answer_has_its_say_as_far_as_the_image_seems_upright():
    answer = torch.tensor([[0.0, 3.0, 1.0]]).log_softmax(1).expand(3, 3)
    bare = Evidence(torch.tensor([[4.0, 0.0, 0.0]]).expand(3, 3))
    said = with_bare(answer, bare, posture(50.0, -50.0, 0.0))
    assert_close(said[0], answer[0])
    assert_close(said[1], (answer[1] + bare.log_probs[1]) / 2)
    assert_close(said[2], (answer[2] + bare.log_probs[2] / 2) / 1.5)
    assert said.argmax(1).tolist() == [1, 0, 1]
    assert with_bare(answer, bare, None) is answer


def test_the_less_say_the_bare_answer_has_the_less_it_changes():
    answer = torch.tensor([[0.0, 3.0, 1.0]]).log_softmax(1)
    bare = Evidence(torch.tensor([[4.0, 0.0, 0.0]]))
    assert_close(with_bare(answer, bare, posture(-50.0), 0.5), (answer + bare.log_probs / 2) / 1.5)
    assert_close(with_bare(answer, bare, posture(-50.0), 0.0), answer)


def test_a_search_answers_with_the_say_that_its_head_has(fitted, upright):
    """The more the bare answer counts, the nearer the answers to upright images are to the bare ones."""
    robust = copy.deepcopy(fitted).but(gate=None)  # the head is not to be changed for others
    answers = []
    for weight in (0.0, 1.0, 1e6):
        robust.calibrator.bare_weight.fill_(weight)
        answers.append(robust.search(upright[:20]).logits.log_softmax(1))
    bare = robust.model(upright[:20]).detach().log_softmax(1)
    apart = [float((answer - bare).abs().mean()) for answer in answers]
    assert apart[0] > apart[1] > apart[2]


def test_a_class_that_the_bare_model_rules_out_leaves_no_nan():
    bare = Evidence(torch.tensor([[1.0, -math.inf]]))
    said = with_bare(torch.zeros(1, 2), bare, posture(math.inf))
    assert said.isfinite().all()
    assert with_bare(torch.zeros(1, 2), bare, posture(-math.inf)).isfinite().all()


def test_a_promise_of_nothing_is_an_infinite_margin_and_one_of_everything_is_none():
    assert margin(scores(100, 0), 0.0) == math.inf
    assert margin(scores(100, 0), 100.0) == margin(scores(100, 0, changed=1.0), 100.0) == -math.inf


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_handful_of_images_gives_a_margin_too(count):
    assert math.isfinite(margin(scores(count, 0), 0.5))
    assert 0 < margin(scores(count, 0, changed=1.0) + 1.3, 0.5) < 2.3


def test_two_looks_at_one_image_tell_little_more_than_one():
    some = scores(200, 0, changed=0.0)
    assert margin(some.repeat(4), 0.5, images=200) != margin(some.repeat(4), 0.5)
    assert margin(some.repeat(2), 0.5, images=200) == margin(some, 0.5)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    count=st.integers(3, 60),
    points=st.lists(st.just(0.0) | st.floats(1e-6, 100), min_size=2, max_size=5),
)
def test_a_larger_promise_never_raises_a_threshold(seed, count, points):
    lead = scores(count, seed, changed=0.5)
    generator = torch.Generator().manual_seed(seed)
    costs, harm = torch.rand(count, generator=generator), torch.randint(-1, 2, (count,), generator=generator)
    points = sorted(points)
    for thresholds in (
        [margin_for(lead, costs, value) for value in points],
        [exit_for(lead, harm, value) for value in points],
        [quantile_for(lead, value) for value in points],
    ):
        assert thresholds == sorted(thresholds, reverse=True)


SCORES, HARM = torch.tensor([3.0, 5.0, 2.0, 4.0]), torch.tensor([-1, 0, 1, 1])  # by score: 0, 1, −1, 1


@pytest.mark.parametrize(
    ("points", "leaving"), [(0.0, set()), (19.9, set()), (20.0, {5.0}), (40.0, {5.0, 4.0, 3.0}), (60.0, {5, 4, 3, 2})]
)
def test_the_exit_lets_images_go_as_long_as_the_promise_lasts_with_one_loss_to_spare(points, leaving):
    threshold = exit_for(SCORES, HARM, points)
    assert {value for value in SCORES.tolist() if value >= threshold} == leaving


def test_what_leaving_early_saves_pays_for_nothing_that_it_loses():
    assert exit_for(SCORES, HARM, 20.0) == exit_for(SCORES, HARM.clamp_min(0), 20.0)
    assert exit_for(SCORES, torch.zeros(4), 0.0) == math.inf
    assert exit_for(SCORES, torch.zeros(4), 20.0) == -math.inf


@pytest.mark.parametrize(("points", "above"), [(1.0, 0), (4.9, 0), (5.0, 0), (10.0, 1), (50.0, 9)])
def test_a_quantile_is_exceeded_by_no_more_than_the_promise_of_images_to_come(points, above):
    """Of nineteen images each twentieth part of what is to come lies above one more of them."""
    scores = torch.arange(19.0)
    assert int((scores >= quantile_for(scores, points)).sum()) == above
    if points < 5:
        assert quantile_for(scores, points) == math.inf


@pytest.mark.parametrize("size", [1.0, 40.0, 1e3, 1e5])
@pytest.mark.parametrize("sign", [1, -1])
def test_thresholds_exclude_the_image_they_were_set_for_at_any_size(size, sign):
    """In single precision 1e-6 above 40 is 40."""
    value = torch.tensor([sign * size] * 2)
    assert not bool((value * (1 + 5e-7 * sign) > quantile_for(value, 60.0)).any())
    assert not bool((value >= exit_for(value, torch.tensor([0, 1]), 40.0)).any())


@pytest.mark.parametrize("value", [-0.1, 100.1, math.nan, "1", None, True], ids=str)
@pytest.mark.parametrize("name", ["upright", "tilted", "turned"])
def test_promises_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ht.OptionError, match=f"{name} must be points between 0 and 100"):
        Promise(**{name: value})


def test_promises_may_be_numbers_of_numpy():
    assert Promise(np.float32(0.5), np.int64(1), np.float64(2)) == Promise(0.5, 1, 2)


# --- gates by hand ----------------------------------------------------------------------------------------------------


def test_log_odds_are_those_of_the_best_class_against_the_bare_one():
    bare = Evidence(torch.eye(3)[:2])
    answer = torch.tensor([[1.0, 6.0, 2.0], [0.5, 3.0, 1.0]])
    assert lead_of_rival(bare, answer).tolist() == [5.0, -2.0]


def test_a_plain_gate_compares_what_speaks_for_a_change_with_its_margin():
    bare = Evidence(even(-1.0, 2))
    answer = torch.tensor([[0.0, 3.0], [0.0, 0.5]])
    seen = found(answer, answer, bare.logits)
    first, second = for_replacing(bare, seen.root, answer, None).tolist()
    assert first > 0 > second
    for margin, kept in ((second - 0.1, [False, False]), (0.0, [False, True]), (first + 0.1, [True, True])):
        assert Gate(margin).keeps(bare, seen, answer).tolist() == kept
    assert not bool(Gate(1.0).leaves_early(bare).any())


@pytest.mark.parametrize("readout", ["incumbent", "marginal"])
def test_the_gate_judges_the_answer_that_is_given(readout):
    """The best view says 1 by two, all views together say 2 by one: only one of them is the answer."""
    bare = Evidence(torch.tensor([[9.0, 0.0, 0.0]]))
    views, marginal = torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    seen = found(marginal, marginal)
    seen = type(seen)(
        **{**seen.__dict__, "beam": type(seen.beam)(**{**seen.beam.__dict__, "evidence": Evidence(views[:, None])})}
    )
    label, lead = (1, 2.0) if readout == "incumbent" else (2, 1.0)
    said = straight(bare, seen.root, read_out(seen, readout)[0], None)
    assert said.lead.tolist() == [lead]
    for margin, answered in ((float(said.score) - 0.1, label), (float(said.score) + 0.1, 0)):
        decided = decide(bare, seen, Gate(margin), readout, torch.tensor([False]))
        assert decided.logits.argmax(1).tolist() == [answered]
        assert decided.kept.tolist() == [answered == 0]


def test_an_image_leaves_early_where_the_head_is_sure_enough_that_it_is_upright():
    root = Evidence(torch.zeros(3, 2), upright=torch.tensor([[1.0], [2.0], [3.0]]))
    assert Gate(0.0, 2.0).leaves_early(root).tolist() == [False, True, True]
    assert not bool(Gate(0.0).leaves_early(root).any())
    assert bool(Gate(0.0, -math.inf).leaves_early(root).all())


def test_labels_and_poses_are_judged_each_by_itself():
    turn = ht.rotation().matrix(torch.tensor(1.0))
    bare = Evidence(torch.tensor([[1.0, 0.0]] * 4))
    answer = torch.tensor([[0.0, 6.0], [0.0, 6.0], [0.0, 0.5], [0.0, 0.5]])
    tilted = torch.tensor([2.0, -2.0, 2.0, -2.0])
    seen = found(answer, answer)
    seen = type(seen)(**{**seen.__dict__, "posture": Posture(turn.expand(4, 3, 3), tilted, torch.full((4,), 0.5))})
    nobody = torch.zeros(4, dtype=torch.bool)
    decided = decide(bare, seen, Gate(0.5, turn_at=0.0), "marginal", nobody)
    assert decided.kept.tolist() == [False, False, True, True]
    turned = (decided.pose != torch.eye(3)).flatten(1).any(1)
    assert turned.tolist() == [True, False, True, False]
    assert torch.equal(decided.pose[turned], turn.expand(2, 3, 3))
    stays = decide(bare, seen, Gate(0.0, turn_at=6.0), "marginal", nobody)
    assert stays.pose.unique(dim=0).tolist() == [torch.eye(3).tolist()]
    gone = torch.tensor([True, False, False, False])
    left = decide(bare, seen, Gate(0.5), "marginal", gone)
    assert left.kept.tolist() == [True, False, True, True]
    assert torch.equal(left.pose[0], torch.eye(3))


@pytest.mark.parametrize(
    "thresholds", [(0.1, 0.7, 2.3), (math.inf, math.inf, math.inf), (1e-9, -math.inf, 0.0)], ids=str
)
def test_thresholds_survive_everything_that_is_done_to_modules(thresholds, tmp_path, digits_net):
    gate = Gate(*thresholds)

    def numbers(one):
        return one.margin, one.exit_at, one.turn_at

    other = Gate(5.0)
    other.load_state_dict(gate.state_dict())
    assert numbers(other) == thresholds
    assert numbers(copy.deepcopy(gate)) == thresholds
    assert numbers(pickle.loads(pickle.dumps(gate))) == thresholds
    assert numbers(gate.to(torch.bfloat16).half().double().train()) == thresholds
    held = io.BytesIO()
    torch.save(gate.state_dict(), held)
    held.seek(0)
    other = Gate(5.0)
    other.load_state_dict(torch.load(held, weights_only=True))
    assert numbers(other) == thresholds
    robust = ht.ITS(digits_net, gate=gate)
    robust.save(tmp_path / "bundle")
    assert numbers(ht.ITS.load(tmp_path / "bundle", digits_net).gate) == thresholds
    assert f"margin={gate.margin:.3g}" in repr(robust)


@pytest.mark.parametrize("name", ["exit_at", "turn_at"])
@pytest.mark.parametrize("value", [math.nan, "x", None, [1]], ids=str)
def test_thresholds_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ht.OptionError, match=f"{name} must be a number; got"):
        Gate(1.0, **{name: value})


@pytest.mark.parametrize("margin", [math.nan, "2", None, True], ids=str)
def test_margins_that_mean_nothing_are_refused(margin):
    with pytest.raises(ht.OptionError, match="margin must be a number; got"):
        Gate(margin)


@pytest.mark.parametrize("gate", ["2", True, object()], ids=["word", "truth", "object"])
def test_gates_that_mean_nothing_are_refused_at_the_door(digits_net, gate):
    with pytest.raises(ht.OptionError, match=r"gate must be a number, \"cautious\", a Gate or None; got"):
        ht.ITS(digits_net, gate=gate)


@pytest.mark.parametrize("calibrator", ["balance", 3.0], ids=str)
def test_calibrators_that_mean_nothing_are_refused_at_the_door(digits_net, calibrator):
    with pytest.raises(ht.OptionError, match=r"calibrator must be a callable, \"batch\" or None; got"):
        ht.ITS(digits_net, calibrator=calibrator)


@pytest.mark.parametrize("number", [2.5, np.float64(1e9), 3])
def test_a_number_that_no_answer_reaches_is_refused(digits_net, number):
    with pytest.raises(ht.OptionError, match=r"gate must be a number up to 2.3: .* math.inf keeps all bare answers"):
        ht.ITS(digits_net, gate=number)


def test_a_number_as_gate_is_a_plain_gate(digits_net, tilted):
    options = {"search": "joint", "budget": 24, "readout": "marginal"}
    free = its(digits_net, gate=None, **options).search(tilted)
    with torch.no_grad():
        bare = digits_net(tilted)
    against = for_replacing(Evidence(bare), bare, free.logits, None)
    for margin in (-0.3, np.float32(0.2), 0):
        result = its(digits_net, gate=margin, **options).search(tilted)
        assert torch.equal(result.gated, against < float(margin))
        assert 0 < int(result.gated.sum()) < 60
        assert torch.equal(result.labels, torch.where(result.gated, bare.argmax(1), free.labels))
    everything = its(digits_net, gate=math.inf, **options).search(tilted)
    assert bool(everything.gated.all())


@pytest.mark.parametrize("before", [None, "cautious", 1.0])
def test_a_gate_set_afterwards_means_what_it_means_at_the_door(digits_net, tilted, before):
    robust = its(digits_net, samples=9, gate=before)
    robust.gate = 2.0
    assert isinstance(robust.gate, Gate)
    assert torch.equal(robust(tilted[:8]), its(digits_net, samples=9, gate=2.0)(tilted[:8]))
    robust.gate = "cautious"
    assert isinstance(robust.gate, CautiousGate)
    robust.gate = None
    assert not bool(robust.search(tilted[:8]).gated.any())
    with pytest.raises(ht.OptionError, match="gate must be a number, "):
        robust.gate = "strict"


def test_a_gate_and_a_calibrator_of_ones_own_may_take_the_place_of_modules(digits_net, tilted):
    class Open:
        def leaves_early(self, root):
            return torch.zeros_like(root.labels, dtype=torch.bool)

        def keeps(self, bare, found, answer):
            return torch.zeros_like(bare.labels, dtype=torch.bool)

    robust = its(digits_net, samples=9, calibrator=Balance(torch.zeros(9)))
    robust.gate, robust.calibrator = Open(), "batch"
    anew = its(digits_net, samples=9, gate=Open(), calibrator="batch")
    assert torch.equal(robust(tilted[:8]), anew(tilted[:8]))
    assert robust.state_dict().keys() == anew.state_dict().keys()
    with pytest.raises(ht.OptionError, match="calibrator must be a callable"):
        robust.calibrator = "balance"


def test_gated_images_return_the_bare_logits_bit_for_bit_and_stay_where_they_are(digits_net, tilted):
    result = its(digits_net, search="joint", budget=24, readout="marginal", gate=0.5).search(tilted)
    with torch.no_grad():
        bare = digits_net(tilted)
    kept = result.gated
    assert 0 < int(kept.sum()) < 60
    assert torch.equal(result.logits[kept], bare[kept])
    assert torch.equal(result.pose[kept], torch.eye(3).expand(int(kept.sum()), 3, 3))
    assert torch.equal(result.canonical()[kept], tilted[kept])
    assert not torch.equal(result.logits[~kept], bare[~kept])


# --- fitted gates -----------------------------------------------------------------------------------------------------


def test_a_promise_of_nothing_keeps_every_bare_answer(fitted, upright, tilted, digits_net):
    robust = twin(fitted).fit(upright[:60], method="keep", promise=0.0)
    assert robust.gate.margin == math.inf
    with torch.no_grad():
        for images in (upright[:30], tilted):
            assert torch.equal(robust(images), digits_net(images))
    assert robust.report["verdict"]["upright answers replaced"] == 0


def test_a_gate_is_fitted_anew_for_a_lattice_of_which_the_head_guesses_nothing(digits_net, upright):
    """Guesses are of the lattice that the head was fitted with; another search asks for none, and none count."""
    robust = ht.ITS(digits_net, **ht.fast()).fit(upright[:100], recipe=HeadRecipe(looks=2, hidden=32))
    robust.calibrator.guess_weight.fill_(0.5)
    other = robust.but(levels=None, search=ht.Joint(budget=48))
    other.fit(upright[:100], method="keep", recipe=HeadRecipe(looks=2, hidden=32))
    assert math.isfinite(other.gate.margin)


def test_a_fitted_gate_lets_answers_through_where_no_pose_moves_an_image_far(digits_net, upright):
    """Half of the farthest shift is far; were none, nothing would ever seem tilted, and every answer would stay."""
    levels = [ht.translate_x(0.25)]
    robust = ht.ITS(digits_net, **ht.fast(levels)).fit(upright[:120], recipe=HeadRecipe(looks=2, hidden=32), promise=20)
    moved = warp(upright[120:200], ht.translate_x().matrix(0.22).expand(80, 3, 3), padding="zeros")
    found = robust.search(moved)
    assert int((found.views > 2).sum()) > 15
    right = digits_net(upright[120:200]).argmax(1)
    assert int((found.labels == right).sum()) >= int((found.bare.argmax(1) == right).sum()) + 4


def test_a_larger_promise_keeps_fewer_answers(fitted, upright, tilted):
    gates = [
        twin(fitted).fit(upright[:100], method="keep", promise=points, early_exit=False) for points in (0.5, 5.0, 100.0)
    ]
    margins = [robust.gate.margin for robust in gates]
    assert margins == sorted(margins, reverse=True)
    assert margins[-1] == -math.inf
    kept = [int(robust.search(tilted).gated.sum()) for robust in gates]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0


def test_an_early_exit_costs_one_view_and_gives_the_bare_answer(fitted, upright, digits_net):
    with torch.no_grad():
        scores = fitted.calibrator.as_it_came(fitted.predictor(upright[:60])).upright[:, 0]
    robust = twin(fitted)
    robust.gate = Gate(fitted.gate.margin, float(scores.median()), fitted.gate.turn_at)
    result = robust.search(upright[:60])
    early = scores >= scores.median()
    assert result.views.tolist() == torch.where(early, 1, 24).tolist()
    assert bool(result.gated[early].all())
    with torch.no_grad():
        assert torch.equal(result.logits[early], digits_net(upright[:60])[early])
    assert torch.equal(result.pose[early], torch.eye(3).expand(int(early.sum()), 3, 3))
    assert_close(result.pose_confidence[early], scores[early].sigmoid())
    assert result.hypotheses.active[early].sum(1).unique().tolist() == [1]
    assert bool(result.trace[0].confidence[early].isnan().all())
    assert result.trace[0].labels[early].unique().tolist() == [-1]
    assert bool(result.trace[0].confidence[~early].isfinite().all())


def test_without_an_early_exit_every_image_is_searched(fitted, upright):
    robust = twin(fitted).fit(upright[:60], method="keep", promise=Promise(1.0, tilted=100.0), early_exit=False)
    assert robust.gate.exit_at == robust.report["gate"]["exit_at"] == math.inf
    assert robust.search(upright[:20]).views.tolist() == [24] * 20
    quick = twin(fitted).fit(upright[:60], method="keep", promise=Promise(1.0, tilted=100.0))
    assert quick.gate.exit_at == -math.inf
    assert quick.search(upright[:20]).views.tolist() == [1] * 20


def test_results_do_not_depend_on_how_a_batch_is_split_with_head_and_gate(fitted, tilted, upright):
    images = torch.cat([tilted[:30], upright[:30]])
    whole = fitted.search(images)
    assert 0 < int(whole.gated.sum()) < 60
    for size in (1, 7, 30):
        parts = concatenate([fitted.search(part) for part in images.split(size)])
        assert torch.equal(parts.labels, whole.labels)
        assert torch.equal(parts.gated, whole.gated)
        assert torch.equal(parts.views, whole.views)
        assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert_close(parts.pose, whole.pose, rtol=0, atol=1e-4)
        assert_close(parts.pose_confidence, whole.pose_confidence, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_change_no_answer_of_a_fitted_wrapper(fitted, tilted, training):
    """The head has dropout layers of its own."""
    before = fitted.search(tilted)
    other = copy.deepcopy(fitted).train(training)
    state = torch.get_rng_state()
    after = other.search(tilted)
    assert torch.equal(torch.get_rng_state(), state)
    assert other.model.training is training
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.views, before.views)


def test_a_gate_can_be_fitted_for_the_bare_model(digits_net, upright):
    robust = its(digits_net, search="joint", budget=12, readout="marginal").fit(upright, method="keep", promise=1.0)
    assert robust.calibrator is None
    assert robust.report["method"] == "keep"
    assert robust.gate.exit_at == math.inf  # nobody says what is upright
    result = robust.search(upright[:40])
    assert bool(result.pose_confidence.isnan().all())
    with torch.no_grad():
        agree = result.labels == digits_net(upright[:40]).argmax(1)
    assert float(agree.float().mean()) >= 0.95


@pytest.mark.parametrize("readout", ["marginal", "incumbent"])
def test_a_gate_of_few_images_keeps_most_of_what_the_search_alone_would_lose(digits_net, readout):
    """A hundred images show next to nothing of half a point, and the network was trained on them."""
    few, test = ht_data.load("digits", "fit", limit=100).floats(), ht_data.load("digits", "test")
    robust = its(digits_net, search="joint", budget=18, readout=readout).fit(few, method="balance", promise=0.5)
    images, labels = test.floats(), test.labels

    def accuracy(model):
        return 100 * float((model(images).argmax(1) == labels).float().mean())

    with torch.no_grad():
        bare = accuracy(digits_net)
    gated = accuracy(robust)
    robust.gate = None
    alone = accuracy(robust)
    assert alone < bare - 8
    assert gated - alone > 0.75 * (bare - alone)


# --- the gate of a search that was never fitted -----------------------------------------------------------------------


def test_the_cautious_gate_of_an_unfitted_wrapper_keeps_upright_digits_and_changes_tilted_ones(digits_net):
    data = ht_data.load("digits", "test", limit=200)
    levels = [ht.rotation()]
    tilts = draw("rotation", len(data), seed=1)
    upright, tilted = data.floats(), perturb_dataset(data, tilts).images
    with torch.no_grad():
        bare = [digits_net(images).argmax(1) for images in (upright, tilted)]
    robust, free = ht.ITS(digits_net, levels), ht.ITS(digits_net, levels, gate=None)
    right = [
        (100 * (labels == data.labels).double().mean()).item()
        for labels in (bare[0], robust.search(upright).labels, free.search(upright).labels)
    ]
    assert right[1] >= right[0] - 1  # the promise of the default
    assert right[2] < right[0] - 20  # which the search alone breaks
    assert int((robust.search(tilted).labels != bare[1]).sum()) > 0


def test_the_cautious_gate_minds_neither_scale_nor_shift_of_the_logits(digits_net, tilted):
    class Rescaled(torch.nn.Module):
        def forward(self, images):
            return digits_net(images) + 7.0

    plain = its(digits_net, confidence="energy").search(tilted)
    shifted = its(Rescaled(), confidence="energy").search(tilted)
    assert torch.equal(plain.gated, shifted.gated)
    assert 0 < int(plain.gated.sum()) < len(tilted)


def test_the_cautious_gate_weighs_the_lead_in_deviations_and_the_doubt():
    bare = Evidence(torch.tensor([[3.0, 0.0, 0.0]]).log_softmax(1))
    spread, doubt = bare.logits.std(1, correction=0), -bare.log_probs[0, 0]
    gate, answers = CautiousGate(2.5, 0.4), []
    for lead in (0.0, 2.0, 5.0, 9.0):
        marginal = torch.tensor([[0.0, float(bare.logits[0, 0]) + lead, 0.0]])
        score = lead / spread + 0.4 * doubt.log()
        kept = gate.keeps(bare, found(marginal, bare.logits, bare.logits), marginal)
        assert kept.tolist() == (score < 2.5).tolist()
        answers += kept.tolist()
    assert answers[0] is True
    assert answers[-1] is False
