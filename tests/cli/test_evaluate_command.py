"""`headtilt evaluate`: one JSON object or a table, files on request, and models of one's own."""

from __future__ import annotations

import json
import shutil

import pytest

DIGITS = ("evaluate", "digits", "--limit", "130", "--networks", "2", "--perturb", "rotation")
OWN = ("evaluate", "images", "--perturb", "rotation", "--json", "--model")


def found(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def report(call):
    return found(call(*DIGITS, "--method", "vanilla,tta-mean,energy", "--json"))


def test_json_is_one_object_with_the_promised_keys(report):
    assert {"dataset", "perturb", "seed", "count", "networks", "methods"} <= set(report)
    assert (report["dataset"], report["perturb"], report["seed"]) == ("digits", "rotation", 0)
    assert (report["count"], report["networks"]) == (130, 2)
    assert list(report["methods"]) == ["vanilla", "tta-mean", "energy"]
    wanted = "accuracy accuracy_std upright_accuracy nearly_accuracy quarter_accuracy quarter_accuracy_std "
    wanted += "angle_error_deg angle_within_15 quarter_found upright_turned frobenius frobenius_batch128"
    for entry in report["methods"].values():
        assert {*wanted.split(), "views_per_image", "images_per_second"} <= set(entry)


def test_numbers_are_what_they_should_be(report):
    bare, mean, energy = report["methods"].values()
    assert bare["upright_accuracy"] > 95
    assert bare["accuracy"] < 60, "percent, and turned digits are hard"
    assert bare["accuracy"] > 15
    assert energy["accuracy_std"] > 0, "no two networks are alike"
    assert (bare["views_per_image"], mean["views_per_image"], energy["views_per_image"]) == (1, 17, 17)
    assert mean["angle_error_deg"] is mean["frobenius"] is mean["frobenius_batch128"] is None
    assert 60 < bare["angle_error_deg"] < 120, "the median of a uniform angle that nobody undid"
    assert bare["frobenius_batch128"] == pytest.approx(bare["frobenius"] * 128**0.5, rel=0.2)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(call, report):
    again = found(call(*DIGITS, "--method", "vanilla,tta-mean,energy", "--json"))
    other = found(call(*DIGITS, "--method", "vanilla", "--json", "--seed", "1"))
    for one in (report, again):
        for rows in one["per_network"].values():
            for row in rows:
                del row["images_per_second"]
    assert again["per_network"] == report["per_network"]
    assert other["methods"]["vanilla"]["frobenius"] != report["methods"]["vanilla"]["frobenius"]


def test_progress_goes_to_stderr_and_says_what_is_measured(call):
    result = call(*DIGITS, "--method", "vanilla,tta-max", "--json", "--limit", "20")
    assert result.stderr.splitlines() == [
        f"digits:{seed}: {name}" for seed in (0, 1) for name in ("vanilla", "tta-max")
    ]
    json.loads(result.stdout)


def test_a_terminal_gets_a_bar_with_the_time_left_and_stdout_stays_clean(call, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = call(*DIGITS, "--method", "vanilla", "--json", "--limit", "20")
    assert "ETA" in result.stderr
    assert found(result)["count"] == 20


def test_the_table_shows_spread_upright_accuracy_and_losses(call):
    result = call(*DIGITS, "--method", "vanilla,tta-mean", "--limit", "60", "--networks", "3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "digits · rotation · 60 test images · 3 networks"
    vanilla, mean = (next(line for line in lines if line.split()[:1] == [name]) for name in ("vanilla", "tta-mean"))
    assert vanilla.count("±") == 1
    assert "°" in vanilla
    assert mean.split()[-3] == "–"
    heading = next(line for line in lines if "tilted" in line).split()
    assert heading == ["method", "tilted", "quarter", "nearly", "upright", "angle", "views", "img/s"]
    assert ("▼" in mean) == (float(mean.split()[1]) < float(vanilla.split()[1]))
    assert "…" not in result.stdout, "nothing is cut off"


def test_out_holds_the_report_with_its_origin_and_the_plots(call, tmp_path):
    pytest.importorskip("matplotlib")
    result = call(
        *DIGITS, "--limit", "12", "--networks", "1", "--method", "vanilla", "--curve", "--out", "kept", "--json"
    )
    kept = json.loads((tmp_path / "kept" / "digits-rotation-seed0.json").read_text(encoding="utf-8"))
    printed = json.loads(result.stdout)
    assert {key: kept[key] for key in printed} == printed
    assert kept["command"].startswith("headtilt")
    assert set(kept["versions"]) == {"python", "torch", "headtilt"}
    assert set(kept["hardware"]) == {"cpu", "threads", "gpu"}
    assert kept["date"][:2] == "20"
    assert len(kept["angles"]) == 24
    near, far = (kept["accuracy_at_angle"]["vanilla"][0][kept["angles"].index(angle)] for angle in (2.5, -177.5))
    assert near > far + 30, "a network trained upright knows upright digits best"
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {f"digits-rotation-seed0{end}" for end in (".json", "-bars.png", "-angles.png")}


@pytest.mark.parametrize(
    ("function", "crop"), [("make_model", 24), ("make_adapted", 20), ("make_unnamed", 24)], ids=str
)
def test_a_model_of_ones_own_sees_cropped_squares_and_its_outputs_are_matched_by_name(
    call, photographs, function, crop
):
    report = found(call(*OWN, f"python:colournet:{function}", "--method", "vanilla,tta-max"))
    assert report["count"] == 12
    assert report["networks"] == 1
    for entry in report["methods"].values():
        # Without names the outputs are taken for the sorted folders, where only green keeps its place.
        right = 100 if function != "make_unnamed" else pytest.approx(100 / 3, abs=1e-3)
        assert entry["accuracy"] == entry["upright_accuracy"] == right


def test_size_says_what_a_model_sees(call, photographs):
    assert found(call(*OWN, "python:colournet:make_small", "--size", "16", "--method", "vanilla"))["count"] == 12
    refused = call(*OWN, "python:colournet:make_small", "--method", "vanilla")
    assert refused.exit_code == 2
    assert "24, 24" in refused.stderr


def test_methods_are_fitted_on_the_folder_fit_where_there_is_one(call, photographs, tmp_path):
    flat = call(*OWN, "python:colournet:make_model", "--method", "balanced")
    assert "no folder fit" in flat.stderr
    assert "no folder fit" in found(flat)["notes"][0]
    for part in ("fit", "test"):
        shutil.copytree(photographs, tmp_path / "parts" / part)
    parted = call("evaluate", "parts", *OWN[2:], "python:colournet:make_model", "--method", "balanced")
    assert found(parted)["notes"] == []


def test_a_network_of_the_zoo_can_be_named(call):
    named = found(
        call("evaluate", "digits", "--model", "zoo:digits:1", "--method", "vanilla", "--limit", "50", "--json")
    )
    both = found(call("evaluate", "digits", "--networks", "2", "--method", "vanilla", "--limit", "50", "--json"))
    assert named["models"] == ["digits:1"]
    assert named["methods"]["vanilla"]["accuracy"] == both["per_network"]["vanilla"][1]["accuracy"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "nosuch"], "DATASET must be one of mnist"),
        (["evaluate", "digits", "--method", "magic"], "method must be one of vanilla"),
        (["evaluate", "digits", "--perturb", "magic"], "perturb must be one of"),
        (["evaluate", "digits", "--mode", "magic"], "mode must be one of"),
        (["evaluate", "digits", "--split", "train"], "split must be one of 'test', 'validation'"),
        (["evaluate", "digits", "--device", "cuda:77"], "device must be"),
        (["evaluate", "digits", "--size", "9"], "size needs a model of your own"),
        (["evaluate", "digits", "--model", "zoo:digits", "--size", "9"], "size must be left out for digits"),
        (["evaluate", "digits", "--model", "magic:x"], "pt2:FILE, zoo:NAME[:SEED], python:MODULE:FUNCTION"),
        (["evaluate", "images"], "'images' needs a model of your own"),
        (["evaluate", "images", "--model", "python:colournet:make_two", "--size", "24"], "2 outputs, too few"),
        (["evaluate", "imagenet-mini", "--model", "python:colournet:make_model"], "imagenet-mini was not found"),
        (["train", "imagenet-mini"], "a zoo network is one of"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_an_error_is_one_line_on_stderr_and_exit_code_2(call, photographs, words, said):
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("names", ["", ","])
def test_no_method_at_all_is_refused_before_anything_runs(call, names):
    result = call(*DIGITS, "--method", names)
    assert result.exit_code == 2
    assert "method must name at least one of: vanilla" in result.stderr


def test_a_promise_below_zero_is_refused_by_its_name(call):
    result = call(*DIGITS, "--method", "vanilla", "--promise", "-3")
    assert result.exit_code == 2
    assert "--promise" in result.stderr
