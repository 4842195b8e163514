"""Mutation testing of the core: ``python -m hardening.mutate``, in an environment with mutmut and pytest < 9.

mutmut makes the mutants and finds out which tests reach which function. A seeded sample of the mutants, as many from
each file as its share of all, is then judged here, each in a process forked from one that has imported everything:
mutmut's own workers hang where torch has threads. A mutant that no test notices is a survivor; see survivors.md.

What was judged is kept in .mutants/, and a run that is started again goes on from there. Mutants of files that changed
are judged again; with other tests, those that no test had noticed are, too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

from hardening.record import ROOT, record

FILES = (
    "geometry/groups.py",
    "geometry/warp.py",
    "model/outputs.py",
    "model/taps.py",
    "model/predictor.py",
    "model/views.py",
    "model/fingerprint.py",
    "search/confidence.py",
    "search/tree.py",
    "search/joint.py",
    "search/seen.py",
    "search/anneal.py",
    "search/run.py",
    "calibration/balance.py",
    "calibration/sampler.py",
    "calibration/head.py",
    "calibration/gate.py",
    "calibration/gate_fitting.py",
    "calibration/padding.py",
    "calibration/distances.py",
    "calibration/fitter.py",
    "result.py",
    "io/bundle.py",
    "io/export.py",
)
TESTS = (
    "tests/geometry",
    "tests/search",
    "tests/calibration",
    "tests/its",
    "tests/io",
    *(f"tests/model/test_{name}.py" for name in ("bad_models", "taps", "evidence", "chunking", "dropout")),
    "tests/hardening/test_mutants.py",
)
PATIENCE = 90  # seconds of computing for one mutant
TESTS_SECONDS = 15  # of the quickest tests that reach a mutant, and again of those of its own file
CONTROLS = 40  # tests that must pass before the first mutant
IDLE = 10  # times as long by the clock, on a machine that has other things to do
SURVIVORS = Path(__file__).parent / "survivors.md"
FOLDER = ROOT / ".mutants"


def made(folder: Path) -> dict[str, list[str]]:
    """Return the names of all mutants by file, after mutmut has made them in a copy of the sources."""
    metas = {name: folder / "mutants/src/headtilt" / f"{name}.meta" for name in FILES}
    sources = {name: digest([ROOT / "src/headtilt" / name]) for name in FILES}
    state = {"sources": sources, "tests": digest((ROOT / "tests").rglob("*.py")), "selection": list(TESTS)}
    path = folder / "state.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    if {**before, "made": True} != {**state, "made": True}:
        same = {name for name in FILES if before.get("sources", {}).get(name) == sources[name]}
        kept = noticed(verdicts(folder), same)
        clear(folder, {folder / "mutants/src/headtilt" / name for name in same})
        copied(folder)
        (folder / "found.json").write_text(json.dumps(kept))
        before = {**state, "made": False}
        path.write_text(json.dumps(before))
    if not before["made"]:
        make(folder)
        path.write_text(json.dumps({**state, "made": True}))
    return {name: sorted(json.loads(meta.read_text())["exit_code_by_key"]) for name, meta in metas.items()}


def clear(folder: Path, same: set[Path]) -> None:
    """Remove all but mutants of files that did not change: with all of those mutmut looks at new tests alone."""
    if len(same) < len(FILES):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in [*folder.glob("src/**/*.py"), *folder.glob("mutants/src/**/*.py")]:
        if path not in same and folder / "mutants" / path.relative_to(folder) not in same:
            path.unlink()
    for part in ("tests", "mutants/tests"):
        shutil.rmtree(folder / part, ignore_errors=True)
    (folder / "prepared.json").unlink(missing_ok=True)


def digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of some files of the repository, names included."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def noticed(found: dict[str, str], files: set[str]) -> dict[str, str]:
    """Return the verdicts that stand when tests or other files change: mutants of these files that a test noticed."""
    modules = {"headtilt." + file.removesuffix(".py").replace("/", ".") for file in files}
    return {one: what for one, what in found.items() if what == "killed" and one.rpartition(".")[0] in modules}


def verdicts(folder: Path) -> dict[str, str]:
    """Return what has been judged so far."""
    path = folder / "found.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def copied(folder: Path) -> None:
    """Copy what mutmut needs into a folder, and tell it there what to do."""
    for part in ("src", "tests"):  # times of change are kept: by them mutmut knows what is new
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    settings = {
        "source_paths": ["src"],
        "only_mutate": [f"src/headtilt/{name}" for name in FILES],
        "pytest_add_cli_args_test_selection": list(TESTS),
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "process_isolation": "forkserver",
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(text + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n", encoding="utf-8")


def make(folder: Path) -> None:
    """Have mutmut make all mutants in a copy of the sources, and find out which tests reach which function."""
    # No mutant has that name: mutmut makes them all, looks which tests reach what, and stops.
    mutmut = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", "headtilt.none*"]
    done = subprocess.run(mutmut, cwd=folder, env=surroundings(), capture_output=True, text=True, check=False)
    if "nothing matches" not in done.stderr + done.stdout:
        raise SystemExit(f"mutmut failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def surroundings() -> dict[str, str]:
    """Return an environment in which the mutants are imported, and not the sources they were made from."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def sampled(mutants: dict[str, list[str]], count: int, seed: int) -> list[str]:
    """Return a seeded sample, each file with its share rounded up, whatever becomes of other files."""
    total = sum(map(len, mutants.values()))
    shares = {file: math.ceil(count * len(names) / total) for file, names in mutants.items()}
    # The names in an order that is drawn, of which a share that grows or shrinks takes more or less.
    drawn = {file: random.Random(f"{seed} {file}").sample(names, len(names)) for file, names in mutants.items()}
    return [name for file, names in drawn.items() for name in names[: shares[file]]]


def judged(folder: Path, names: list[str], seconds: float) -> dict[str, str]:
    """Return what became of each mutant: killed, survived, untested or timeout; some are left out if time runs out."""
    (folder / "chosen.json").write_text(json.dumps(names))
    command = [sys.executable, "-m", "hardening.mutate", "--judge", str(folder), "--seconds", str(seconds)]
    subprocess.run(command, cwd=ROOT, env=surroundings(), check=True)
    return {name: what for name, what in verdicts(folder).items() if name in set(names)}


def judge(folder: Path, seconds: float) -> None:
    """Judge the mutants whose names lie in a folder, in this process."""
    import pytest

    names = json.loads((folder / "chosen.json").read_text())

    os.chdir(folder / "mutants")
    sys.path.insert(0, "src")
    stats = json.loads(Path("mutmut-stats.json").read_text())
    reached, lasted = stats["tests_by_mangled_function_name"], stats["duration_by_test"]
    lasted = {test: seconds for test, seconds in lasted.items() if "\\" not in test}  # pytest does not find them again
    os.environ["MUTANT_UNDER_TEST"] = "none"
    with open(os.devnull, "w", encoding="utf-8") as silent, contextlib.redirect_stdout(silent):
        collected = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *TESTS])
    making = prepared(folder)
    lasted = {test: seconds + making.get(test, 0.0) for test, seconds in lasted.items()}
    if collected != 0 or verdict("none", quickest(lasted, TESTS_SECONDS)[:CONTROLS]) != "survived":
        raise SystemExit("the tests fail without any mutant: no verdict would mean anything.")
    found, end = verdicts(folder), time.monotonic() + seconds
    for number, name in enumerate(names):
        if time.monotonic() > end:
            break
        if name in found:
            continue
        tests = {test: lasted[test] for test in reached.get(name.rpartition("__mutmut_")[0], ()) if test in lasted}
        found[name] = verdict(name, judges(name, tests)) if tests else "untested"
        (folder / "found.json").write_text(json.dumps(found))
        print(f"{number + 1}/{len(names)} {name}: {found[name]}", file=sys.stderr, flush=True)


def quickest(lasted: dict[str, float], seconds: float) -> list[str]:
    """Return the quickest tests that last for so many seconds together, one at least: file by file, the quickest first.

    What the tests of a file share is made once for as long as they follow one another.
    """
    ordered = sorted(lasted, key=lambda test: lasted[test])
    ends = accumulate(lasted[test] for test in ordered)
    chosen = [test for test, end in zip(ordered, ends, strict=True) if end <= seconds] or ordered[:1]
    files: dict[str, float] = defaultdict(float)
    for test in chosen:
        files[test.partition("::")[0]] += lasted[test]
    return sorted(chosen, key=lambda test: files[test.partition("::")[0]])


def judges(name: str, lasted: dict[str, float]) -> list[str]:
    """Return the tests that judge a mutant: the quickest; those of its own file, test_gate.py of gate.py; and ours."""
    files = (f"/test_{name.rpartition('.')[0].rpartition('.')[2]}.py", "/test_mutants.py")
    own = {test: seconds for test, seconds in lasted.items() if test.partition("::")[0].endswith(files)}
    return list(dict.fromkeys([*quickest(lasted, TESTS_SECONDS), *(quickest(own, TESTS_SECONDS) if own else ())]))


def prepared(folder: Path) -> dict[str, float]:
    """Return how long it takes to make what each test needs, shared by those of a file: mutmut times calls alone."""
    path = folder / "prepared.json"
    process = os.fork() if not path.exists() else None
    if process == 0:
        import pytest

        silence()
        seconds: dict[str, float] = {}

        class Watch:
            def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
                if call.when == "setup":
                    seconds[item.nodeid] = call.duration

        pytest.main(["--setup-only", "-q", "-p", "no:cacheprovider", *TESTS], plugins=[Watch()])
        files: dict[str, list[str]] = defaultdict(list)
        for test in seconds:
            files[test.partition("::")[0]].append(test)
        shares = {one: sum(map(seconds.__getitem__, tests)) / len(tests) for tests in files.values() for one in tests}
        path.write_text(json.dumps(shares))
        os._exit(0)
    if process is not None:
        os.waitpid(process, 0)
    return dict(json.loads(path.read_text()))


def silence() -> None:
    """Let nothing that this process says be heard."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def verdict(name: str, tests: list[str]) -> str:
    """Return whether the tests notice one mutant, quickest first, in a process of its own."""
    import pytest

    process = os.fork()
    if process == 0:
        os.environ["MUTANT_UNDER_TEST"] = name
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE + 5))
        silence()
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests])))
    end = time.monotonic() + PATIENCE * IDLE
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return meaning(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "timeout"


def meaning(status: int) -> str:
    """Return what the end of a process says of its mutant; raise where the tests were not even found."""
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "killed"
    code = os.waitstatus_to_exitcode(status)
    if code > 2:  # 1: a test failed; 2: one could not even be imported
        raise SystemExit(f"pytest left with {code}, which says nothing of a mutant: tests were not found, or it broke.")
    return "killed" if code else "survived"


def explained(name: str, change: str) -> bool:
    """Return whether survivors.md says that a mutant cannot be told from the original.

    It goes by the function and by the line that changed: numbers of mutants change whenever their function does.
    """
    function = name.rpartition("__mutmut_")[0]
    lines = [line for line in change.splitlines() if line.startswith("+")] or change.splitlines()
    items = SURVIVORS.read_text(encoding="utf-8").split("\n- ")
    told = [item for item in items if f"`{function}`" in item]
    return bool(lines) and any(all(f"`{line[1:].strip()}`" in item for line in lines) for item in told)


def differences(folder: Path, names: list[str]) -> dict[str, str]:
    """Return how each mutant differs from the original."""
    found = {}
    for name in names:
        shown = subprocess.run(
            [sys.executable, "-m", "mutmut", "show", name], cwd=folder, capture_output=True, text=True, check=False
        )
        lines = shown.stdout.splitlines()
        found[name] = "\n".join(line for line in lines if re.match(r"[+-](?![+-])", line))
    return found


def summary(mutants: dict[str, list[str]], found: dict[str, str], changes: dict[str, str]) -> dict[str, Any]:
    """Return the figures: score over all, and by file."""
    counts = Counter(found.values())
    by_file = {}
    for file, names in mutants.items():
        of_file = Counter(found[name] for name in names if name in found)
        by_file[file] = {"mutants": len(names), "judged": sum(of_file.values()), **of_file}
    alike = [name for name, change in changes.items() if explained(name, change)]
    score = 100 * counts["killed"] / max(len(found), 1)
    return {
        "mutmut": metadata.version("mutmut"),
        "mutants": sum(map(len, mutants.values())),
        "judged": len(found),
        "score_percent": score,
        "score_percent_without_equivalents": 100 * counts["killed"] / max(len(found) - len(alike), 1),
        "verdicts": dict(counts),
        "files": by_file,
        "survivors": changes,
        "explained_as_equivalent": alike,
    }


def main() -> None:
    """Make mutants, judge a sample of them and store the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="Mutants to judge; 0 for all of them.")
    parser.add_argument("--seed", type=int, default=0, help="Of the sample.")
    parser.add_argument("--seconds", type=float, default=7200, help="Judge no more mutants after so long.")
    parser.add_argument("--least", type=float, default=85, help="Score below which the exit code is 1.")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.judge:
        judge(asked.judge, asked.seconds)
        return
    mutants = made(FOLDER)
    everything = [one for names in mutants.values() for one in names]
    chosen = sampled(mutants, asked.count, asked.seed) if asked.count else everything
    random.Random(asked.seed).shuffle(chosen)  # so that time that runs out takes from all files alike
    found = judged(FOLDER, chosen, asked.seconds)
    changes = differences(FOLDER, [one for one, what in found.items() if what != "killed"])
    figures = {"sample_seed": asked.seed, "sampled": len(chosen), **summary(mutants, found, changes)}
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    print(record("mutate", figures))
    sys.exit(0 if figures["score_percent_without_equivalents"] >= asked.least else 1)


if __name__ == "__main__":
    main()
