"""A rank that compares every collective with numpy, bit for bit, over dtypes, operations, sizes, views, ways to call.

The full product for sums of float32 and bfloat16; every pair of values of any two columns for all the rest. Twice: with
the default window and with one of 64 KiB, in which long messages are many runs of a plan.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import places
from allpairspy import AllPairs
from reference import FLOATS, INTEGERS, OPS, misaligned, reduction, same_bits, same_numbers, values

import hdma

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
VIEWS = ("plain", "misaligned", "in place")
MOVED: list[Any] = [np.complex64, np.complex128, np.uint16, np.uint64]


class Case(NamedTuple):
    collective: str
    numel: int
    view: str
    dtype: Any
    op: str
    how: str  # "sync" or "async"
    wire: Any = None

    def __str__(self) -> str:
        return " ".join(np.dtype(x).name if isinstance(x, type) else str(x) for x in self if x is not None)


def product() -> list[Case]:
    # Through the windows of 64 KiB a million elements are thousands of chunks: from three ranks on, a tenth of that.
    few = places.PLACE == "stub" or (window and comm.size >= 3)
    numels = (0, 1, 7, 4096, 10007 if places.PLACE == "stub" and window else 100003 if few else 1000003)
    rows = itertools.product(COLLECTIVES, numels, VIEWS, (np.float32, ml_dtypes.bfloat16), ("sum",), ("sync",))
    cases = [Case(*row) for row in rows if possible([*row])]
    wired = (Case(c.collective, c.numel, c.view, c.dtype, c.op, "async", np.float32) for c in cases)
    return cases + [c for c in wired if "reduce" in c.collective and c.dtype is not np.float32]


def pairs() -> list[Case]:
    columns: list[Any] = [
        COLLECTIVES,
        (1, 5, 37, 300, 5003, 70001),
        VIEWS,
        FLOATS + INTEGERS + MOVED,
        tuple(OPS),
        ("sync", "async"),
    ]
    return [Case(*row) for row in AllPairs(columns, filter_func=possible)]


def possible(row: list[Any]) -> bool:
    """No "in place" for what always is, or never; no arithmetic that there is not."""
    if len(row) > 2 and row[2] == "in place" and row[0] not in ("all_gather", "reduce_scatter"):
        return False
    collective, dtype, op = row[0], row[3] if len(row) > 3 else None, row[4] if len(row) > 4 else None
    return "reduce" not in collective or (dtype not in MOVED and not (op == "avg" and dtype in INTEGERS))


@functools.lru_cache(maxsize=64)
def values_of(rank: int, start: int, numel: int, dtype: Any, odd: bool) -> np.ndarray:
    """Elements `start` to `start + numel` of a rank's input; `odd`: with NaN and infinity here and there."""
    made = values(rank, numel, dtype, start=start)
    if odd:
        index = np.arange(start, start + numel)
        made[index % 97 == rank % 3] = np.nan
        made[index % 89 == 0] = np.inf
    made.flags.writeable = False
    return made


def inputs(case: Case, numel: int, start: int = 0) -> list[np.ndarray]:
    """The same part of every rank's input."""
    odd = case.dtype in FLOATS and case.op != "sum"
    return [values_of(r, start, numel, case.dtype, odd) for r in range(comm.size)]


def own(case: Case, numel: int) -> np.ndarray:
    return values_of(comm.rank, 0, numel, case.dtype, case.dtype in FLOATS and case.op != "sum")


def array(case: Case, numel: int, offset: int = 1) -> np.ndarray:
    itemsize = np.dtype(case.dtype).itemsize
    return misaligned(numel, case.dtype, offset * itemsize if case.view == "misaligned" else 0)


def run(case: Case) -> None:
    numel, size, rank = case.numel, comm.size, comm.rank
    mine = slice(rank * numel, (rank + 1) * numel)
    options: dict[str, Any] = {"async_op": case.how == "async"}
    if case.collective == "all_gather":
        shards = inputs(case, numel)
        want, out = np.concatenate(shards), array(case, size * numel)
        inp = out[mine] if case.view == "in place" else array(case, numel, 3)
        inp[:] = shards[rank]
        out = places.put(out)
        inp = places.part(out, mine) if case.view == "in place" else places.put(inp)
        work = comm.all_gather(out, inp, **options)
    elif case.collective == "broadcast":
        root = numel % size
        shards = inputs(case, numel)
        want, out = shards[root], array(case, numel)
        out[:] = shards[rank]
        out = places.put(out)
        work = comm.broadcast(out, root, **options)
    elif case.collective == "all_to_all":
        numel = min(numel, 200003)
        mine = slice(rank * numel, (rank + 1) * numel)
        want, out = np.concatenate(inputs(case, numel, rank * numel)), array(case, size * numel)
        inp = array(case, size * numel, 5)
        inp[:] = own(case, size * numel)
        out, inp = places.put(out), places.put(inp)
        work = comm.all_to_all(out, inp, **options)
    else:
        if case.wire is not None:
            options["wire_dtype"] = "float32"
        scatters = case.collective == "reduce_scatter"
        inp = array(case, size * numel if scatters else numel, 5)
        inp[:] = own(case, len(inp))
        with np.errstate(all="ignore"):
            start = rank * numel if scatters else 0
            want = reduction(inputs(case, numel, start), case.op, comm.nodes, case.wire)
        inp = places.put(inp)
        if scatters:
            out = places.part(inp, mine) if case.view == "in place" else places.put(array(case, numel, 7))
            work = comm.reduce_scatter(out, inp, case.op, **options)
        else:
            out = inp
            work = comm.all_reduce(out, case.op, **options)
    if work is not None:
        work.wait()
    got = places.numpy(out, case.dtype)
    if not (same_bits if case.op == "sum" else same_numbers)(got, want):
        failures.append(f"rank {rank}, {window or 'default'} window: {case}")


places.start()
failures: list[str] = []
for window in ("", "65536"):
    os.environ["HDMA_WINDOW_BYTES"] = window
    comm = hdma.init()
    for case in product() + pairs():
        run(case)
    comm.barrier()
    comm.close()
print("\n".join(failures[:20]) or "all equal")
sys.exit(bool(failures))
