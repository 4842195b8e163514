"""Batch runs that are killed, lose a node, run out of disk or may not write: ``python -m hardening.kills``.

`headtilt predict` is ended with SIGKILL fifteen times on each engine and started again; a cluster of two nodes loses
one of them; the disk is full; the folder is read-only. In the end every input must have exactly one row, equal to that
of an undisturbed run. Ray runs in namespaces of its own with the loopback alone. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hardening.siege import digits

ROOT = Path(__file__).parent.parent
MODEL, LEVELS, SHARD_ROWS, BATCH = "zoo:digits", "rotation,scale,shear", 4, 4
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
LONGEST = 180  # seconds that a run may take until its next file


def command(source: Path, out: Path, engine: str) -> list[str]:
    """Return the command of a run."""
    words = [sys.executable, "-m", "headtilt", "predict", str(source), "--out", str(out), "--model", MODEL]
    words += ["--levels", LEVELS, "--shard-rows", str(SHARD_ROWS), "--batch", str(BATCH), "--engine", engine]
    return [*words, *(["--device", "cpu"] if engine == "local" else ["--actors", "1"])]


def isolated(words: list[str], home: str) -> list[str]:
    """Return the command that runs another with the loopback alone, all of whose processes end with it."""
    settings = [f"HOME={home}", f"RAY_TMPDIR={home}", "RAY_USAGE_STATS_ENABLED=0"]
    return [*ALONE, 'ip link set lo up && exec "$@"', "sh", "env", *settings, *words]


def parts(out: Path) -> int:
    """Return how many files of rows there are."""
    return len(list(out.glob("part-*.parquet")))


def rows(out: Path) -> list[dict[str, Any]]:
    """Return all rows of a folder."""
    import pyarrow.parquet as parquet

    found: list[dict[str, Any]] = parquet.read_table(out).to_pylist()
    return found


def killed(words: list[str], out: Path, kills: int, seed: int, minutes: float) -> dict[str, Any]:
    """Return what happened to a run that was killed so often within some minutes, and started again each time."""
    draw, seen = random.Random(seed), []
    start = time.monotonic()
    while len(seen) < kills and time.monotonic() - start < 60 * minutes:
        before = parts(out)
        run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # Two of three are met while they write, the others at any moment of their beginning.
        longest = time.monotonic() + (LONGEST if len(seen) % 3 else draw.uniform(0.5, 8))
        while parts(out) == before and time.monotonic() < longest and run.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        if run.poll() is not None:
            break  # it was done before it could be killed
        run.kill()
        run.wait()
        time.sleep(0.3)  # until what it had started has ended, too
        seen.append(parts(out))
        print(out.name, "killed", len(seen), "times, files:", seen[-1], flush=True)
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    return {
        "kills": len(seen),
        "files_after_each_kill": seen,
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
    }


def compared(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whether every input has one row, equal to that of the undisturbed run."""
    same = [row["path"] for row in found] == [row["path"] for row in expected]
    numbers = ("score", "rotation_deg", "scale", "shear")
    equal = same and all(
        one["label"] == other["label"]
        and one["error"] == other["error"]
        and all((one[name] is None) == (other[name] is None) for name in numbers)
        and all(one[name] is None or abs(one[name] - other[name]) < 1e-3 for name in numbers)
        for one, other in zip(found, expected, strict=True)
    )
    return {"rows": len(found), "every_input_once": same, "rows_equal": equal}


def full_disk(folder: Path, words: list[str]) -> dict[str, Any]:
    """Return what a run says that fills its disk, and what it leaves once there is room again."""
    out, copy = folder / "small", folder / "small-copy"
    out.mkdir()
    script = (
        f'mount -t tmpfs -o size=60k none {out} && "$@" > {folder}/full.txt 2>&1; echo $? > {folder}/full.rc; '
        f'mount -o remount,size=100m {out} && "$@" > {folder}/room.txt 2>&1; echo $? > {folder}/room.rc; '
        f"cp -r {out} {copy}"
    )
    subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *words], check=True, timeout=900)
    said = (folder / "full.txt").read_text(errors="replace")
    return {
        "exit_code": int((folder / "full.rc").read_text()),
        "says": said.replace(str(folder), "…").strip().splitlines()[-1],
        "traceback": "Traceback" in said,
        "exit_code_with_room": int((folder / "room.rc").read_text()),
    }


def read_only(folder: Path, words: list[str]) -> dict[str, Any]:
    """Return what a run says that may not write."""
    out = folder / "read-only"
    out.mkdir()
    script = f'mount -t tmpfs -o ro none {out} && "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    return {
        "exit_code": done.returncode,
        "says": said.replace(str(folder), "…").strip().splitlines()[-1],
        "traceback": "Traceback" in said,
    }


def node_lost(source: Path, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what happened to a cluster of two nodes that lost one, and its rows."""
    script = ROOT / "benchmarks" / "two_nodes.py"
    words = [sys.executable, str(script), str(source), str(folder / "nodes"), "--kill", "node", "--levels", LEVELS]
    words += ["--shard-rows", str(SHARD_ROWS), "--batch", str(BATCH), "--model", MODEL]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        return {"exit_code": done.returncode, "says": done.stderr[-1000:]}, []
    (told,) = json.loads(done.stdout.splitlines()[-1])
    return {"exit_code": 0, **told}, rows(folder / "nodes" / "node")


def main() -> None:
    """Run them all, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15, help="On each engine.")
    parser.add_argument("--minutes", type=float, default=60, help="After which no more are killed.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pyarrow
    import pyarrow.parquet as parquet

    figures: dict[str, Any] = {"seed": asked.seed}
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp", ignore_cleanup_errors=True) as place:
        folder, source = Path(place), Path(place) / "digits.parquet"
        files = digits(240)
        files[50] = b"no image at all"
        parquet.write_table(pyarrow.table({"image": files}), source, row_group_size=32)
        whole = subprocess.run(
            command(source, folder / "whole", "local"), timeout=900, capture_output=True, check=False
        )
        expected = rows(folder / "whole")
        figures |= {"inputs": len(files), "undisturbed": {"exit_code": whole.returncode, "rows": len(expected)}}
        home = folder / "h"
        home.mkdir()
        local = command(source, folder / "local", "local")
        ray = isolated(command(source, folder / "ray", "ray"), str(home))
        with ThreadPoolExecutor(2) as both:  # most of their time they start
            runs = {
                name: both.submit(killed, words, folder / name, asked.kills, asked.seed + number, asked.minutes)
                for number, (name, words) in enumerate((("local", local), ("ray", ray)))
            }
        for name, run in runs.items():
            figures[name] = run.result() | compared(rows(folder / name), expected)
        figures["node lost"], found = node_lost(source, folder)
        figures["node lost"] |= compared(found, expected)
        words = command(source, folder / "small", "local")
        figures["full disk"] = full_disk(folder, words) | compared(rows(folder / "small-copy"), expected)
        figures["read-only folder"] = read_only(folder, command(source, folder / "read-only", "local"))
    survived = [figures[name] for name in ("local", "ray", "node lost", "full disk")]
    exits = [figures["local"]["exit_code"], figures["ray"]["exit_code"], figures["full disk"]["exit_code_with_room"]]
    told = [figures[name] for name in ("full disk", "read-only folder")]
    figures["kept"] = {
        "every input exactly one row, as in an undisturbed run": all(one["rows_equal"] for one in survived),
        "in the end the exit code of an undisturbed run": set(exits) == {whole.returncode},
        "killed as often as asked": all(figures[name]["kills"] >= asked.kills for name in ("local", "ray")),
        "errors in a sentence": all(one["exit_code"] != 0 and not one["traceback"] for one in told),
    }
    print(json.dumps(figures, indent=1))
    from hardening.record import record

    print(record("kills", figures))
    sys.exit(0 if all(figures["kept"].values()) else 1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
