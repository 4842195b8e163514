"""Units of work side by side: the same answers, in parts and after errors, and nothing trained twice."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headtilt.errors import DataError, MissingExtraError, OptionError
from headtilt.paper import zoo
from headtilt.paper.experiments import reproduce as items
from headtilt.paper.experiments.reproduce import table1, table1_rows
from headtilt.paper.experiments.reproduce.photographs import Lazy
from headtilt.paper.experiments.reproduce.study import Store, Study, UnfinishedError, reproduce
from headtilt.paper.experiments.reproduce.workers import Plan, WorkerError, Workers, attempt, ends, words

partial = functools.partial


@pytest.fixture(scope="module")
def two(cache: Path) -> Iterator[Workers]:
    """Two workers for all tests: starting them takes longer than all they do."""
    with Workers(2) as workers:
        yield workers


def third(number: int) -> dict[str, float]:
    return {"value": number / 3}


def process(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def missing(what: str) -> None:
    raise DataError(f"{what} is not there.")


def without_pillow() -> None:
    raise MissingExtraError("pillow", "data")


class OwnError(Exception):
    """An error that cannot be made anew from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def wrong() -> None:
    raise OwnError("one thing", "another")


def too_large(noted: Path) -> str:
    if not noted.exists():
        noted.touch()
        raise torch.OutOfMemoryError("no room")
    return "fits"


class Held:
    """Something that is slow to load, and is left behind when it is sent."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"loaded": []}


def load(held: Held, number: int) -> int:
    held.loaded.append(number)
    return len(held.loaded)


def trained(noted: Path) -> float:
    def make() -> nn.Module:
        with noted.open("a", encoding="utf-8") as file:
            file.write("made\n")
        time.sleep(0.3)
        return nn.Linear(2, 2)

    return float(zoo.kept("once", nn.Linear(2, 2), make, "cpu").get_parameter("weight").double().sum())


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.json")}


def test_workers_leave_the_same_files_in_the_same_order_as_one_process(two, tmp_path):
    jobs = {("a set", str(number), "network 0"): partial(third, number) for number in (5, 1, 3)}
    alone = Store(tmp_path / "one").gather(jobs)
    together = Store(tmp_path / "two", workers=two).gather(jobs)
    assert list(together.items()) == list(alone.items())
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_an_item_in_two_processes_gives_the_numbers_of_one(two, tmp_path):
    sizes = {"images": 20, "samples": 9, "passes": 2, "networks": 2}
    found = []
    for workers in (None, two):
        out = tmp_path / str(workers is not None)
        study = Study(out, True, datasets=("digits",), sizes=sizes, progress=lambda *_: None, workers=workers)
        reproduce(items.item("confidence"), study)
        report = json.loads((out / "confidence.json").read_text(encoding="utf-8"))
        found.append((report["results"], report["verdict"], files(out / ".partial")))
    assert found[0] == found[1]


def test_every_unit_of_table1_can_be_sent_and_leaves_behind_what_is_loaded():
    study = Study(datasets=("digits",), progress=lambda *_: None)
    size = table1.QUICK
    settings = table1.Settings(study, size, "digits")
    settings.at(0)
    whole = table1.FULL
    rows = [*table1_rows.rows(study, size, "digits"), *table1_rows.rows(study, whole, "gtsrb")]
    assert {row.recipe for row in rows} == {"zoo", "notebook"}
    sent = ForkingPickler.loads(ForkingPickler.dumps([partial(table1.run, row, 0, settings) for row in rows]))
    (again,) = {id(job.args[2]): job.args[2] for job in sent}.values()
    assert (again._known, again.study.progress, again.size) == ({}, None, size)
    assert sent[0].args[0].predict(0, settings.at(0))(torch.rand(2, 1, 28, 28)).labels.shape == (2,)
    lazy = Lazy("zoo:digits", "cpu")
    lazy._loaded = object()  # type: ignore[assignment]
    assert ForkingPickler.loads(ForkingPickler.dumps(lazy))._loaded is None


def test_near_units_share_a_process_and_what_it_has_loaded(two, tmp_path):
    held = Held()
    jobs = {(place, str(number), place): partial(load, held, number) for place in "ab" for number in range(3)}
    first, second = partial(process, 0.3), partial(process, 0.3)
    assert len(set(Store(tmp_path / "warm", workers=two).gather({"a": first, "b": second}, str).values())) == 2
    found = Store(tmp_path / "parts", workers=two).gather(jobs)
    assert sum(found.values()) >= 9  # 1 + 2 + 3 twice, or more where one process took over from the other
    assert held.loaded == []


def test_work_that_measures_time_is_done_alone_and_here(two, tmp_path):
    store = Store(tmp_path / "parts", workers=two)
    assert store.gather({"a": partial(process, 0), "b": os.getpid}, timed=True) == {"a": os.getpid(), "b": os.getpid()}


def test_a_run_in_parts_begins_nothing_late_and_goes_on_where_it_stopped(two, tmp_path):
    jobs = {str(number): partial(process, 0.2) for number in range(4)}
    with pytest.raises(UnfinishedError, match=r"stopped before 0; 0 of 4 units are done\."):
        Store(tmp_path / "parts", None, time.monotonic(), two).gather(jobs, str)
    with pytest.raises(UnfinishedError, match=r"stopped before 0; 2 of 4 units are done\."):
        Store(tmp_path / "parts", None, time.monotonic() + 0.1, two).gather(jobs, str)
    stored = files(tmp_path / "parts")
    assert sorted(stored) == ["2.json", "3.json"]
    told: list[tuple[str, int, int]] = []
    found = Store(tmp_path / "parts", lambda *said: told.append(said), None, two).gather(jobs, str)
    assert list(found) == ["0", "1", "2", "3"]
    assert files(tmp_path / "parts").items() > stored.items()
    assert told == [("1", 2, 4), ("0", 2, 4)]


def test_an_error_reaches_the_user_as_it_was_and_what_else_was_done_is_kept(two, tmp_path):
    jobs: dict[str, Any] = {str(number): partial(process, 0.1) for number in range(20)}
    jobs |= {"a": partial(process, 0.1), "b": partial(missing, "the data set")}
    store = Store(tmp_path / "parts", workers=two)
    with pytest.raises(DataError, match=r"^the data set is not there\.$") as caught:
        store.gather(jobs, str)
    assert "in missing" in str(caught.value.__cause__)
    assert "a.json" in files(tmp_path / "parts")
    assert len(files(tmp_path / "parts")) < 4  # nothing is begun after an error
    with pytest.raises(MissingExtraError, match=r"headtilt\[data\]"):
        store.gather({"c": without_pillow})
    with pytest.raises(RuntimeError, match=r"^OwnError: one thing and another$"):
        store.gather({"d": wrong})


@pytest.mark.parametrize("workers", [None, "two"])
def test_where_data_are_missing_the_rest_is_done(workers, tmp_path, request):
    store = Store(tmp_path / "parts", workers=None if workers is None else request.getfixturevalue(workers))
    found, errors = store.attempt({"a": partial(missing, "it"), "b": partial(third, 3)})
    assert found == {"b": {"value": 1.0}}
    assert {key: str(error) for key, error in errors.items()} == {"a": "it is not there."}


def test_a_unit_for_which_memory_ran_out_is_done_once_more_in_the_end(two, tmp_path):
    noted = tmp_path / "noted"
    jobs = {"large": partial(too_large, noted), "small": partial(third, 3)}
    assert Store(tmp_path / "parts", workers=two).gather(jobs) == {"large": "fits", "small": {"value": 1.0}}


def test_of_two_processes_that_want_a_network_one_trains_it(two, tmp_path, cache):
    noted = tmp_path / "noted"
    jobs = {name: partial(trained, noted) for name in ("a", "b")}
    found = Store(tmp_path / "parts", workers=two).gather(jobs, str)
    assert found["a"] == found["b"]
    assert noted.read_text(encoding="utf-8") == "made\n"
    assert (cache / "zoo" / "once.safetensors").exists()


def test_a_worker_that_ends_is_an_error_and_is_replaced(two, tmp_path):
    store = Store(tmp_path / "parts", workers=two)
    with pytest.raises(WorkerError, match=r"ended in the middle of bad · 1 \(exit code 3\).*smaller --jobs"):
        store.gather({("bad", 1): partial(os._exit, 3)})
    assert store.gather({("good", 1): partial(third, 3)}) == {("good", 1): {"value": 1.0}}


def test_an_interrupt_ends_all_workers(cache):
    def interrupt(key: str) -> bool:
        if key == "b":
            raise KeyboardInterrupt
        return True

    jobs = {"a": partial(process, 60), "b": partial(process, 0)}
    processes = []

    def interrupted() -> None:
        with Workers(2) as workers:
            for _ in workers.answers(dict.fromkeys("cd", partial(process, 0)), str, lambda _: True):
                processes[:] = [hand.process for hand in workers._hands]
            list(workers.answers(jobs, str, interrupt))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes) == 2
    assert not any(one.is_alive() for one in processes)


def test_a_process_stays_at_a_place_and_takes_the_last_of_another_when_nothing_is_left_there():
    keys = [("a", number, "x") for number in range(2)] + [("b", number, "x") for number in range(4)]
    plan = Plan.of(dict.fromkeys(keys, process), ends)
    first, second = ("a", "x"), ("b", "x")
    assert plan.next(None) == ("b", 3, "x")
    assert plan.next(None) == ("a", 1, "x")
    assert plan.next(first) == ("a", 0, "x")
    assert plan.next(first) == ("b", 0, "x")
    assert plan.next(second) == ("b", 2, "x")
    assert plan.next(second) == ("b", 1, "x")
    assert plan.next(second) is None


def test_words_of_a_unit_and_what_is_sent_of_one_that_fails():
    assert words(("mnist", "ITS³", "network 0")) == "mnist · ITS³ · network 0"
    assert words("surface") == "surface"
    assert ends("surface") is None
    answer, where = attempt(wrong)
    assert (type(answer), str(answer)) == (RuntimeError, "OwnError: one thing and another")
    assert "in wrong" in where
    assert attempt(partial(third, 3)) == ('{\n  "value": 1.0\n}', "")
    with pytest.raises(OptionError, match="jobs must be a whole number of at least 1"):
        Workers(0)
