"""The service of this tree beside that of another one: bursts of small images in turn, on the same machine.

    python benchmarks/serve_beside.py /path/to/another/checkout --json results/serve-beside.json

Both services run all the time; only one at a time is asked. What counts is the ratio within each pair of bursts. What
all processes of a service compute for a request tells of its cost where the machine has other things to do as well.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MODEL, LEVELS = "zoo:digits", "rotation,scale,shear"
HERE = Path(__file__).parent.parent


def started(tree: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Return the service of a tree, ready, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "headtilt", "serve", "--model", MODEL, "--levels", LEVELS, "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*words, "--port", str(port)], env=environment, cwd=tree)
    while process.poll() is None:
        with suppress(OSError):
            if asked(http.client.HTTPConnection("127.0.0.1", port, timeout=30), "GET", "/readyz", None) == 200:
                return process, port
        time.sleep(0.2)
    sys.exit(f"the service of {tree} did not start")


def asked(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None) -> int:
    connection.request(method, path, body, {"Content-Type": "image/png"})
    reply = connection.getresponse()
    reply.read()
    return reply.status


def burst(port: int, files: list[bytes], clients: int, seconds: float) -> tuple[float, int]:
    """Return requests per second of some clients without pause, and how many failed."""
    counts, failures = [0] * clients, [0] * clients
    end = time.perf_counter() + seconds

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while time.perf_counter() < end:
            file = files[(number + clients * counts[number]) % len(files)]
            failures[number] += asked(connection, "POST", "/classify", file) != 200
            counts[number] += 1
        connection.close()

    start = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start), sum(failures)


def computed(root: int) -> float:
    """Return the seconds that a process and its descendants have computed so far."""
    from hardening.siege import family

    ticks = 0
    for pid in family(root):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def commit_of(tree: Path) -> str:
    """Return the commit that a tree is at."""
    asked_git = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(asked_git, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    from batch import images
    from headtilt.paper.experiments.report import metadata, write_json

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a burst")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _, files = images(400)
    services = {"this": started(HERE), "other": started(options.other)}
    rates: dict[str, list[float]] = {"this": [], "other": []}
    costs: dict[str, list[float]] = {"this": [], "other": []}
    failed = 0
    try:
        for name in services:
            burst(services[name][1], files, options.clients, options.seconds)  # warms up
        for number in range(options.pairs):
            for name in random.Random(number).sample(list(services), 2):
                process, port = services[name]
                before, start = computed(process.pid), time.perf_counter()
                rate, failures = burst(port, files, options.clients, options.seconds)
                answered = rate * (time.perf_counter() - start)
                rates[name].append(rate)
                costs[name].append(1000 * (computed(process.pid) - before) / answered)
                failed += failures
    finally:
        for process, _ in services.values():
            process.terminate()
        for process, _ in services.values():
            process.wait(60)
    ratios = sorted(this / other for this, other in zip(rates["this"], rates["other"], strict=True))
    report: dict[str, Any] = {
        "pairs": options.pairs,
        "burst_seconds": options.seconds,
        "clients": options.clients,
        "median_requests_per_second": {name: statistics.median(found) for name, found in rates.items()},
        "ratio": {"median": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4)[::2]},
        "median_computing_ms_per_request": {name: statistics.median(found) for name, found in costs.items()},
        "failures": failed,
        "other_commit": commit_of(options.other),
    }
    report |= metadata("python benchmarks/serve_beside.py OTHER --json results/serve-beside.json")
    print(json.dumps(report, indent=1))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
