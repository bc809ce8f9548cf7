"""The job that a launcher has started: all ranks join, and each tells all what it found."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from hdma import env, launch, world
from hdma.communicator import Communicator
from hdma.errors import Error
from hdma.topology import Topology

# Unless HDMA_TIMEOUT_S says otherwise: a doctor who is kept waiting has found something.
_JOIN_S = 30.0


@dataclass
class Job:
    """`error` says why this rank could not join. Of ranks that a launcher started, `comm` is their communicator."""

    rank: int = 0
    size: int = 1
    launcher: str = "single process"
    error: str = ""
    comm: Communicator | None = field(default=None, repr=False)

    @property
    def topology(self) -> Topology:
        return self.comm.topology if self.comm else Topology(1, 1)


def join() -> Job:
    """Joins the other ranks, if there are any; waits no longer than HDMA_TIMEOUT_S, or 30 s."""
    try:
        me = launch.find()
    except Error as error:
        return Job(error=str(error))
    job = Job(me.rank, me.size, me.launcher)
    if me.size > 1:
        os.environ.setdefault(env.TIMEOUT_S.name, str(_JOIN_S))
        try:
            job.comm = world.init()
        except Error as error:
            job.error = str(error)
    return job


def gather(job: Job, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Everyone's `mine`, by rank; of this rank alone if it has not joined. Raises `hdma.Error` as collectives do."""
    comm = job.comm
    if comm is None:
        return [mine]
    import numpy as np

    raw = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    lengths = np.empty(comm.size, np.int64)
    comm.all_gather(lengths, np.array([raw.size]))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: raw.size] = raw
    whole = np.empty((comm.size, padded.size), np.uint8)
    comm.all_gather(whole, padded)
    return [json.loads(line[:length].tobytes()) for line, length in zip(whole, lengths)]


def describe(job: Job, ranks: list[dict[str, Any]], wire: str = "tcp") -> dict[str, Any]:
    """Nodes with their ranks, and what links this job's ranks; `wire`: the network between nodes, tcp or rdma."""
    topology = job.topology
    grid = topology.nodes, topology.ranks_per_node
    nodes = [[topology.rank(node, local) for local in range(grid[1])] for node in range(grid[0])] if job.comm else []
    return {
        "launcher": job.launcher,
        "rank": job.rank,
        "size": job.size,
        "joined": not job.error,
        "nodes": nodes,
        "hosts": [rank["host"] for rank in ranks] if job.comm else [],
        "pids": [rank["pid"] for rank in ranks] if job.comm else [],
        "links": [[_link(topology, a, b, wire) for b in range(job.size)] for a in range(job.size)] if job.comm else [],
    }


def _link(topology: Topology, a: int, b: int, wire: str) -> str:
    """How bytes go from a to b directly; nothing where a third rank relays them."""
    if a == b:
        return "self"
    if b in topology.mates(a):
        return "memory"
    return wire if b in topology.rail(a) else ""
