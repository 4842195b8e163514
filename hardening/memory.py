"""Search under a limit on memory: ``python -m hardening.memory``. The chunk shrinks and the answers stay the same.

The limit is on the address space of a process of its own (``resource.setrlimit``), a little above what it has taken
before the search begins. On a machine with CUDA the same is done with a cap on the GPU's memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHUNK = 2048
SPARE = (None, 220, 130)  # megabytes; None is no limit


def search(spare: int | None, device: str) -> dict[str, Any]:
    """Return labels, logits and the chunk in the end of one search, in this process, under the limit."""
    import resource

    import torch

    import headtilt as ht

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 48, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(768, 7)).eval().to(device)
    images = torch.rand(64, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    robust = ht.ITS(model, [ht.rotation(), ht.scale()], search=ht.Tree(samples=9), chunk=CHUNK, gate=None)
    robust(images[:1])  # what is needed but once is there
    if spare is not None and device == "cpu":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + spare * 2**20,) * 2)
    elif spare is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare * 2**20) / total)
    found = robust.search(images)
    chunks = list(robust.predictor.chunks.values())
    return {
        "spare_megabytes": spare,
        "chunk_asked_for": CHUNK,
        "chunk_in_the_end": min(chunks, default=CHUNK),
        "labels": found.labels.tolist(),
        "poses": hashlib.sha256(found.pose.cpu().numpy().round(4).tobytes()).hexdigest(),
        "logits": found.logits.cpu().double().sum(1).tolist(),
    }


def in_a_process(spare: int | None, device: str = "cpu") -> dict[str, Any]:
    """Return what `search` does in a process of its own."""
    command = [sys.executable, "-m", "hardening.memory", "--device", device, "--one", json.dumps(spare)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(device: str = "cpu") -> dict[str, Any]:
    """Return the searches under all limits, and whether they agree; logits to five digits, since chunks differ."""
    free, *limited = (in_a_process(spare, device) for spare in SPARE)
    alike = [
        one["labels"] == free["labels"]
        and one["poses"] == free["poses"]
        and all(abs(a - b) <= 1e-4 * max(1, abs(b)) for a, b in zip(one["logits"], free["logits"], strict=True))
        for one in limited
    ]
    kept = ("spare_megabytes", "chunk_asked_for", "chunk_in_the_end")
    runs = [{key: one[key] for key in kept} for one in (free, *limited)]
    shrunk = [one["chunk_in_the_end"] < CHUNK for one in limited]
    return {"same_answers": alike, "chunk_shrank": shrunk, "runs": runs}


def main() -> None:
    """Compare searches under limits and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(search(json.loads(asked.one), asked.device)))
        return
    import torch

    from hardening.record import record

    figures = {"cpu": compare(), "cuda": compare("cuda") if torch.cuda.is_available() else "no CUDA here: not run"}
    print(json.dumps(figures, indent=1))
    print(record("memory", figures))
    fine = all(figures["cpu"]["same_answers"]) and all(figures["cpu"]["chunk_shrank"])
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
