"""How long until something happens: ``python -m benchmarks.startup`` times what people wait for before the first view.

Each command runs in a process of its own, several times, and the runs take turns; seconds of the processor count, since
they do not depend on what else the machine does. What `from headtilt import ITS` takes is counted once torch is
imported.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from benchmarks.search import spread
from headtilt.paper.data import load
from headtilt.paper.experiments.report import metadata, write_json

RUNS = 7
OUT = Path("results/startup.json")
IMPORT = "import time, torch; start = time.process_time(); from headtilt import ITS; print(time.process_time() - start)"


def run(*words: str) -> tuple[float, float]:
    """Return the seconds of the processor and by the clock that a command takes."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, end = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, end - start


def served() -> float:
    """Return the seconds by the clock until a service is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "headtilt", "serve", "--model", "zoo:digits", "--port", str(port), "--device", "cpu"]
    start = time.perf_counter()
    service = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while service.poll() is None:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                return time.perf_counter() - start
            time.sleep(0.02)
    finally:
        service.terminate()
        service.wait()
    raise SystemExit("the service did not start")


def main() -> None:
    """Measure, and store the figures."""
    from PIL import Image

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        digit = Path(folder) / "digit.png"
        Image.fromarray(load("digits", "test", limit=1).images[0, 0].numpy()).save(digit)
        commands = {
            "headtilt --help": ("-m", "headtilt", "--help"),
            "headtilt classify, one digit": ("-m", "headtilt", "classify", str(digit), "--model", "zoo:digits"),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        ready, imported = [], []
        for _ in range(RUNS):
            for name, words in commands.items():
                taken[name].append(run(*words))
            ready.append(served())
            imported.append(float(subprocess.check_output([sys.executable, "-c", IMPORT])))
    found = {
        name: {"processor": spread([one for one, _ in times]), "clock": spread([one for _, one in times])}
        for name, times in taken.items()
    }
    found["from headtilt import ITS, beyond torch"] = {"processor": spread(imported)}
    found["headtilt serve, until ready"] = {"clock": spread(ready)}
    for name, times in found.items():
        sys.stdout.write(f"{name}: {times}\n")
    write_json(OUT, {"runs": RUNS, "seconds": found, **metadata("python -m benchmarks.startup")})


if __name__ == "__main__":
    main()
