"""`headtilt reproduce`: parts that stop in time, and the list of stale files."""

from __future__ import annotations

import json

import pytest

from headtilt.paper.experiments.report import metadata, write_json

ORDER = ("reproduce", "order", "--quick", "--datasets", "digits", "--device", "cpu", "--out", "out")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADTILT_COMMIT", "1234")
    return tmp_path


def test_without_time_nothing_is_begun_and_the_exit_code_says_that_there_is_more(call, here):
    result = call(*ORDER, "--minutes", "0")
    assert result.exit_code == 75
    assert "0 of" in result.stderr
    assert "Give the same command again." in " ".join(result.stderr.split())
    assert not (here / "out" / "order.json").exists()


def test_a_part_finishes_and_the_next_one_finds_nothing_to_do(call, here):
    assert call(*ORDER, "--minutes", "5").exit_code == 0
    report = json.loads((here / "out" / "order.json").read_text(encoding="utf-8"))
    assert report["commit"] == "1234"
    again = call(*ORDER, "--minutes", "0")
    assert again.exit_code == 0
    assert "wrote" not in again.stderr


def test_two_jobs_write_the_file_that_one_writes(call, here, monkeypatch):
    from headtilt.paper.experiments.reproduce import confidence

    # Sizes go to the workers with the units.
    monkeypatch.setattr(confidence, "QUICK", confidence.Size(networks=2, images=10, samples=9, passes=2))
    words = ("reproduce", "confidence", *ORDER[2:-1])
    assert call(*words, "one").exit_code == 0
    result = call(*words, "two", "--jobs", "2")
    assert result.exit_code == 0
    assert "scale · network 0" in result.stderr
    one, two = (json.loads((here / out / "confidence.json").read_text(encoding="utf-8")) for out in ("one", "two"))
    assert one["results"] == two["results"]
    refused = call(*words, "two", "--jobs", "0")
    assert refused.exit_code == 2
    wrong = call(*words, "three", "--jobs", "2", "--datasets", "nowhere")
    assert wrong.exit_code == 2
    assert "error: " in wrong.stderr


def test_check_lists_what_the_command_line_would_refuse(call, here):
    for name, command in {
        "digits-affine": "headtilt evaluate digits --out out --name digits-affine",
        "mnist-affine": "headtilt evaluate mnist --rounds 40 --out out --name mnist-affine",
        "gone": "headtilt undo",
    }.items():
        write_json(here / "out" / f"{name}.json", {"dataset": "x", "methods": {"vanilla": {}}, **metadata(command)})
    result = call("reproduce", "--check", "--out", "out")
    assert result.exit_code == 1
    said = result.stdout.splitlines()
    assert said[0] == "gone.json: Its command is refused: there is no command 'undo'."
    assert said[1].startswith("mnist-affine.json: Its command is refused: No such option")
    assert said[-1] == "2 of 3 stored files are stale."


def test_check_is_content_where_nothing_is_stale(call, here):
    write_json(here / "out" / "speed.json", metadata("headtilt doctor"))
    result = call("reproduce", "--check", "--out", "out")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["0 of 1 stored files are stale."]


def test_an_item_must_be_named(call):
    result = call("reproduce")
    assert result.exit_code == 2
    assert "NAME is missing: give an item or all" in " ".join(result.stderr.split())


def test_an_evaluation_writes_the_file_that_is_named(call, here):
    words = ("evaluate", "digits", "--limit", "20", "--method", "vanilla", "--mode", "paper", "--device", "cpu")
    assert call(*words, "--out", "out", "--name", "digits-affine").exit_code == 0
    assert [path.name for path in (here / "out").iterdir()] == ["digits-affine.json"]
    report = json.loads((here / "out" / "digits-affine.json").read_text(encoding="utf-8"))
    assert (report["mode"], report["commit"]) == ("paper", "1234")
    refused = call(*words, "--name", "digits-affine")
    assert refused.exit_code == 2
    assert "needs --out" in refused.stderr
