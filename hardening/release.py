"""The release as a stranger gets it: built, checked, installed in empty environments, and the demo run offline.

``python -m hardening.release`` needs `build` and `twine`, and pip's index for the dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from hardening.record import ROOT, record

MOST_BYTES = 5_000_000
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
IMPORTS = """
import importlib.metadata, json, sys, torch, headtilt as ht
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
found = ht.ITS(model)(torch.rand(2, 1, 8, 8))
assert found.shape == (2, 3)
names = sorted(one.metadata["Name"].lower() for one in importlib.metadata.distributions())
print(json.dumps({"version": ht.__version__, "installed": names}))
"""


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return what a command did; raise where it failed, with what it said."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def build(folder: Path) -> dict[str, Any]:
    """Return what was built, after twine has looked at it."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    if wheel.stat().st_size >= MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size:,} bytes; at most {MOST_BYTES:,} are allowed.")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
    kinds: Counter[str] = Counter()
    for file in files:
        kinds[Path(file.filename).suffix or "other"] += file.compress_size
    return {
        "wheel": wheel.name,
        "wheel_bytes": wheel.stat().st_size,
        "sdist": sdist.name,
        "sdist_bytes": sdist.stat().st_size,
        "files_in_wheel": len(files),
        "packed_bytes_by_suffix": dict(kinds.most_common()),
        "twine_check": "passed, strict",
    }


def environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """Return the bin folder of a new environment that holds the wheel, and nothing that it did not ask for."""
    run(sys.executable, "-m", "venv", folder)
    constraints = ROOT / "constraints.txt"
    run(folder / "bin/python", "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}{extra}", cwd=folder)
    return folder / "bin"


def bare(folder: Path, wheel: Path) -> dict[str, Any]:
    """Return how the wheel does without any extra: it imports, searches, and says what its command line needs."""
    there = environment(folder, wheel)
    found = json.loads(run(there / "python", "-c", IMPORTS, cwd=folder).stdout.splitlines()[-1])
    asked = subprocess.run([there / "headtilt"], capture_output=True, text=True, check=False, cwd=folder)
    return {**found, "command_without_extra": {"exit": asked.returncode, "said": asked.stderr.strip()}}


def demo(folder: Path, wheel: Path) -> dict[str, Any]:
    """Return how ``headtilt demo --quick`` did from the wheel with its demo extra, without any network at all."""
    there = environment(folder, wheel, "[demo]")
    offline = ["unshare", "--map-root-user", "--net"]
    tried = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    unreachable = subprocess.run([*offline, there / "python", "-c", tried], capture_output=True, text=True, check=False)
    home = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "HEADTILT_CACHE": str(folder / "cache")}
    start = time.perf_counter()
    said = run(*offline, there / "headtilt", "demo", "--quick", "--out", folder / "out", cwd=folder, env=home).stdout
    return {
        "seconds": time.perf_counter() - start,
        "network": unreachable.stderr.strip().splitlines()[-1],
        "wrote": sorted(path.name for path in (folder / "out").iterdir()),
        "gain": next(line.strip() for line in said.splitlines() if line.startswith("Tilted")),
    }


def interpreters(tested: dict[str, str]) -> dict[str, str]:
    """Return for each Python that is declared what was done with it here."""
    found = {}
    for version in VERSIONS:
        roots = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        python = str(roots[-1]) if roots else shutil.which(f"python{version}")
        if python is None:
            found[version] = "no interpreter at hand: untested"
            continue
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
            run(python, "-W", "error", "-m", "compileall", "-q", ROOT / "src", ROOT / "tests", env=environment)
        found[version] = tested.get(version, "all files compile without a warning; not run")
    return found


def main() -> None:
    """Do all of it and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ran", action="append", default=[], metavar="VERSION=WHAT", help="What ran elsewhere.")
    ran = dict(word.split("=", 1) for word in parser.parse_args().ran)
    with tempfile.TemporaryDirectory(prefix="headtilt-release-") as name:
        folder = Path(name)
        built = build(folder / "dist")
        wheel = folder / "dist" / built["wheel"]
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        figures = {
            "build": built,
            "without_extras": bare(folder / "bare", wheel),
            "demo_offline": demo(folder / "demo", wheel),
            "pythons": interpreters({here: "the release was built and the demo run on it"} | ran),
        }
    print(record("release", figures))


if __name__ == "__main__":
    main()
