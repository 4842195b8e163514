"""A batch run on a Ray cluster of two nodes on this machine, of which something may be killed midway.

    python benchmarks/two_nodes.py SOURCE OUT --model zoo:digits --kill node

Writes to OUT/none, OUT/actor, OUT/node, and prints JSON. A node stays dead: kill it last. Ray probes addresses outside
this machine even with its statistics off, so that the script first moves itself into a network namespace that has the
loopback alone, with a home folder of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FAST_DETECTOR = {  # a node that died is missed after two seconds, not after half a minute
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


def isolated(command: list[str], home: str) -> list[str]:
    """Return the command that runs another where there is no network but the loopback."""
    settings = [f"HOME={home}", f"RAY_TMPDIR={home}", "RAY_USAGE_STATS_ENABLED=0", "HEADTILT_ISOLATED=1"]
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", "env", *settings, *command]


def permitted() -> bool:
    """Return whether this machine lets us make such a namespace."""
    try:
        tried = subprocess.run(isolated(["true"], "/tmp"), capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def actor_pids() -> list[int]:
    """Return the processes of the actors that hold a model, in this namespace."""
    found = []
    here = os.readlink("/proc/self/ns/net")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # processes come and go
            line = (folder / "cmdline").read_bytes()
            if line.startswith(b"ray::") and b"ShardActor" in line and os.readlink(folder / "ns/net") == here:
                found.append(int(folder.name))
    return found


def strike(kind: str, out: Path, after: int, cluster: Any, node: Any, told: dict[str, Any]) -> None:
    """Kill an actor or a node once some shards are there."""
    while len(list(out.glob("part-*.parquet"))) < after:
        time.sleep(0.02)
    told["killed_after_shards"] = len(list(out.glob("part-*.parquet")))
    if kind == "node":
        cluster.remove_node(node, allow_graceful=False)
    else:
        victims = actor_pids()
        os.kill(victims[0], signal.SIGKILL)
        told["actors_then"] = len(victims)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    import ray
    from ray.cluster_utils import Cluster as TwoNodes

    head = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False, "_system_config": FAST_DETECTOR}
    start = time.perf_counter()
    cluster = TwoNodes(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    up = time.perf_counter() - start
    told = [{"cluster_seconds": up, **one(options, kill, ray, cluster, second)} for kill in options.kill]
    ray.shutdown()
    cluster.shutdown()
    return told


def one(options: argparse.Namespace, kill: str, ray: Any, cluster: Any, second: Any) -> dict[str, Any]:
    """Return what happened in one run, to the folder named after what was killed."""
    from headtilt.apps.batch.job import predict
    from headtilt.apps.batch.plan import Job
    from headtilt.apps.batch.ray_engine import Cluster
    from headtilt.apps.loading import Wrapped

    start, out = time.perf_counter(), options.out / kill
    told: dict[str, Any] = {"kill": kill, "nodes": sum(node["Alive"] for node in ray.nodes())}
    if kill != "none":
        threading.Thread(target=strike, args=(kill, out, options.after, cluster, second, told), daemon=True).start()
    wrapped = Wrapped(options.model, options.bundle, options.levels)
    job = Job(options.source, out, wrapped, batch=options.batch, shard_rows=options.shard_rows)
    done = predict(job, Cluster(actors=2).compute)
    told |= {"rows": done.count, "shards": done.shards, "errors": done.errors()}
    return told | {"seconds": time.perf_counter() - start, "nodes_left": sum(node["Alive"] for node in ray.nodes())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="zoo:digits")
    parser.add_argument("--bundle")
    parser.add_argument("--levels", default="rotation")
    parser.add_argument("--kill", choices=("none", "actor", "node"), nargs="+", default=["none"])
    parser.add_argument("--after", type=int, default=3, help="shards that must be there before something is killed")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--shard-rows", type=int, default=250)
    options = parser.parse_args()
    if os.environ.get("HEADTILT_ISOLATED") != "1":
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as home:
            sys.exit(subprocess.run(isolated([sys.executable, *sys.argv], home), check=False).returncode)
    print(json.dumps(run(options)))


if __name__ == "__main__":
    main()
