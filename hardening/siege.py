"""A siege of the service and of a batch run, beside a client that behaves well: ``python -m hardening.siege``.

For a minute, on the loopback alone, attackers send the files of `hardening.hostile` and their kin, unfinished and slow
uploads, torn requests and hang-ups; a crowd sends one file that is slow and light. Meanwhile one client asks what it
asked in peace: its answers must be the same, no reply may be a server error but 503 with Retry-After, and few may be
that. Afterwards memory must be where it was after ordinary load, and the service must end in time although it is
decoding and uploading. Then a batch reads a folder with all those files.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hardening import hostile

MODEL, LEVELS = "zoo:digits", "rotation,scale,shear"
ANSWER_SECONDS = 30  # what `headtilt serve` has unless told otherwise
GRACE = ANSWER_SECONDS + 10
MOST_REFUSED, MOST_MEMORY_MB = 0.2, 50
CROWD = 12  # who send the same file, which is slow and light, without pause
POST = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
TORN = {
    "garbage": POST + b"Content-Length: 9\r\n\r\nno image!",
    "no body": POST + b"Content-Length: 0\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x00\xa5\x01\x00\x00 hello\r\n\r\n",
    "two lengths": POST
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n",
    "tiny chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000,
    "another host": b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "too long": POST + b"Content-Length: 999999999999\r\n\r\n",
    "torn form": b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    b"Content-Length: 17\r\n\r\n--b\r\nContent-Disp",
    "long header": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
}


def digits(count: int) -> list[bytes]:
    """Return tilted digits as PNG files."""
    import torch
    from PIL import Image

    from headtilt.geometry.groups import rotation
    from headtilt.geometry.warp import warp
    from headtilt.paper.data.digits import read

    images = read("test").images[:count].float() / 255
    found = []
    for picture in warp(images, rotation().matrix(torch.linspace(-3.1, 3.1, count))):
        buffer = io.BytesIO()
        Image.fromarray((picture[0] * 255).round().byte().numpy()).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


def family(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(words[1]), []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def memory_mb(root: int) -> float:
    """Return the memory of a process and its descendants, what they share counted once."""
    return sum(map(memory_mb_of, family(root)))


def memory_mb_of(pid: int) -> float:
    """Return the memory of one process; 0 where it has ended."""
    with contextlib.suppress(OSError):
        seen = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(seen[1]) / 1000 if seen else 0.0
    return 0.0


class Service:
    """`headtilt serve` in a process of its own."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = [sys.executable, "-m", "headtilt", "serve", "--model", MODEL, "--levels", LEVELS]
        self.log = log
        with log.open("wb") as told:
            self.process = subprocess.Popen([*words, "--port", str(self.port), "--device", "cpu"], stderr=told)
        while self.ask("GET", "/readyz")[0] != 200:
            if self.process.poll() is not None:
                sys.exit(f"the service did not start: {log.read_text()}")
            time.sleep(0.2)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content of a reply; status 0 where the connection broke."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "image/png"} if body is not None else {})
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        except (OSError, http.client.HTTPException):
            return 0, {}, b""
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def talk(self, sent: bytes) -> bytes:
        """Return the first line of what comes back for some bytes."""
        with contextlib.suppress(OSError), self.connect() as sock:
            sock.sendall(sent)
            return sock.recv(64)
        return b""


class Client(threading.Thread):
    """Asks what it asked in peace, again and again; notes how long answers take and whether they are the same."""

    def __init__(self, service: Service, files: list[bytes], expected: list[dict[str, Any]], pause: float) -> None:
        super().__init__(daemon=True)
        self.service, self.files, self.expected, self.pause = service, files, expected, pause
        self.over = threading.Event()
        self.seconds: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.wrong = 0

    def run(self) -> None:
        """Ask until told to stop."""
        number = 0
        while not self.over.wait(self.pause):
            place = number % len(self.files)
            start = time.perf_counter()
            status, headers, content = self.service.ask("POST", "/classify", self.files[place])
            self.statuses[f"{status}{'' if status != 503 or 'retry-after' in headers else ' without Retry-After'}"] += 1
            if status == 200:
                self.seconds.append(time.perf_counter() - start)
                self.wrong += not same(json.loads(content), self.expected[place])
            number += 1

    def figures(self) -> dict[str, Any]:
        """Return what it saw."""
        asked = sum(self.statuses.values())
        times = sorted(self.seconds)
        return {
            "requests": asked,
            "statuses": dict(self.statuses),
            "refused_share": round(1 - self.statuses["200"] / asked, 4) if asked else None,
            "wrong_answers": self.wrong,
            "median_ms": round(1000 * statistics.median(times), 1) if times else None,
            "p95_ms": round(1000 * times[int(0.95 * (len(times) - 1))], 1) if times else None,
            "slowest_ms": round(1000 * times[-1], 1) if times else None,
        }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether two answers are one: batches of other sizes differ in the last digits alone."""
    close = all(abs(found[name] - expected[name]) < 1e-2 for name in ("score", "rotation_deg", "scale", "shear"))
    return close and found["label"] == expected["label"]


class Attack:
    """All that attackers do, until time is up; every one of them ends by itself."""

    def __init__(self, service: Service, files: dict[str, bytes], seconds: float) -> None:
        self.service, self.files, self.end = service, files, time.monotonic() + seconds
        self.replies: dict[str, Counter[str]] = {}
        self.lock = threading.Lock()

    def note(self, name: str, reply: str) -> None:
        """Count a reply."""
        with self.lock:
            self.replies.setdefault(name, Counter())[reply] += 1

    def left(self) -> bool:
        """Return whether there is time left."""
        return time.monotonic() < self.end

    def costly(self, first: int, *only: str) -> None:
        """Send costly files, one after another, all of them or some."""
        names, number = only or tuple(self.files), first
        while self.left():
            name = names[number % len(names)]
            self.note(name, str(self.service.ask("POST", "/classify", self.files[name])[0]))
            number += 1

    def torn(self) -> None:
        """Send what is no proper request, and hang up at once every other time."""
        while self.left():
            for name, sent in TORN.items():
                self.note(name, [*self.service.talk(sent).split(), b"", b"closed"][1].decode("latin-1"))
                with contextlib.suppress(OSError), self.service.connect() as sock:
                    sock.sendall(sent[: len(sent) // 2])
            time.sleep(0.5)

    def slow(self, count: int, size: int) -> None:
        """Hold uploads that never end, each of so many bytes."""
        name = f"{count} unfinished uploads of {size:,} bytes"
        head = POST + b"Content-Length: 9900000\r\n\r\n"
        while self.left():
            socks = []
            for _ in range(count):
                with contextlib.suppress(OSError):
                    sock = self.service.connect()
                    socks.append(sock)
                    sock.settimeout(2)
                    sock.sendall(head + b"x" * size)
            self.note(name, "held")
            while self.left() and socks:
                socks[0].settimeout(0.5)
                with contextlib.suppress(TimeoutError, OSError):
                    socks[0].recv(64)
                    break
            for sock in socks:
                sock.close()
            time.sleep(0.5)

    def dribble(self, count: int) -> None:
        """Hold connections whose headers never end."""
        while self.left():
            socks = []
            for _ in range(count):
                with contextlib.suppress(OSError):
                    socks.append(self.service.connect())
                    socks[-1].sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            self.note(f"{count} headers that never end", "held")
            until = time.monotonic() + 8
            while self.left() and time.monotonic() < until:
                time.sleep(0.2)
            for sock in socks:
                sock.close()

    def run(self) -> dict[str, dict[str, int]]:
        """Attack from all sides and return what came back."""
        threads = [threading.Thread(target=self.costly, args=(first,)) for first in range(3)]
        threads += [threading.Thread(target=self.costly, args=(first, "some comments")) for first in range(CROWD)]
        threads += [threading.Thread(target=self.torn), threading.Thread(target=self.dribble, args=(40,))]
        threads += [threading.Thread(target=self.slow, args=sizes) for sizes in ((260, 1), (60, 9_000_000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: dict(seen) for name, seen in sorted(self.replies.items())}


def besieged(folder: Path, files: dict[str, bytes], seconds: float) -> dict[str, Any]:
    """Return what a service did before, during and after a siege."""
    service = Service(folder / "log.txt")
    try:
        good = digits(40)
        expected = [json.loads(service.ask("POST", "/classify", file)[2]) for file in good]
        figures: dict[str, Any] = {}
        for name, length in (("peace", seconds / 2), ("siege", seconds)):
            client = Client(service, good, expected, 0.05)
            client.start()
            if name == "peace":
                crowd = [Client(service, good, expected, 0.0) for _ in range(8)]
                for one in crowd:  # so that batches of all sizes have been seen, and memory is what work takes
                    one.start()
                time.sleep(2 * length / 3)
                for one in crowd:
                    one.over.set()
                    one.join()
                time.sleep(length / 3)
                figures |= weighed(service, "before")
            else:
                figures["replies_to_attackers"] = Attack(service, files, length).run()
            client.over.set()
            client.join()
            figures[f"client_in_{name}"] = client.figures()
        deadline = time.monotonic() + 30
        while service.ask("GET", "/readyz")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.5)
        figures["ready_afterwards"] = service.ask("GET", "/readyz")[0] == 200
        time.sleep(12)  # uploads that nobody ends are given up after ten seconds
        figures |= weighed(service, "after")
        figures["metrics"] = told(service.ask("GET", "/metrics")[2].decode())
        figures["seconds_to_end"], figures["processes_left"] = ended(service, files)
        figures["tracebacks_in_log"] = service.log.read_text(errors="replace").count("Traceback")
        return figures
    finally:
        if service.process.poll() is None:
            service.process.kill()


def weighed(service: Service, when: str) -> dict[str, Any]:
    """Return the memory of a service in all and by process, its own first."""
    each = [round(memory_mb_of(pid), 1) for pid in family(service.process.pid)]
    return {f"memory_{when}_mb": round(sum(each), 1), f"memory_{when}_by_process_mb": each}


def told(metrics: str) -> dict[str, Any]:
    """Return the counts that matter from /metrics."""
    decodes = dict(re.findall(r'headtilt_decodes_total\{outcome="(\w+)"\} ([\d.]+)', metrics))
    statuses: Counter[str] = Counter()
    for status, count in re.findall(r'headtilt_requests_total\{route="[^"]*",status="(\d+)"\} ([\d.]+)', metrics):
        statuses[status] += int(float(count))
    return {"decodes": {name: int(float(count)) for name, count in decodes.items()}, "statuses": dict(statuses)}


def ended(service: Service, files: dict[str, bytes]) -> tuple[float, int]:
    """Return how long the service takes to end while it is decoding and uploading, and how many processes it leaves."""
    everybody = family(service.process.pid)[1:]
    socks = [service.connect() for _ in range(10)]
    slow = files["slow BMP"]
    for number, sock in enumerate(socks):
        whole = number < 5
        length = len(slow) if whole else 5000
        with contextlib.suppress(OSError):
            sock.sendall(POST + f"Content-Length: {length}\r\n\r\n".encode() + (slow if whole else b"x"))
    start = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        service.process.wait(GRACE + 20)
    seconds = time.monotonic() - start
    for sock in socks:
        sock.close()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in everybody if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return round(seconds, 1), len(left)


def batched(folder: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Return what a batch run made of a folder of good images and hostile files."""
    import pyarrow.parquet as parquet

    mixed, good = folder / "mixed", folder / "good"
    mixed.mkdir()
    good.mkdir()
    for number, content in enumerate(digits(40)):
        for place in (mixed, good):
            (place / f"{number:03}.png").write_bytes(content)
    for name, content in files.items():
        (mixed / f"{name.replace(' ', '-')}.png").write_bytes(content)
    rows, seconds, codes, most = {}, {}, {}, 0.0
    for place in (good, mixed):
        words = [sys.executable, "-m", "headtilt", "predict", str(place), "--model", MODEL, "--levels", LEVELS]
        start = time.monotonic()
        run = subprocess.Popen([*words, "--out", str(folder / f"rows-{place.name}"), "--batch", "8", "--device", "cpu"])
        while run.poll() is None and time.monotonic() - start < 300:
            most = max(most, memory_mb(run.pid))
            time.sleep(0.2)
        if run.poll() is None:
            run.kill()
        seconds[place.name] = round(time.monotonic() - start, 1)
        codes[place.name] = run.wait()
        ended = codes[place.name] in (0, 1)  # 1: some rows hold errors
        found = parquet.read_table(folder / f"rows-{place.name}").to_pylist() if ended else []
        rows[place.name] = {Path(row["path"]).stem: row for row in found}
    alike = [
        name
        for name, row in rows["good"].items()
        if row["label"] == rows["mixed"].get(name, {}).get("label")
        and abs(row["rotation_deg"] - rows["mixed"][name]["rotation_deg"]) < 1e-2
    ]
    return {
        "inputs": 40 + len(files),
        "rows": len(rows["mixed"]),
        "good_rows_as_alone": len(alike),
        "errors": {name: row["error"].replace(f"{mixed}/", "") for name, row in rows["mixed"].items() if row["error"]},
        "exit_codes": codes,
        "seconds": seconds,
        "most_memory_mb": round(most, 1),
    }


def verdict(service: dict[str, Any], batch: dict[str, Any]) -> dict[str, bool]:
    """Return which promises were kept, from the figures alone."""
    client = service["client_in_siege"]
    return {
        "no wrong answer": client["wrong_answers"] == 0 and client["requests"] > 0,
        "no server error but 503 with Retry-After": set(client["statuses"]) <= {"200", "503"},
        "at most 20 % refused": client["refused_share"] is not None and client["refused_share"] <= MOST_REFUSED,
        "memory within 50 MB": service["memory_after_mb"] - service["memory_before_mb"] <= MOST_MEMORY_MB,
        "ready afterwards": service["ready_afterwards"],
        "ends in time": service["seconds_to_end"] <= GRACE and service["processes_left"] == 0,
        "no traceback in the log": service["tracebacks_in_log"] == 0,
        "a row for every input": batch["rows"] == batch["inputs"] and batch["good_rows_as_alone"] == 40,
        "the exit code tells of failed rows": batch["exit_codes"] == {"good": 0, "mixed": 1},
    }


def main() -> None:
    """Besiege a service and a batch run, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="Of the siege.")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    files = {name: make() for name, make in hostile.FILES.items()}
    with tempfile.TemporaryDirectory() as folder:
        service = besieged(Path(folder), files, min(asked.seconds, 600))
        batch = batched(Path(folder), files)
    kept = verdict(service, batch)
    figures = {"kept": kept, "siege_seconds": asked.seconds, "service": service, "batch": batch}
    print(json.dumps(figures, indent=1))
    from hardening.record import record

    print(record("siege", figures))
    sys.exit(0 if all(kept.values()) else 1)


if __name__ == "__main__":
    main()
