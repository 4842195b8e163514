"""The promises that the fuzzer attacks, quickly: the whole corpus, and mutations of it that hypothesis draws."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("PIL", reason="the extra data is not installed")
pytest.importorskip("typer", reason="the extra cli is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("batched", reason="the extra serve is not installed")
pytest.importorskip("pyarrow", reason="the extra batch is not installed")

from hardening import targets
from hardening.fuzz import NAMES
from hardening.mutators import MUTATORS, changed_json, changed_words

CORPUS = Path(targets.__file__).parent / "corpus"
SEEDS = {name: [path.read_bytes() for path in sorted((CORPUS / name).iterdir())] for name in NAMES}
# Stand-ins for long work would stay in place for the tests that come after: it runs in the fuzzer's process alone.
HERE = [name for name in NAMES if name != "command_line"]


def test_the_fuzzer_has_a_target_and_a_corpus_for_every_door():
    assert tuple(targets.TARGETS) == NAMES
    assert all(SEEDS.values())
    assert sum(map(len, [seed for seeds in SEEDS.values() for seed in seeds])) < 500_000


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path.name) for name in HERE for path in sorted((CORPUS / name).iterdir())],
)
def test_every_input_of_the_corpus_meets_a_clear_answer(name, path):
    targets.TARGETS[name]((CORPUS / name / path).read_bytes())


@pytest.mark.parametrize("name", HERE)
@settings(max_examples=25)
@given(data=st.data())
def test_mutations_of_the_corpus_meet_clear_answers(name, data):
    seed = data.draw(st.sampled_from(SEEDS[name]))
    cut = data.draw(st.integers(0, len(seed)))
    more = data.draw(st.binary(max_size=24))
    if name in MUTATORS and data.draw(st.booleans()):
        targets.TARGETS[name](MUTATORS[name](seed, Random(data.draw(st.integers(0, 2**32)))))
    else:
        targets.TARGETS[name](seed[:cut] + more + seed[cut + data.draw(st.integers(0, 16)) :])


@pytest.mark.parametrize("name", HERE)
@settings(max_examples=15)
@given(content=st.binary(max_size=300))
def test_arbitrary_bytes_meet_clear_answers(name, content):
    targets.TARGETS[name](content)


def test_a_broken_promise_would_be_seen():
    with pytest.raises(KeyError), targets.only_ours():
        raise KeyError("not ours")
    with pytest.raises(AssertionError, match="says nothing"), targets.only_ours():
        raise targets.DataError("bad")
    with targets.only_ours():
        raise targets.DataError("this file is broken; write it again.")


def test_mutators_change_json_and_words_and_leave_other_bytes_alone():
    random = Random(0)
    texts = {changed_json(b'{"a": [1, 2], "b": {"c": 3}}', random) for _ in range(50)}
    assert len(texts) > 20
    assert changed_json(b"\xff no json", random) == b"\xff no json"
    assert len({changed_words(b"classify\na.png", random) for _ in range(50)}) > 20


@pytest.mark.parametrize("word", ["/etc/passwd", "~", "../x", "a*", "python:os:abort", "--out=/x", "--debug"])
def test_words_that_would_leave_the_fuzzers_folder_are_passed_over(word):
    assert targets._leaves(word)
    assert not targets._leaves("python:net:make")
