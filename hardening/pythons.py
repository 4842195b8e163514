"""The core's tests under every Python that is declared: ``python -m hardening.pythons 3.10 3.12 3.13``.

Each interpreter gets an environment of its own in .pythons/, which is used again where it is there. One that is not on
this machine is stored as such: what is listed as run has run, and was not merely compiled for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardening.lowest import tests
from hardening.record import RESULTS, ROOT, record

CORE = (
    "tests/geometry",
    "tests/model",
    "tests/search",
    "tests/calibration",
    "tests/io",
    "tests/its",
    "tests/hardening/test_crossings.py",
)
VERSIONS = "import platform, torch, numpy; print(platform.python_version(), torch.__version__, numpy.__version__)"


def check(version: str) -> dict[str, Any]:
    """Return what ran under a Python, and how the tests did; why nothing ran where there is no such Python."""
    folder = ROOT / ".pythons" / version
    python = str(folder / "bin/python")
    if not Path(python).exists():
        found = shutil.which(f"python{version}")
        if found is None:
            return {"ran": False, "why": f"no python{version} on this machine"}
        subprocess.run([found, "-m", "venv", str(folder)], check=True)
        wanted = ["--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[demo,onnx]", "pytest", "hypothesis"]
        install = [python, "-m", "pip", "install", "-q", *wanted]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(folder)
            return {"ran": False, "why": done.stderr[-500:]}
    shown = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
    return {"ran": True, **dict(zip(("python", "torch", "numpy"), shown, strict=True)), **tests(python, CORE)}


def main() -> None:
    """Check the Pythons that are named, and store the figures beside those of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=["3.10", "3.11", "3.12", "3.13"])
    path = RESULTS / "hardening-pythons.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    for version in parser.parse_args().versions:
        runs[version] = check(version)
        print(version, json.dumps(runs[version], indent=1))
        print(record("pythons", {"runs": dict(sorted(runs.items()))}))
    sys.exit(0 if all(run["ran"] and run["exit_code"] == 0 for run in runs.values()) else 1)


if __name__ == "__main__":
    main()
