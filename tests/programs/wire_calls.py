"""A rank that compares AllGather and ReduceScatter of many sizes, and many in flight, with numpy bit for bit.

The arguments: the largest number of elements; "verbs" or "tcp", which must be what carries them.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from reference import reduction, same_bits, values

import hdma

largest, wire = int(sys.argv[1]), sys.argv[2]
comm = hdma.init()
assert comm.wire == wire, comm.wire
rank, size = comm.rank, comm.size


def start(numel: int, dtype: Any, seed: int, async_op: bool) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """Both collectives with their works, their results and what these must be."""
    shards = [values(r, numel, dtype, seed) for r in range(size)]
    wholes = [values(r, size * numel, dtype, seed + 1) for r in range(size)]
    gathered, scattered = np.zeros(size * numel, dtype), np.zeros(numel, dtype)
    works = [
        comm.all_gather(gathered, shards[rank], async_op=async_op),
        comm.reduce_scatter(scattered, wholes[rank], async_op=async_op),
    ]
    mine = [whole[rank * numel : (rank + 1) * numel] for whole in wholes]
    return list(zip(works, (gathered, scattered), (np.concatenate(shards), reduction(mine, "sum", comm.nodes))))


def check(calls: list[tuple[Any, np.ndarray, np.ndarray]], what: object) -> None:
    for work, got, want in calls:
        if work is not None:
            work.wait()
        assert same_bits(got, want), (rank, what)


for dtype in (np.float32, ml_dtypes.bfloat16):
    for numel in (0, 1, 7, 4099, (1 << 20) // np.dtype(dtype).itemsize, largest):
        check(start(numel, dtype, numel, False), (numel, dtype))
    calls = [start(100 + 1001 * i, dtype, i, True) for i in range(12)]
    for i, each in enumerate(calls):
        check(each, ("in flight", i, dtype))
comm.barrier()
comm.close()
