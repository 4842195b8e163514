"""The ruler: every method runs, the same seed gives the same numbers, and the sums are right."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.gate import Promise
from headtilt.calibration.head import HeadRecipe
from headtilt.model.predictor import Predictor
from headtilt.paper.baselines import orient
from headtilt.paper.baselines.tta import tta
from headtilt.paper.data.dataset import Dataset
from headtilt.paper.data.perturb import draw, draw_nearly, draw_quarters, perturb_dataset, turn_dataset
from headtilt.paper.experiments import evaluate
from headtilt.paper.experiments.evaluate import Evaluation, Network, curve
from headtilt.paper.experiments.methods import METHODS, Prediction, Setting, ask, build, fitted, reads_fit_images
from headtilt.paper.experiments.retrain import MORE
from headtilt.paper.experiments.scores import CONDITIONS, FIELDS, POSES, confusions, intervals, summarise
from headtilt.paper.train import RECIPES, Recipe, accuracy
from headtilt.presets import accurate, fast

QUICK = HeadRecipe(hidden=32, looks=1)
SILENT = {"tta-mean", "augmented", "last-layer"}  # about how the image was transformed


def evaluation(*methods: str, **options: Any) -> Evaluation:
    options = {"perturb": "rotation", "limit": 40, "fit_images": 125, "mc_passes": 2, "recipe": QUICK, **options}
    return Evaluation("digits", methods, **options)


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    """All methods on forty turned digits, with networks that were hardly retrained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "digits", Recipe(1))
        patch.setitem(MORE, "small", 1)
        patch.setattr(orient, "EXAMPLES", 2000)
        yield evaluation(*METHODS).run()


# --- every method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_reports_every_field(report, method):
    found = report["methods"][method]
    added = {f"{name}_{what}" for name in CONDITIONS.values() for what in ("std", "interval")}
    assert set(found) == {*FIELDS, *added}
    for name in CONDITIONS.values():
        assert found[f"{name}_interval"][0] <= found[name] <= found[f"{name}_interval"][1]
        assert 0 <= found[name] <= 100
        assert found[name] * 40 / 100 == pytest.approx(round(found[name] * 40 / 100))
        assert found[f"{name}_std"] == 0
    assert found["views_per_image"] >= 1
    assert found["upright_views_per_image"] >= 1
    assert found["images_per_second"] > 0
    assert report["per_network"][method] == [{name: found[name] for name in FIELDS}]


@pytest.mark.parametrize("method", METHODS)
def test_pose_errors_are_null_where_a_method_says_nothing_of_poses(report, method):
    found = report["methods"][method]
    for name in POSES:
        assert (found[name] is None) == (method in SILENT)


def test_the_report_says_what_was_measured(report):
    assert report["conditions"] == list(CONDITIONS)
    assert {key: report[key] for key in ("dataset", "perturb", "seed", "count", "networks", "split", "mode")} == {
        "dataset": "digits",
        "perturb": "rotation",
        "seed": 0,
        "count": 40,
        "networks": 1,
        "split": "test",
        "mode": "each",
    }


def test_the_numbers_are_those_of_the_bare_model_and_of_test_time_augmentation(report, digits, digits_net):
    from headtilt.paper.data import load

    data = load("digits", "test", limit=40)
    test = perturb_dataset(data, draw("rotation", 40))
    nearly, quarter = perturb_dataset(data, draw_nearly(40, 28)), turn_dataset(data, draw_quarters(40))
    bare = report["methods"]["vanilla"]
    assert bare["accuracy"] == pytest.approx(accuracy(digits_net, test.images, test.labels))
    assert bare["nearly_accuracy"] == pytest.approx(accuracy(digits_net, nearly.images, nearly.labels))
    assert bare["quarter_accuracy"] == pytest.approx(accuracy(digits_net, quarter.images, quarter.labels))
    assert (bare["quarter_found"], bare["upright_turned"]) == (0, 0)
    assert bare["upright_accuracy"] == pytest.approx(accuracy(digits_net, data.images, data.labels))
    assert bare["views_per_image"] == 1
    for merge in ("mean", "max"):
        merged, _ = tta(Predictor(digits_net), test.images, merge)
        right = float((merged.argmax(1) == test.labels).float().mean()) * 100
        assert report["methods"][f"tta-{merge}"]["accuracy"] == pytest.approx(right)
        assert report["methods"][f"tta-{merge}"]["views_per_image"] == 17


def test_the_oracle_is_right_about_poses_and_nearly_as_good_as_upright(report):
    found = report["methods"]["oracle"]
    assert found["angle_error_deg"] == pytest.approx(0, abs=1e-3)
    assert (found["angle_within_15"], found["quarter_found"], found["upright_turned"]) == (100, 100, 0)
    assert found["frobenius"] == found["upright_turned"] == 0
    upright = report["methods"]["vanilla"]["upright_accuracy"]
    for name in CONDITIONS.values():
        assert found[name] >= upright - 5
    assert found["quarter_accuracy"] == found["upright_accuracy"] == upright, "no pixel is lost"
    assert found["views_per_image"] == 1


def test_orienting_first_helps_with_two_views(report):
    found, bare = report["methods"]["orient"], report["methods"]["vanilla"]
    assert found["accuracy"] > bare["accuracy"] + 20
    assert found["quarter_accuracy"] > bare["quarter_accuracy"] + 20
    assert (found["views_per_image"], found["upright_views_per_image"]) == (2, 2)


def test_what_is_said_of_poses_agrees_with_the_median(report):
    for method, found in report["methods"].items():
        if method not in SILENT:
            assert (found["angle_within_15"] >= 50) == (found["angle_error_deg"] <= 15), method


@pytest.mark.parametrize("perturb", ["scale", "shear", "translation"])
def test_without_a_whole_turn_there_are_no_quarters(perturb):
    report = evaluation("vanilla", "oracle", perturb=perturb).run()
    assert report["conditions"] == ["tilted", "upright", "nearly"]
    for found in report["methods"].values():
        for name in ("quarter_accuracy", "quarter_accuracy_std", "quarter_accuracy_interval", "quarter_found"):
            assert found[name] is None
        assert found["nearly_accuracy"] > 80


def test_images_that_are_not_square_have_no_quarters(digits_net, monkeypatch, digits):
    narrow = Dataset("narrow", digits.images[:8, :, :, 4:24], digits.labels[:8], digits.classes)
    monkeypatch.setattr(Evaluation, "_load", lambda self, split, limit: narrow)
    wide = Network(lambda images: digits_net(torch.nn.functional.pad(images, (4, 4))), "narrow")
    told = []
    report = evaluation("vanilla", models=(wide,)).run(lambda *args: told.append(args))
    assert "quarter" not in report["conditions"]
    assert report["methods"]["vanilla"]["quarter_accuracy"] is None
    assert told[-1][1:] == (3, 3)


def test_gates_cost_little_upright_and_fitted_searches_help_when_tilted(report):
    methods = report["methods"]
    assert methods["head-features"]["accuracy"] > methods["vanilla"]["accuracy"] + 20
    assert methods["balanced"]["accuracy"] > methods["vanilla"]["accuracy"] + 20
    for name in ("head", "head-features", "accurate"):
        assert methods[f"{name}+gate"]["upright_accuracy"] >= methods["vanilla"]["upright_accuracy"] - 5
    # One look at each image tells the gate of a balance little: it saves half of what the balance alone loses.
    lost = methods["vanilla"]["upright_accuracy"] - methods["balanced"]["upright_accuracy"]
    assert methods["balanced+gate"]["upright_accuracy"] >= methods["balanced"]["upright_accuracy"] + lost / 2
    assert methods["fast"]["views_per_image"] < 0.7 * methods["accurate"]["views_per_image"]


def test_the_classes_taken_for_one_another_account_for_the_mistakes(report):
    for method, found in report["methods"].items():
        shares = [share for _, _, share in report["most_confused"][method]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 100 - found["accuracy"] + 1e-9
        assert all(true != said for true, said, _ in report["most_confused"][method])
    assert sum(share for *_, share in report["most_confused"]["head-features"]) == pytest.approx(
        100 - report["methods"]["head-features"]["accuracy"]
    )  # so few that all are named


def test_confusions_are_counted_by_name_also_of_outputs_that_are_no_class_of_the_data():
    images = torch.zeros(5, 1, 2, 2, dtype=torch.uint8)
    data = Dataset("letters", images, torch.tensor([0, 1, 1, 2, 0]), ("a", "b", "c"))
    found = confusions(data, torch.tensor([0, 2, 2, 7, 1]))
    assert found == {("b", "c"): 2, ("c", "7"): 1, ("a", "b"): 1}
    network = Network(torch.nn.Identity(), "of many classes", outputs=(5, 3, 1))
    found = confusions(network.relabelled(data), torch.tensor([5, 1, 2, 0, 9]))
    assert found == {("b", "c"): 1, ("b", "2"): 1, ("c", "0"): 1, ("a", "9"): 1}


# --- the ruler itself -------------------------------------------------------------------------------------------------


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    """All that does not depend on the clock."""
    return {
        method: {name: value for name, value in found.items() if name != "images_per_second"}
        for method, found in report["methods"].items()
    }


def test_the_same_seed_gives_the_same_numbers_and_another_others(report):
    first = numbers(evaluation("joint", "balanced").run())
    assert first == {name: numbers(report)[name] for name in ("joint", "balanced")}
    assert numbers(evaluation("vanilla", seed=1).run())["vanilla"] != numbers(report)["vanilla"]


def test_the_numbers_do_not_depend_on_the_batch(report):
    for method, found in numbers(evaluation("paper3", "balanced+gate", batch=7).run()).items():
        for name, value in found.items():
            expected = report["methods"][method][name]
            assert value is expected is None or value == pytest.approx(expected, rel=1e-4), (method, name)


def test_several_networks_are_averaged():
    found = evaluation("vanilla", "energy", networks=3, limit=60).run()
    assert found["networks"] == 3
    for method in ("vanilla", "energy"):
        rows = [row["accuracy"] for row in found["per_network"][method]]
        assert len(rows) == 3
        assert len(set(rows)) > 1
        assert found["methods"][method]["accuracy"] == pytest.approx(statistics.fmean(rows))
        assert found["methods"][method]["accuracy_std"] == pytest.approx(statistics.stdev(rows))


def test_a_summary_holds_means_and_the_spread_of_accuracies():
    empty = dict.fromkeys(FIELDS)
    rows = [
        {**empty, "accuracy": 50.0, "upright_accuracy": 90.0, "frobenius": 1.0, "views_per_image": 10.0},
        {**empty, "accuracy": 70.0, "upright_accuracy": 90.0, "frobenius": 2.0, "views_per_image": 30.0},
    ]
    found = summarise(rows)
    assert (found["accuracy"], found["accuracy_std"]) == (60, pytest.approx(200**0.5))
    assert (found["upright_accuracy"], found["upright_accuracy_std"]) == (90, 0)
    assert (found["frobenius"], found["views_per_image"]) == (1.5, 20)
    assert found["angle_error_deg"] is found["quarter_accuracy"] is found["quarter_accuracy_std"] is None
    assert summarise(rows[:1])["accuracy_std"] == 0


def test_networks_of_ones_own_may_be_measured(report, digits_net):
    own = Network(digits_net, "mine")
    found = evaluation("vanilla", "energy", models=(own,)).run()
    assert numbers(found) == {name: numbers(report)[name] for name in ("vanilla", "energy")}
    with pytest.raises(ht.OptionError, match="augmented retrains a network of the zoo"):
        evaluation("augmented", models=(own,)).run()


def test_progress_reaches_its_end():
    told = []
    evaluation("vanilla", "energy").run(lambda *args: told.append(args))
    assert {what for what, _, _ in told} >= {"digits:0: vanilla", "digits:0: energy"}
    done = [(done, total) for what, done, total in told if what.startswith("digits:0")]
    assert all(0 <= step <= total for step, total in done)
    assert [step for step, _ in done] == sorted(step for step, _ in done)
    assert done[-1] == (8, 8), "two methods in four conditions"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("magic",)}, "method must be one of vanilla, .*; got 'magic'"),
        ({"perturb": "wobble"}, "perturb must be one of"),
        ({"mode": "all"}, "mode must be one of 'each', 'run', 'grid', 'paper'; got 'all'"),
        ({"networks": 0}, "networks must be a whole number of at least 1"),
    ],
    ids=str,
)
def test_evaluations_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ht.OptionError, match=message):
        Evaluation("digits", **{"methods": ("vanilla",), **options})


@pytest.mark.parametrize("mode", ["run", "grid"])
def test_other_modes_of_drawing_may_be_measured(report, mode):
    found = evaluation("vanilla", mode=mode).run()
    assert found["mode"] == mode
    assert numbers(found)["vanilla"] != numbers(report)["vanilla"]


def test_a_curve_has_the_accuracy_at_each_angle(digits, digits_net):
    few = digits.subset(range(60))

    def predict(images):
        with torch.no_grad():
            return Prediction(digits_net(images).argmax(1), None, 1)

    found = curve(predict, few, [0.0, 90.0, 360.0], "cpu")
    assert found[0] == pytest.approx(accuracy(digits_net, few.images, few.labels))
    assert found[2] == pytest.approx(found[0])
    assert found[1] < found[0] - 30


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def setting(digits_net) -> Setting:
    from headtilt.paper.data import load

    images = load("digits", "fit", limit=110).floats()
    return Setting(digits_net, (ht.rotation(),), lambda: images, recipe=QUICK, promise=Promise(2.0))


def test_a_method_that_does_not_exist_is_refused(setting):
    with pytest.raises(ht.OptionError, match=r"method must be one of vanilla, .*; got 'magic'"):
        build("magic", setting)


def test_the_oracle_undoes_what_it_is_told_and_refuses_to_guess(setting, digits):
    test = turn_dataset(digits.subset(range(20)), torch.full((20,), 2))
    oracle, bare = build("oracle", setting), build("vanilla", setting)
    told = ask(oracle, test.images, test.transforms)
    assert torch.equal(told.labels, bare(digits.floats(range(20))).labels)
    assert torch.equal(told.perturbation, test.transforms)
    assert torch.equal(ask(bare, test.images, test.transforms).labels, bare(test.images).labels)
    with pytest.raises(ht.OptionError, match="oracle must be told the true transforms of its 20 images"):
        oracle(test.images)


def test_the_oracle_pads_as_the_setting_says(digits):
    seen = []

    def model(images):
        seen.append(images.min())
        return images.flatten(1)[:, :3]

    images = torch.ones(2, 1, 8, 8)
    for padding in ("border", "zeros"):
        oracle = build("oracle", Setting(model, (ht.rotation(),), lambda: images, padding=padding))
        ask(oracle, images, ht.rotation().matrix(torch.tensor([0.7, 0.7])))
    assert float(min(seen[: len(seen) // 2])) == pytest.approx(1)
    assert float(min(seen)) == 0


def test_methods_that_read_the_fit_images_are_known():
    assert {name for name in METHODS if not reads_fit_images(name)} >= {"vanilla", "oracle", "tta-max", "augmented"}
    assert all(reads_fit_images(name) for name in ("orient", "balanced", "head+gate", "fast"))


def test_methods_that_look_at_other_views_or_have_no_gate_share_a_fit(setting, monkeypatch):
    fits = []
    inner = ht.ITS.fit

    def fit(self, *args, **more):
        fits.append((more["method"], self.plan.budget))
        return inner(self, *args, **more)

    monkeypatch.setattr(ht.ITS, "fit", fit)
    for name in ("head-features", "head-features+gate", "accurate+gate", "fast+gate", "fast"):
        build(name, setting)
    assert fits == [("head", 20)]
    budgets = [fitted(setting, "head", options(setting.levels), gate=True).plan.budget for options in (accurate, fast)]
    assert budgets == [36, 20]


def test_fit_images_come_from_the_split_that_is_named(monkeypatch):
    asked, inner = [], evaluate.load_data
    monkeypatch.setattr(evaluate, "load_data", lambda *args, **more: asked.append(args[1]) or inner(*args, **more))
    found = evaluation("bias", fit_split="train", limit=4).run()
    assert found["fit_split"] == "train"
    assert "train" in asked
    assert "fit" not in asked
    with pytest.raises(ht.OptionError, match="fit_split must be"):
        evaluation("bias", fit_split="test")


@pytest.mark.parametrize("first", [False, True], ids=["without first", "with first"])
def test_a_shared_calibrator_stays_without_a_gate(setting, first, digits):
    options = {"search": ht.Joint(budget=12), "readout": "marginal"}
    found = {gate: fitted(setting, "balance", options, gate=gate) for gate in (first, not first)}
    plain, gated = found[False], found[True]
    assert gated.calibrator is plain.calibrator
    assert gated.padding == plain.padding
    assert plain.gate is None
    assert gated.gate is not None
    images = digits.floats(range(20))
    assert not bool(plain.search(images).gated.any())
    assert bool(gated.search(images).gated.any())


def test_a_balance_for_the_incumbent_is_not_taken_for_the_marginal(setting):
    """The balance is fitted to the read-out; one of the other kind must not be shared."""
    biases = [
        fitted(setting, "balance", {"search": ht.Joint(budget=12), "readout": readout}, gate=False).calibrator.bias
        for readout in ("marginal", "incumbent")
    ]
    assert not torch.equal(*biases)


# --- test-time augmentation -------------------------------------------------------------------------------------------


def test_augmentation_merges_the_probabilities_of_the_views(digits_net, digits):
    images = digits.floats(range(6))
    orbit = ht.rotation().orbit(5).float()
    with torch.no_grad():
        views = torch.stack([digits_net(ht.warp(images, pose.expand(6, 3, 3))).softmax(1) for pose in orbit], dim=1)
    mean, _ = tta(Predictor(digits_net), images, samples=5)
    largest, undone = tta(Predictor(digits_net), images, "max", samples=5)
    assert_close(mean, views.mean(1), rtol=1e-4, atol=1e-5)
    assert_close(largest, views.amax(1), rtol=1e-4, atol=1e-5)
    best = views.amax(2).argmax(1)
    assert_close(undone @ orbit[best], torch.eye(3).expand(6, 3, 3), rtol=0, atol=1e-5)


def test_augmentation_may_use_another_group(digits_net, digits):
    merged, undone = tta(Predictor(digits_net), digits.floats(range(4)), "max", group=ht.scale(), samples=3)
    assert merged.shape == (4, 9)
    assert bool((undone[:, 0, 1] == 0).all())
    with pytest.raises(ht.OptionError, match="merge must be one of 'mean', 'max'; got 'median'"):
        tta(Predictor(digits_net), digits.floats(range(4)), "median")


def test_intervals_over_images_hold_the_mean_and_shrink_with_their_number():
    right = torch.arange(400) % 4 != 0
    few = intervals([{"tilted": right[:40], "upright": right}])
    many = intervals([{"tilted": right, "upright": right}] * 2)
    for found in (few, many):
        assert found["accuracy_interval"][0] < 75 < found["accuracy_interval"][1]
    width = {name: found[1] - found[0] for name, found in few.items() if found is not None}
    assert width["accuracy_interval"] > 2 * width["upright_accuracy_interval"]
    assert intervals([{"tilted": torch.ones(9), "upright": torch.zeros(9), "nearly": torch.ones(9)}]) == {
        "accuracy_interval": [100.0, 100.0],
        "upright_accuracy_interval": [0.0, 0.0],
        "nearly_accuracy_interval": [100.0, 100.0],
        "quarter_accuracy_interval": None,
    }


def test_networks_measured_side_by_side_give_what_they_give_in_turn() -> None:
    in_turn, side_by_side = (
        Evaluation("digits", ("vanilla", "energy"), networks=2, limit=40, jobs=jobs).run() for jobs in (1, 2)
    )
    for name, rows in in_turn["per_network"].items():
        for one, other in zip(rows, side_by_side["per_network"][name], strict=True):
            assert {k: v for k, v in one.items() if k != "images_per_second"} == pytest.approx(
                {k: v for k, v in other.items() if k != "images_per_second"}, abs=1e-3, nan_ok=True
            )
    assert in_turn["most_confused"] == side_by_side["most_confused"]


def test_networks_of_ones_own_are_measured_in_turn() -> None:
    network = Network(torch.nn.Identity(), "mine")
    with pytest.raises(ht.OptionError, match="jobs"):
        Evaluation("digits", ("vanilla",), models=(network,), jobs=2)
