"""The batch run on a Ray cluster: Ray Data streams the missing shards through actors that hold the model.

Shards, not pixels, travel through Ray: an actor reads its inputs where they lie and writes its file where it belongs,
so that all nodes must see the same folders. A shard whose actor or node dies is computed again elsewhere, under the
same name: no row can be lost or come twice.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headtilt import errors
from headtilt.apps.batch.job import Worker
from headtilt.apps.batch.plan import Run
from headtilt.errors import DataError, HeadtiltError, MissingExtraError
from headtilt.its import ITS
from headtilt.progress import Progress
from headtilt.sources import Adapted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RAISED = re.compile(r"headtilt\.errors\.(\w+Error): (.+)")
TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_USAGE_STATS_PROMPT_ENABLED": "0"}


class ShardActor:
    """Computes shards; Ray makes one per copy of the model.

    Args:
        run: What to do.
        cpus: Cores that it may use.
        folder: Where the command was started, to which relative paths relate.
    """

    def __init__(self, run: Run, cpus: int, folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        torch.set_num_threads(cpus)
        self.worker = Worker(run, *run.job.wrapped.load())

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Write the shards that a batch names, and return it."""
        left = [shard for shard in batch["shard"].tolist() if not self.worker.run.path(shard).exists()]
        self.worker.write(left)
        return batch


@dataclass(frozen=True)
class Cluster:
    """Where and how widely to compute.

    Attributes:
        address: Of a cluster that runs already, or None for one on this machine that ends with the run.
        actors: Copies of the model.
        cpus: Cores for each.
        gpus: GPUs for each.
        device: Where each puts its model.
    """

    address: str | None = None
    actors: int = 2
    cpus: int = 1
    gpus: float = 0
    device: str = "cpu"

    def compute(self, run: Run, robust: ITS, adapted: Adapted, tell: Progress) -> None:  # noqa: ARG002 - as engines are
        """Compute the missing shards of a run on the cluster."""
        missing = run.missing()
        if not missing:
            return
        job = run.job
        decoders = job.decoders or self.cpus
        there = replace(run, job=replace(job, decoders=decoders, wrapped=replace(job.wrapped, device=self.device)))
        with self._connected() as ray:
            finished = run.count - sum(map(run.rows, missing))
            tell("searching on Ray", finished, run.count)
            for shard in self._stream(ray, there, missing):
                finished += run.rows(shard)
                tell("searching on Ray", finished, run.count)

    def _stream(self, ray: Any, run: Run, missing: list[int]) -> Iterator[int]:
        """Yield shards as they are done."""
        actors = min(self.actors, len(missing))
        shards = ray.data.from_items([{"shard": shard} for shard in missing], override_num_blocks=len(missing))
        done = shards.map_batches(
            ShardActor,
            fn_constructor_args=(run, self.cpus, str(Path.cwd())),
            batch_size=1,
            # One at least, so that the run goes on with what is left of the cluster when nodes die.
            compute=ray.data.ActorPoolStrategy(min_size=1, initial_size=actors, max_size=actors),
            num_cpus=self.cpus,
            num_gpus=self.gpus,
        )
        try:
            for row in done.iter_rows():
                yield int(row["shard"])
        except ray.exceptions.RayError as error:
            raise _plain(error) from error

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yield Ray, connected; what was started here ends here."""
        for name, value in TELEMETRY.items():
            os.environ.setdefault(name, value)
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise MissingExtraError("ray", "ray") from error
        # Ray Data tells its own progress, line by line; `tell` says it once.
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        if ray.is_initialized():  # by whoever calls this from Python
            yield ray
            return
        options: dict[str, Any] = {"address": self.address or "local", "log_to_driver": False, "logging_level": "ERROR"}
        if self.address is None:
            # A cluster of this machine alone listens on its loopback alone.
            options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            options["num_cpus"] = max(self.actors * self.cpus, os.cpu_count() or 1)
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DataError(
                f"address must be that of a Ray cluster; {self.address!r} did not answer: {error}"
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _plain(error: BaseException) -> HeadtiltError:
    """Return what a shard raised on purpose, without the remote traceback around it."""
    # Ray Data wraps what was raised several times over, and keeps it as text alone.
    found = RAISED.findall(str(error))
    if found:
        name, said = found[-1]
        return getattr(errors, name, DataError)(said)
    return DataError(
        f"the cluster gave up: {str(error).strip().splitlines()[-1]} Start the same command again to go on."
    )
