"""Facts that no test stated until a mutant of the core lived through all of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration import fitter, looks
from headtilt.calibration.balance import balance_of_batch
from headtilt.calibration.distances import Neighbours
from headtilt.calibration.fit_images import Seeds
from headtilt.calibration.gate import CautiousGate, lead_of_rival
from headtilt.calibration.head import OrbitHead, _groups, fit_head, pose_loss, thorough
from headtilt.calibration.sampler import Orbits, Sampler
from headtilt.errors import DataError, MissingExtraError, ModelError, OptionError
from headtilt.geometry.warp import warp_all
from headtilt.io import bundle, export
from headtilt.model import outputs
from headtilt.model.evidence import Evidence
from headtilt.model.fingerprint import difference, of_noise
from headtilt.model.predictor import Predictor
from headtilt.model.views import only
from headtilt.search.anneal import Anneal
from headtilt.search.joint import look_where_likely
from headtilt.search.lattice import covering, lattice
from headtilt.search.seen import log_weights
from tests.toys import TinyNet, tiny_images


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


def test_groups_are_called_what_they_are_and_reach_as_far_as_they_say():
    assert ht.translate(0.25, 0.0).name == "translate"
    assert ht.quarter_turns().name == "quarter_turns"
    assert (ht.translate_x().low, ht.translate_x().high) == (-0.25, 0.25)


def test_a_shear_reaches_a_quarter_unless_said():
    assert (ht.shear().low, ht.shear().high) == (-0.25, 0.25)


@pytest.mark.parametrize("group", [ht.shear, ht.shear_x, ht.translate_y], ids=lambda group: group.__name__)
def test_a_range_that_is_no_number_is_named_by_its_group(group):
    with pytest.raises(OptionError, match=f"^the range of {group.__name__} must be"):
        group("far")


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_a_constant_padding_keeps_interpolation_and_fills_what_lies_outside(interpolation):
    images = torch.arange(16.0).reshape(1, 1, 4, 4) / 16
    pose = torch.tensor([[1.0, 0, 0.3], [0, 1, 0], [0, 0, 1]])[None]
    plain = ht.warp(images, pose, interpolation=interpolation)
    inside = ht.warp(torch.ones_like(images), pose, interpolation=interpolation)
    expected = plain + 0.5 * (1 - inside)
    torch.testing.assert_close(ht.warp(images, pose, padding=0.5, interpolation=interpolation), expected)


def test_every_image_under_every_pose_is_padded_with_zeros_unless_said():
    images, poses = torch.rand(2, 1, 6, 6), ht.rotation().matrix(torch.tensor([0.3, 1.0]))
    each = torch.stack([ht.warp(images, pose.expand(2, 3, 3)) for pose in poses])
    torch.testing.assert_close(warp_all(images, poses), each)


def test_a_lattice_of_three_groups_spreads_each_coordinate_over_its_whole_range():
    points = lattice((ht.rotation(), ht.scale(0.25), ht.shear_x(0.25)), 60)
    for column in points.T:
        ordered = ((column - column.min()) / (column.max() - column.min())).sort().values
        assert float(ordered.diff().max()) < 0.1
    # No two coordinates move together.
    assert float(torch.corrcoef(points.T.double()).fill_diagonal_(0).abs().max()) < 0.3


def test_similarities_are_worth_twenty_logits_unless_said():
    assert Neighbours(torch.zeros(2, 1, 3)).scale == 20.0


@pytest.mark.parametrize(
    ("levels", "views"), [([ht.rotation()], 24), ([ht.rotation(), ht.scale(0.25)], 72), ([ht.quarter_turns()], 4)]
)
def test_a_batch_is_balanced_over_more_views_where_there_are_several_levels(levels, views):
    class Asked:
        def all_views(self, images, poses, **_):
            self.poses = len(poses)
            return Evidence(torch.arange(len(images) * len(poses) * 3.0).reshape(-1, 3).sin())

    asked = Asked()
    balance_of_batch(asked, torch.rand(4, 1, 6, 6), levels, readout="marginal", padding=0.0, interpolation="bilinear")
    assert asked.poses == views


def test_views_that_stand_for_many_others_count_by_their_number():
    poses = ht.rotation().matrix(torch.tensor([0.0, 0.5, 1.0]))
    assert_close(log_weights(poses), torch.zeros(3))
    assert_close(log_weights(poses, 160).exp(), torch.tensor([1.0, 0.1, 0.1]))


def test_an_evaluator_of_some_images_is_asked_for_where_there_is_one():
    class Narrowing:
        def __call__(self, index, poses):
            return index

        def of(self, rows):
            return lambda index, poses: -rows[index]

    rows, index = torch.tensor([3, 5]), torch.tensor([1, 0, 1])
    assert only(Narrowing(), rows)(index, None).tolist() == [-5, -3, -5]
    assert only(lambda index, poses: index, rows)(index, None).tolist() == [5, 3, 5]


@pytest.mark.parametrize("end", ["low", "high"])
def test_an_end_of_a_level_that_is_no_number_is_named(end):
    level = {
        "name": "turn",
        "algebra": [[0] * 3] * 3,
        "low": -1,
        "high": 1,
        "periodic": False,
        "spacing": None,
        end: "far",
    }
    with pytest.raises(OptionError, match=f"^{end} must be"):
        bundle._group(level)


def test_a_head_adds_a_number_of_its_own_to_every_class():
    head = OrbitHead(torch.zeros(3), torch.zeros(3), torch.ones(3), source="logits", hidden=4, per_class=True).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.network[-1].bias.copy_(torch.tensor([1.0, 2.0, 3.0, 0.0]))
    assert_close(head(Evidence(torch.zeros(2, 3))).logits, torch.tensor([[1.0, 2.0, 3.0]] * 2))


def test_proposals_of_another_lattice_are_refused_in_a_sentence():
    head = SimpleNamespace(proposals=SimpleNamespace(poses=7))
    with pytest.raises(DataError, match="the head proposes 7 poses, and the search has another lattice"):
        bundle._check_proposals(ht.Joint([ht.rotation()], lattice=8), head)
    bundle._check_proposals(ht.Joint([ht.rotation()], lattice=7), head)
    bundle._check_proposals(ht.Tree([ht.rotation()]), head)  # which asks for none


def test_proposals_are_taught_by_the_statistics_of_the_head(monkeypatch):
    mean, deviation = torch.full((4,), 0.5), torch.full((4,), 2.0)
    head = OrbitHead(torch.zeros(3), mean, deviation, source="features", hidden=4, per_class=True)
    told = []
    monkeypatch.setattr(fitter, "fit_proposals", lambda *words: told.append(words))
    fitting = object.__new__(fitter.Fitting)
    plan = ht.Joint([ht.rotation()], budget=8, lattice=16)
    asked = {"fitter": SimpleNamespace(plan=plan, recipe=SimpleNamespace(hidden=9)), "seeds": Seeds(0)}
    for name, value in asked.items():
        object.__setattr__(fitting, name, value)
    fitting._proposals(head, SimpleNamespace(orbits="orbits"), "rows", 0)
    ((orbits, rows, poses, mean, deviation, hidden, _),) = told
    assert (orbits, rows, len(poses), hidden) == ("orbits", "rows", plan.choices, 9)
    assert (mean.tolist(), deviation.tolist()) == ([0.5] * 4, [2.0] * 4)


def test_an_export_without_its_extra_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"^onnx and onnxscript.*headtilt\[onnx\]"):
        export._write_onnx(None, torch.zeros(1), tmp_path / "net.onnx", (), {})


def test_features_of_a_plain_callable_are_refused_in_a_sentence():
    with pytest.raises(OptionError, match=r"^features need an nn\.Module; a plain callable has none"):
        outputs.tapped_module(lambda images: images, "layer")


def test_what_goes_with_an_exported_file_has_names_that_readers_know():
    graph = export.Graph(Predictor(TinyNet().eval()), ht.Tree([ht.rotation()]), None, None, "marginal", 0.0, "bilinear")
    assert set(export.metadata(graph, (1, 12, 12), ["a"])) == {
        "headtilt.version",
        "headtilt.options",
        "headtilt.labels",
    }
    options = json.loads(export.metadata(graph, (1, 12, 12), None)["headtilt.options"])
    assert (options["search"], options["levels"], options["readout"]) == ("tree", ["rotation"], "marginal")
    assert (options["padding"], options["interpolation"], options["gate"]) == (0.0, "bilinear", False)


def test_to_know_that_an_image_came_upright_lowers_the_loss_of_the_pose():
    aim, came = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([True, False])

    def told(first):
        upright = torch.stack([first, first + torch.tensor([-4.0, 4.0])], dim=1)[..., None]  # which view, is said alike
        return float(pose_loss(Evidence(torch.zeros(2, 2, 3), upright=upright), aim, came))

    assert told(torch.tensor([3.0, -3.0])) < told(torch.zeros(2)) < told(torch.tensor([-3.0, 3.0]))


UNCHANGED = OrbitHead(torch.zeros(3), torch.zeros(1), torch.ones(1), source="logits", hidden=1, per_class=True)
UNTRAINED = ht.HeadRecipe(looks=1, views=4, epochs=0, hidden=8)  # all that a fit does but the training itself


def test_a_fit_counts_whole_views_and_says_what_it_is_at():
    told = []
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=6))
    robust.fit(tiny_images(70), recipe=UNTRAINED, progress=lambda *args: told.append(args))
    stages = dict.fromkeys(stage for stage, _, _ in told)
    assert list(stages) == [
        "looking at upright images",
        "choosing a padding",
        "looking at tilted images",
        "searching upright images",
        "fitted",
    ]
    searched = [done for stage, done, _ in told if stage == "searching upright images"]
    before = max(done for stage, done, _ in told if stage == "looking at tilted images")
    assert max(searched) - before == 70 * (1 + 6), "each image as it came, and six views"
    assert robust.report["proposes"] is False
    assert set(robust.report["padding_scores"]) == {"auto", "zeros", "border", "reflection"}


def test_the_training_of_a_head_is_counted_in_whole_views(monkeypatch):
    told = []
    monkeypatch.setattr(fitter, "fit_head", lambda *args, **_: [args[5](step, 7) for step in range(7)] and UNCHANGED)
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=6))
    robust.fit(tiny_images(70), recipe=UNTRAINED, promise=None, progress=lambda *args: told.append(args))
    trained = [done for stage, done, _ in told if stage == "fitting the head"]
    assert len(trained) == 7
    assert all(isinstance(done, int) for done in trained)


def test_where_the_likely_poses_are_just_enough_no_other_is_looked_at():
    asked = []

    def evaluate(index, poses):
        asked.append(len(index))
        return Evidence(torch.zeros(len(index), 3))

    _, poses = covering((ht.rotation(),), 4, torch.zeros(1))
    likely = torch.tensor([[0.125, 0.25, 0.5, 0.125]]).log()  # of four, the identity is the third
    root = Evidence(torch.zeros(1, 3), poses=likely)
    assert (
        look_where_likely(
            ht.Joint((ht.rotation(),), budget=4, lattice=len(poses), first=4, mass=0.5, sure=1.0, upright=1.0),
            evaluate,
            root,
        ).looked.sum()
        == 1
    )
    assert (
        look_where_likely(
            ht.Joint((ht.rotation(),), budget=4, lattice=len(poses), first=4, mass=0.75, sure=1.0, upright=1.0),
            evaluate,
            root,
        ).looked.sum()
        == 2
    )
    assert asked == [1]


def test_with_images_held_out_by_name_one_head_is_fitted_and_these_alone_tell_the_gate(monkeypatch):
    fitted = []
    fit_head = fitter.fit_head
    monkeypatch.setattr(fitter, "fit_head", lambda *args, **named: fitted.append(1) or fit_head(*args, **named))
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=6), readout="marginal")
    robust.fit(tiny_images(60), held_out=tiny_images(30), recipe=UNTRAINED)
    assert len(fitted) == 1
    assert robust.report["gate"]["held_out"] == 30


def test_looks_end_where_memory_of_their_device_should_hold_no_more(monkeypatch):
    monkeypatch.setattr(looks, "MOST_KEPT", {"cpu": 300 * 5 * 5, "cuda": 10**9})
    recipe = replace(UNTRAINED, looks=4, views=4)
    plan = ht.Joint([ht.rotation()], budget=6)
    fitting = fitter.Fitter(Predictor(TinyNet().eval()), plan, recipe=recipe, promise=None)
    images = tiny_images(256)
    fit = fitter.Fitting(fitting, images, fitting.folds(256, None, np.random.default_rng(0)), Seeds(0))
    sampler = Sampler(fitting.predictor, plan.levels, views=4)
    seen = fit._looks(sampler, lambda *_: None)
    assert len(seen.image) == 2 * 256, "256 images from five views each, twice: then there are more than 7,500 numbers"


def test_upright_images_are_searched_with_the_readout_that_will_answer():
    plan, images = ht.Joint([ht.rotation()], budget=12), tiny_images(6)
    fitting = fitter.Fitter(Predictor(TinyNet().eval()), plan, padding="zeros", readout="incumbent")
    fit = fitter.Fitting(fitting, images, [], Seeds(0))
    sampler = Sampler(fitting.predictor, plan.levels, "zeros")
    found = fit._searched(sampler, torch.arange(6), None, lambda *_: None)
    result = ht.ITS(TinyNet(), search=plan, padding="zeros", gate=None).search(images)
    assert_close(found.lead, lead_of_rival(Evidence(result.bare), result.logits))


def test_a_thorough_recipe_looks_eight_times_as_often_for_twelve_passes():
    assert thorough().looks == 8 * ht.HeadRecipe().looks_at(6000, 16)
    assert thorough().steps(24 * 2000) == 24 * 2000 * 12 / 256


def test_a_head_that_scores_views_is_drawn_to_zero_more_strongly_than_one_that_scores_classes():
    head = OrbitHead(torch.zeros(3), torch.zeros(3), torch.ones(3), source="logits", hidden=4, per_class=True)
    of_classes, of_views = (_groups(head, per_class, 1e-3) for per_class in (True, False))
    assert of_views[0]["weight_decay"] == 2 * of_classes[0]["weight_decay"] > 0
    assert of_views[1]["weight_decay"] == of_classes[1]["weight_decay"] == 0


def test_a_head_learns_which_view_is_upright_from_the_weight_of_the_pose():
    """Of two views the one whose first logit is high is upright; labels say nothing about it."""
    first = torch.tensor([0, 1]).repeat(32)
    logits = torch.zeros(64, 2, 3)
    logits[torch.arange(64), first, 0] = 1.0
    aim = nn.functional.one_hot(first, 2).float()
    poses = ht.rotation().matrix(torch.tensor([0.0, 2.0])).expand(64, 2, 3, 3)
    coordinates, exact, tilts = torch.zeros(64, 2, 1), torch.ones(64) > 0, torch.eye(3).expand(64, 3, 3)
    orbits = Orbits(Evidence(logits), coordinates, poses, aim, first == 0, exact, tilts)
    recipe = ht.HeadRecipe(source="logits", hidden=4, looks=1, epochs=200, pose=1.0)  # 400 steps, where few will do
    targets = torch.full((64, 3), 1 / 3)
    head = fit_head(orbits, targets, torch.zeros(3), recipe, np.random.SeedSequence(0))
    told = head(Evidence(logits)).upright[..., 0]
    assert torch.equal(told.argmax(1), first)
    assert torch.equal(told[:, 0] > 0, first == 0)


def test_a_cautious_gate_lets_a_head_turn_images():
    assert CautiousGate().turns(Evidence(torch.zeros(3, 2)), None, None).tolist() == [True] * 3


class Twice(nn.Module):
    """A layer that is shown every view twice, as one batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(144, 4), nn.Linear(4, 3)

    def forward(self, images):
        both = self.layer(torch.cat([images, images]).flatten(1))
        return self.last(both[: len(images)])


def test_a_layer_that_runs_on_every_view_twice_is_no_tap_of_a_model_without_dropout_passes():
    with pytest.raises(ModelError, match="ran on 8 rows for 4 views"):
        Predictor(Twice().eval(), features="layer")(tiny_images(4))


def test_a_model_that_takes_no_noise_differs_in_one_sentence_without_a_stop_at_its_end():
    known = of_noise(Predictor(TinyNet().eval()), (1, 12, 12))

    def refusing(images):
        raise ValueError("no noise today.")

    said = difference(Predictor(refusing), known)
    assert said is not None
    assert ": no noise today. Check that" in said
    assert not said.endswith(".")


def test_a_model_without_features_differs_from_one_with_some_by_all_of_them():
    net = TinyNet().eval()
    known = of_noise(Predictor(net, features="classifier"), (1, 12, 12))
    assert difference(Predictor(net), known) == "this one has 0 features, that one has 16"


def test_quarter_turns_of_a_bundle_come_back_as_quarter_turns():
    assert bundle._group("quarter_turns") == ht.quarter_turns()
    assert bundle._group("reflection") == bundle._group(None) == ht.reflection()


def test_a_bundle_that_makes_no_sense_is_named_with_what_is_wrong(tmp_path):
    ht.ITS(TinyNet()).save(tmp_path)
    config = json.loads((tmp_path / bundle.CONFIG).read_text())
    del config["options"]["search"]["kind"]
    (tmp_path / bundle.CONFIG).write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"is not a bundle that this version understands: KeyError\('kind'\)\. Save"):
        bundle.read(tmp_path)


def test_a_network_of_another_width_is_told_by_the_shape_of_its_tensors():
    with pytest.raises(DataError, match=r"a network 7 wide, and its tensors are \(8, 5\)"):
        bundle._width({"hidden": 7}, torch.zeros(8, 5))
    assert bundle._width({"hidden": 8}, torch.zeros(8, 5)) == 8


def test_some_images_of_a_result_keep_what_all_images_have_in_common():
    result = ht.ITS(TinyNet(), search=ht.Tree(samples=5)).search(tiny_images(4))
    some = result[1:3]
    assert torch.equal(some.trace[0].parameters, result.trace[0].parameters)
    assert torch.equal(some.trace[0].poses(), result.trace[0].poses()[1:3])
    assert result.describe() == result.describe(0) != result.describe(1)


def test_an_exported_file_is_one_file(tmp_path):
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    export.write_module(TinyNet(size=48).eval(), tiny_images(2, 48, 48), tmp_path / "net.onnx", ("logits",), {})
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    assert (tmp_path / "net.onnx").stat().st_size > 4 * 16 * 1024, "the weights of the hidden layer are in it"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_any_precision_is_exported_in_its_own(dtype, tmp_path):
    robust = ht.ITS(TinyNet().eval().to(dtype), search=ht.Joint(budget=4), padding="zeros", gate=None)
    robust.export(tmp_path / "net.pt2", (1, 12, 12))
    images = tiny_images(3).to(dtype)
    logits, pose, _ = torch.export.load(tmp_path / "net.pt2").module()(images)
    result = robust.search(images)
    assert_close(logits, result.logits)
    assert_close(pose, result.pose)
