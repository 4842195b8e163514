"""Where a model runs: the device that a name stands for, and how many threads are useful there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from headtilt.errors import OptionError


def resolve_device(device: str | torch.device) -> str:
    """Return the name of a device that torch has here; "auto" is the GPU where there is one, otherwise the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise OptionError(
            f"device must be auto, cpu, or one that torch can use on this machine; got {str(device)!r}: {why}. "
            'Use device="cpu" (--device cpu).'
        ) from error
    return str(device)


def limit_threads() -> None:
    """Use no more threads than there are idle cores, unless OMP_NUM_THREADS says how many.

    Threads that wait for one another on a busy core are many times slower than a single one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        idle = (os.cpu_count() or 1) - running_elsewhere()
        torch.set_num_threads(max(1, min(torch.get_num_threads(), idle)))


def running_elsewhere(file: Path = Path("/proc/loadavg"), looks: int = 5) -> int:
    """Return how many threads run beside this one, at this moment; 0 where the system does not say.

    The load average would not do: it remembers what ended a minute ago, and a fit takes many.
    """
    counts = []
    try:
        for _ in range(looks):
            counts.append(int(file.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1)
            time.sleep(0.01)
    except (OSError, ValueError, IndexError):
        return 0
    return max(min(counts), 0)
