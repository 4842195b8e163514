"""The lowest versions that pyproject.toml declares, installed together, and the tests run with them.

``python -m hardening.lowest --python python3.10`` builds an environment, torch included where the index has it for that
Python, and stores which versions ran and what failed. ``--torch VERSION`` takes another torch than the lowest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hardening.record import RESULTS, ROOT, record

EXTRAS = ("cli", "plot", "data", "batch", "serve", "onnx")
TESTERS = ("hypothesis", "httpx", "pytest")
TESTS = (
    "tests/geometry",
    "tests/model",
    "tests/search",
    "tests/calibration",
    "tests/io",
    "tests/its",
    "tests/paper/data",
    "tests/cli",
)


def declared() -> dict[str, str]:
    """Return the lowest version of each distribution that the package, those extras and their tests ask for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("dependencies", *(f"{one} = [" for one in EXTRAS)))]
    lines += [line for line in text.splitlines() if line.strip().strip('",').split(">=")[0] in TESTERS]
    found = dict(re.findall(r'"([\w-]+)>=([\w.]+)"', "\n".join(lines)))
    return dict(sorted(found.items()))


def check(python: str, versions: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return what ran in an environment of those versions, made where it is missing, and how the tests did."""
    there = str(folder / "bin/python")
    if not Path(there).exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    done = subprocess.run([there, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"installed": False, "said": done.stderr[-1500:]}
    own = [there, "-m", "pip", "install", "-q", "--no-deps", "--editable", str(ROOT)]
    subprocess.run(own, capture_output=True, check=True)
    listed = subprocess.run([there, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    installed = {one["name"].lower(): one["version"] for one in json.loads(listed.stdout)}
    return {"installed": True, "versions": {name: installed.get(name) for name in versions}, **tests(there)}


def tests(python: str, chosen: tuple[str, ...] = TESTS) -> dict[str, Any]:
    """Return how some of the tests do with an interpreter."""
    # Old packages warn on their own account: a warning is no error here.
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "--tb=line", *chosen]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1].strip("= ")
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)))
    return {"tests": chosen, "summary": last, "failed": failed, "exit_code": done.returncode}


def main() -> None:
    """Check one Python and store the figures beside those of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--torch", help="A torch other than the lowest.")
    parser.add_argument("--environment", type=Path, help="Folder of an environment to use again.")
    asked = parser.parse_args()
    versions = declared() | ({"torch": asked.torch} if asked.torch else {})
    about = subprocess.run([asked.python, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    with tempfile.TemporaryDirectory(prefix="headtilt-lowest-") as folder:
        found = check(asked.python, versions, asked.environment or Path(folder))
    path = RESULTS / "hardening-lowest.json"
    before = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    runs = {**before, f"python {about}, torch {versions['torch']}": found}
    print(record("lowest", {"declared": declared(), "runs": runs}))
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["installed"] and found["exit_code"] == 0 else 1)


if __name__ == "__main__":
    main()
