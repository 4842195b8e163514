"""Fuzz every door through which foreign bytes come in, with atheris (libFuzzer): ``python -m hardening.fuzz``.

One process for each target, one after the other, with coverage of headtilt's own code as guide. The corpus under
hardening/corpus is where they start; inputs that reached new code are kept beside it in .fuzz-corpus. A finding ends
the run with exit code 1, is written to hardening/findings, and belongs into the corpus once it is mended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
CORPUS, GROWN, FINDINGS = HERE / "corpus", HERE.parent / ".fuzz-corpus", HERE / "findings"
NAMES = ("idx", "gtsrb", "images", "bundle", "weights", "sidecar", "http", "command_line")
LONGEST = 80_000  # bytes of an input


def attack(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["headtilt"], enable_loader_override=False):
        from hardening.mutators import MUTATORS
        from hardening.targets import TARGETS

        target = TARGETS[name]
        # What a target needs it imports as it runs, so this is where code is instrumented; old findings show at once.
        for seed in sorted((CORPUS / name).iterdir()):
            target(seed.read_bytes())
    options = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=60", "-rss_limit_mb=6000", "-seed=1"]
    options += ["-use_value_profile=0", "-print_final_stats=1", f"-artifact_prefix={FINDINGS}/{name}-"]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        changed = MUTATORS[name](data, random)
        return changed if len(changed) <= most and random.random() < 0.7 else atheris.Mutate(data, len(data))

    more = {"custom_mutator": mutate} if name in MUTATORS else {}
    atheris.Setup([sys.argv[0], *options, str(GROWN / name), str(CORPUS / name)], target, **more)
    atheris.Fuzz()


def watched(name: str, seconds: int) -> dict[str, Any]:
    """Return what fuzzing one target found, in a process of its own."""
    for folder in (GROWN / name, FINDINGS):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hardening.fuzz", "--target", name, "--seconds", str(seconds)],
        cwd=HERE.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    said = done.stdout + done.stderr
    covered = re.findall(r"cov: (\d+) ft: (\d+)", said)
    runs = re.search(r"number_of_executed_units: (\d+)", said)
    finding = None
    if done.returncode:
        finding = said[-4000:].replace(f"{HERE.parent}/", "")  # results name no machine's paths
        print(finding, file=sys.stderr)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start, 1),
        "inputs": int(runs[1]) if runs else None,
        "coverage_counters": int(covered[-1][0]) if covered else None,
        "finding": finding,
    }


def main() -> None:
    """Fuzz all targets in turn, or one of them, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="Of every target.")
    parser.add_argument("--only", action="append", choices=NAMES, help="Targets; the figures of the others stay.")
    parser.add_argument("--target", choices=NAMES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.target:
        attack(asked.target, asked.seconds)
        return
    from hardening.record import RESULTS, record

    path = RESULTS / "hardening-fuzz.json"
    found = json.loads(path.read_text(encoding="utf-8"))["targets"] if path.exists() else {}
    for name in asked.only or NAMES:
        found[name] = watched(name, asked.seconds)
        print(name, {key: value for key, value in found[name].items() if key != "finding"}, flush=True)
        print(record("fuzz", figures({name: found[name] for name in NAMES if name in found})))  # after each: it is long
    sys.exit(any(found[name]["finding"] for name in asked.only or NAMES))


def figures(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what was found at each door, and in all."""
    return {
        "atheris": metadata.version("atheris"),
        "findings": sum(one["finding"] is not None for one in found.values()),
        "inputs": sum(one["inputs"] or 0 for one in found.values()),
        "seconds": sum(one["seconds"] for one in found.values()),
        "targets": found,
    }


if __name__ == "__main__":
    main()
