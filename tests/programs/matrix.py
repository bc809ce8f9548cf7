"""A rank that compares both collectives with numpy, bit for bit, over dtypes, sizes, views and ways to call."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
from reference import misaligned, reduce_scatter, same_bits, values

import hdma

ELEMENTS = [int(n) for n in sys.argv[1].split(",")]
comm = hdma.init()
rank, size = comm.rank, comm.size
failures = []


def check(what: str, got: np.ndarray, want: np.ndarray) -> None:
    if not same_bits(got, want):
        failures.append(f"rank {rank}: {what}")


for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
    itemsize = np.dtype(dtype).itemsize
    for numel in ELEMENTS:
        what = f"{np.dtype(dtype).name} {numel}"
        shards = [values(r, numel, dtype) for r in range(size)]
        gathered = np.concatenate(shards)
        whole = values(rank, size * numel, dtype, seed=1)
        mine = [values(r, numel, dtype, seed=1, start=rank * numel) for r in range(size)]
        summed = reduce_scatter(mine, comm.nodes, comm.local_size, dtype)

        out = np.zeros(size * numel, dtype)
        comm.all_gather(out, shards[rank])
        check(f"all_gather {what}", out, gathered)
        out = np.zeros(numel, dtype)
        comm.reduce_scatter(out, whole)
        check(f"reduce_scatter {what}", out, summed)

        # Views that begin at any element of a cache line, in place, and both calls in flight at once.
        inp, out = misaligned(numel, dtype, 3 * itemsize), misaligned(size * numel, dtype, itemsize)
        inp[:] = shards[rank]
        works = [comm.all_gather(out, inp, async_op=True)]
        inp2, out2 = misaligned(size * numel, dtype, 5 * itemsize), misaligned(numel, dtype, 7 * itemsize)
        inp2[:] = whole
        works.append(comm.reduce_scatter(out2, inp2, async_op=True))
        for work in works:
            work.wait()
        check(f"misaligned all_gather {what}", out, gathered)
        check(f"misaligned reduce_scatter {what}", out2, summed)

        out = np.zeros(size * numel, dtype)
        part = out[rank * numel : (rank + 1) * numel]
        part[:] = shards[rank]
        comm.all_gather(out, part)
        check(f"in place all_gather {what}", out, gathered)
        inp = whole.copy()
        part = inp[rank * numel : (rank + 1) * numel]
        comm.reduce_scatter(part, inp)
        check(f"in place reduce_scatter {what}", part, summed)

        if dtype is not np.float32:
            out = np.zeros(numel, dtype)
            comm.reduce_scatter(out, whole, wire_dtype="float32")
            check(
                f"float32 wire reduce_scatter {what}",
                out,
                reduce_scatter(mine, comm.nodes, comm.local_size, np.float32),
            )
comm.barrier()
comm.close()
print("\n".join(failures) or "all equal")
sys.exit(bool(failures))
