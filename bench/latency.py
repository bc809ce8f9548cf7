"""Small calls of hdma and MPI on numpy arrays, in us: slowest rank, median of 9 interleaved turns of 500 calls.

mpirun -n 2 python bench/latency.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import record
from mpi4py import MPI

import hdma


def main() -> None:
    world = MPI.COMM_WORLD
    comm = hdma.init()
    part, whole = np.ones(256, np.float32), np.ones(256 * comm.size, np.float32)
    sum_of, summed = np.ones(256 * comm.size, np.float32), np.ones(256, np.float32)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_gather": (lambda: comm.all_gather(whole, part), lambda: world.Allgather(part, whole)),
        "reduce_scatter": (
            lambda: comm.reduce_scatter(summed, sum_of),
            lambda: world.Reduce_scatter_block(sum_of, summed),
        ),
        "all_reduce": (
            lambda: comm.all_reduce(part, "max"),
            lambda: world.Allreduce(MPI.IN_PLACE, part, MPI.MAX),
        ),
        "broadcast": (lambda: comm.broadcast(part), lambda: world.Bcast(part)),
        "barrier": (lambda: comm.barrier(), lambda: world.Barrier()),
    }
    lines = []
    for name, pair in calls.items():
        took: list[list[float]] = [[], []]
        for _ in range(10):
            for call, times in zip(pair, took):
                world.Barrier()
                start_s = time.perf_counter()
                for _ in range(500):
                    call()
                times.append(world.allreduce((time.perf_counter() - start_s) / 500 * 1e6, MPI.MAX))
        lines.append(f"{name:15} 1 KiB   hdma {median(took[0][1:]):6.2f}   MPI {median(took[1][1:]):6.2f}")
    if comm.rank == 0:
        about = record.header(comm.size, comm.nodes)
        machine = about["machine"]
        print(f"# {about['date']}, {machine['cpu']} ({machine['cores']} cores), {machine['system']}, {about['commit']}")
        library = " ".join(map(str, MPI.get_vendor()))
        print(f"# {comm.size} ranks on {comm.nodes} nodes, {library}: {about['command']}")
        print("\n".join(lines), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
