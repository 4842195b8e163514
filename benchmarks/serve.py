"""Load test of the service on this machine: throughput beside the bare search, failures, memory, hostile uploads.

    python benchmarks/serve.py --seconds 60 --clients 32 --json results/serve.json

Locust's clients post tilted digits without pause; meanwhile one more client sends what must be refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
MODEL, LEVELS = "zoo:digits", "rotation,scale,shear"
HOSTILE = {
    "garbage": (b"\x00" * 4000, "image/png", 422),
    "text": (b"hello", "text/plain", 415),
    "too large": (b"\x00" * 11_000_000, "image/png", 413),
    "empty": (b"", "image/png", 422),
    "torn form": (b"--b\r\nContent-Disp", "multipart/form-data; boundary=b", 422),
}


def bare(files: list[bytes], batch: int, seconds: float) -> float:
    """Return images per second of the search alone, on images that are decoded already."""
    from headtilt.apps.loading import Wrapped
    from headtilt.sources.images import square_of

    torch.set_num_threads(1)
    robust, adapted = Wrapped(MODEL, levels=LEVELS).load()
    images = torch.stack([square_of(file, adapted) for file in files[:batch]])
    robust.search(images)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        robust.search(images)
        done += len(images)
    return done / (time.perf_counter() - start)


def get(url: str, body: bytes | None = None, kind: str = "image/png") -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Content-Type": kind} if body is not None else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return 0, ""  # the server hung up while we were still sending


def slow(port: int) -> int:
    """Return how a body that does not arrive is answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(
            b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 99\r\n\r\nabc"
        )
        return int(sock.recv(100).split()[1])


def resident(pid: int) -> float:
    """Return the memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


class Watch(threading.Thread):
    """Samples memory and sends what must be refused, until told to stop."""

    def __init__(self, pid: int, port: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.port, self.over = pid, port, threading.Event()
        self.memory: list[float] = []
        self.refused: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        """Do so once a second."""
        while not self.over.wait(1.0):
            self.memory.append(resident(self.pid))
            name, (body, kind, _) = list(HOSTILE.items())[len(self.memory) % len(HOSTILE)]
            self._note(name, get(f"http://127.0.0.1:{self.port}/classify", body, kind)[0])
            if len(self.memory) % 10 == 0:
                self._note("slow", slow(self.port))

    def _note(self, name: str, status: int) -> None:
        seen = self.refused.setdefault(name, {})
        seen[str(status)] = seen.get(str(status), 0) + 1


def load(folder: Path, port: int, seconds: int, clients: int) -> dict[str, Any]:
    words = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(HERE / "serve_load.py"),
        "--headless",
        "--json",
        "--only-summary",
    ]
    words += ["-u", str(clients), "-r", str(clients), "-t", f"{seconds}s", "--host", f"http://127.0.0.1:{port}"]
    environment = {**os.environ, "HEADTILT_LOAD": str(folder)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    (entry,) = json.loads(done.stdout[done.stdout.index("[") :])
    answered, length = entry["num_requests"], entry["last_request_timestamp"] - entry["start_time"]
    times = sorted((float(ms), count) for ms, count in entry["response_times"].items())
    return {
        "requests": answered,
        "failures": entry["num_failures"],
        "requests_per_second": answered / length,
        "median_ms": percentile(times, 0.5),
        "p99_ms": percentile(times, 0.99),
    }


def percentile(times: list[tuple[float, int]], share: float) -> float:
    left = share * sum(count for _, count in times)
    for milliseconds, count in times:
        left -= count
        if left <= 0:
            return milliseconds
    return times[-1][0]


def started(port: int, batch: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "headtilt", "serve", "--model", MODEL, "--levels", LEVELS, "--port", str(port)]
    process = subprocess.Popen([*words, "--max-batch", str(batch), "--device", "cpu", "--upload-seconds", "2"])
    while get(f"http://127.0.0.1:{port}/readyz")[0] != 200:
        if process.poll() is not None:
            sys.exit("the service did not start")
        time.sleep(0.2)
    return process


def measure(folder: Path, seconds: int, clients: int, batch: int) -> dict[str, Any]:
    from batch import images

    _, files = images(400)
    for number, file in enumerate(files):
        (folder / f"{number:03}.png").write_bytes(file)
    before = bare(files, batch, 5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = started(port, batch)
    try:
        watch = Watch(process.pid, port)
        watch.start()
        report = load(folder, port, seconds, clients)
        watch.over.set()
        watch.join()
        _, metrics = get(f"http://127.0.0.1:{port}/metrics")
    finally:
        process.terminate()
        process.wait(60)
    after = bare(files, batch, 5)
    statuses: dict[str, int] = {}
    for status, count in re.findall(r'headtilt_requests_total\{route="/classify",status="(\d+)"\} ([\d.]+)', metrics):
        statuses[status] = int(float(count))
    sums = dict(re.findall(r"headtilt_batch_images_(sum|count) ([\d.]+)", metrics))
    quarter = max(1, len(watch.memory) // 4)
    means = [statistics.fmean(watch.memory[at : at + quarter]) for at in range(0, 4 * quarter, quarter)]
    return report | {
        "seconds": seconds,
        "clients": clients,
        "max_batch": batch,
        "mean_batch": float(sums["sum"]) / float(sums["count"]),
        "bare_search_images_per_second": (before + after) / 2,
        "share_of_bare_search": report["requests_per_second"] / ((before + after) / 2),
        "statuses": statuses,
        "server_errors": sum(count for status, count in statuses.items() if status.startswith("5")),
        "hostile": watch.refused,
        "memory_mb": {"first": watch.memory[0], "mean_of_each_quarter": means, "most": max(watch.memory)},
    }


def main() -> None:
    from headtilt.paper.experiments.report import metadata, write_json

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options.seconds, options.clients, options.max_batch)
    report |= metadata("python benchmarks/serve.py " + " ".join(sys.argv[1:]))
    print(json.dumps(report, indent=1))
    if options.json:
        write_json(options.json, report)
    wrong = [name for name, seen in report["hostile"].items() if any(status in ("200", "500") for status in seen)]
    sys.exit(f"accepted: {wrong}" if wrong else int(report["server_errors"] > 0 or report["failures"] > 0))


if __name__ == "__main__":
    main()
