"""What a client of the load test does: post tilted digits, one after the other. Run by benchmarks/serve.py."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from locust import FastHttpUser, constant, task

FILES = [path.read_bytes() for path in sorted(Path(os.environ["HEADTILT_LOAD"]).glob("*.png"))]
NEXT = itertools.cycle(FILES)


class Client(FastHttpUser):
    """Asks again as soon as it is answered."""

    wait_time = constant(0)

    @task
    def classify(self) -> None:
        """Post the next digit."""
        self.client.post("/classify", data=next(NEXT), headers={"Content-Type": "image/png"})
