"""Stored results that today's code could not have written, and how a report says where it is from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headtilt.paper.experiments import report as reports
from headtilt.paper.experiments.reproduce import item
from headtilt.paper.experiments.reproduce.study import Store, Study, UnfinishedError, done, settings_of
from headtilt.paper.experiments.stale import reasons, stale


def takes_all(words: list[str]) -> str | None:
    return None


def written(command: str, **more: Any) -> dict[str, Any]:
    return {"command": command, "commit": "abc", **more}


def test_a_report_of_todays_sizes_with_its_command_and_commit_is_not_stale(tmp_path: Path) -> None:
    module = item("order")
    report = written("headtilt reproduce order", name="order", quick=False, paper=module.PAPER, verdict={})
    report["sizes"] = asdict(module.FULL)
    report = json.loads(reports.to_json(report))
    assert reasons(tmp_path / "order.json", report, takes_all) == []
    report["sizes"]["images"] = 1
    assert reasons(tmp_path / "order.json", report, takes_all) == ["Its sizes are others than today's."]
    report["quick"] = True
    assert reasons(tmp_path / "order.json", report, takes_all) == ["It has quick sizes."]


def test_a_verdict_that_the_numbers_do_not_give_is_stale(tmp_path: Path) -> None:
    module = item("siscore")
    rows = {"bare": {"acc1": 40.0}, "joint": {"acc1": 45.0}}
    report = written("headtilt reproduce siscore", name="siscore", quick=False, paper=module.PAPER)
    report |= {"sizes": asdict(module.FULL), "results": {"MobileNetV2": {"rotation": {"rows": rows}}}}
    report["verdict"] = {"MobileNetV2": {"rotation": {"goal": "reached"}}}
    report = json.loads(reports.to_json(report))
    (said,) = reasons(tmp_path / "siscore.json", report, takes_all)
    assert "verdict is not the one" in said
    report["verdict"] = module.judge(report)
    assert reasons(tmp_path / "siscore.json", report, takes_all) == []
    assert report["verdict"]["MobileNetV2"]["rotation"]["gain_of_best_unfitted"] == 5.0


def test_an_evaluation_is_stale_by_its_options_its_file_and_its_methods(tmp_path: Path) -> None:
    command = "headtilt evaluate digits --out results --name digits-affine"
    report = written(command, dataset="digits", methods={"vanilla": {}, "tree3-sum": {}})
    assert reasons(tmp_path / "digits-affine.json", report, takes_all) == []
    refused = reasons(tmp_path / "digits-affine.json", report, lambda words: "No such option: --rounds")
    assert refused == ["Its command is refused: No such option: --rounds"]
    assert "another file" in reasons(tmp_path / "digits.json", report, takes_all)[0]
    report["methods"]["rounds"] = {}
    assert reasons(tmp_path / "digits-affine.json", report, takes_all) == [
        "It has the method rounds, which is no more."
    ]


def test_every_stale_file_of_a_folder_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    reports.write_json(folder / "a.json", {"figure": 1})
    reports.write_json(folder / "b.json", written("python benchmarks/gone.py"))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "there.py").touch()
    reports.write_json(folder / "c.json", written("python -m benchmarks.there"))
    found = stale(folder, takes_all)
    assert list(found) == ["a.json", "b.json"]
    assert found["a.json"] == [
        "It does not say which command wrote it.",
        "It does not say by which commit it was written.",
    ]
    assert found["b.json"] == ["Its command runs benchmarks/gone.py, which is not there."]


def test_a_report_says_by_which_commit_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADTILT_COMMIT", "1234")
    assert reports.metadata("as typed")["commit"] == "1234"
    assert reports.metadata("as typed")["command"] == "as typed"


def test_the_commit_of_a_folder_without_history_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADTILT_COMMIT", raising=False)
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(reports.headtilt, "__file__", str(tmp_path / "__init__.py"))
    assert reports.commit() is None
    assert reports.changed_since("1234") == []


def test_a_bundle_remembers_the_command_that_made_it(tmp_path: Path) -> None:
    assert reports.origin_of(tmp_path) is None
    reports.note_origin(tmp_path, "headtilt fit photos")
    found = reports.origin_of(tmp_path)
    assert found is not None
    assert found["command"] == "headtilt fit photos"


def test_an_evaluation_with_a_name_writes_that_file_alone(tmp_path: Path) -> None:
    assert reports.write(tmp_path, {"dataset": "digits"}, "digits-affine") == [tmp_path / "digits-affine.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["digits-affine.json"]


def test_a_store_whose_time_is_over_keeps_what_is_done_and_stops_before_the_next_unit(tmp_path: Path) -> None:
    ran = []
    jobs = {name: (lambda name=name: ran.append(name) or len(ran)) for name in ("a", "b")}
    assert Store(tmp_path).gather({"a": jobs["a"]}) == {"a": 1}
    with pytest.raises(UnfinishedError, match="stopped before b; 1 of 2 units are done"):
        Store(tmp_path, until=0.0).gather(jobs)
    assert ran == ["a"]
    assert Store(tmp_path, until=0.0).gather({"a": jobs["a"]}) == {"a": 1}
    assert Store(tmp_path).gather(jobs) == {"a": 1, "b": 2}


def test_an_item_is_done_by_the_same_settings_and_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADTILT_COMMIT", "1234")
    study, module = Study(tmp_path, quick=True), item("order")
    assert not done(module, study)
    report = {**settings_of(module, study), "datasets": None, **reports.metadata("as typed")}
    reports.write_json(tmp_path / "order.json", report)
    assert done(module, study)
    assert not done(module, Study(tmp_path, quick=False))
    monkeypatch.setenv("HEADTILT_COMMIT", "5678")
    assert not done(module, study)
