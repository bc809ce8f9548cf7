"""A rank that compares every collective with numpy, bit for bit, over dtypes, operations, sizes, views, ways to call.

The full product for sums of float32 and bfloat16; every pair of values of any two columns for all the rest. Twice: with
the default window and with one of 64 KiB, in which long messages are many runs of a plan.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
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
    numels = (0, 1, 7, 4096, 1000003)
    rows = itertools.product(COLLECTIVES, numels, VIEWS, (np.float32, ml_dtypes.bfloat16), ("sum",), ("sync",))
    cases = [Case(*row) for row in rows]
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
    collective, dtype, op = row[0], row[3] if len(row) > 3 else None, row[4] if len(row) > 4 else None
    return "reduce" not in collective or (dtype not in MOVED and not (op == "avg" and dtype in INTEGERS))


def inputs(case: Case, numel: int) -> list[np.ndarray]:
    """Of every rank; with NaN and infinity here and there where the operation is not a plain sum."""
    made = [values(r, numel, case.dtype, seed=len(case.collective)) for r in range(comm.size)]
    if case.dtype in FLOATS and case.op != "sum":
        for r, x in enumerate(made):
            x[r % 3 :: 97] = np.nan
            x[::89] = np.inf
    return made


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
        work = comm.all_gather(out, inp, **options)
    elif case.collective == "broadcast":
        root = numel % size
        shards = inputs(case, numel)
        want, out = shards[root], array(case, numel)
        out[:] = shards[rank]
        work = comm.broadcast(out, root, **options)
    elif case.collective == "all_to_all":
        wholes = inputs(case, size * numel)
        want, out, inp = (
            np.concatenate([x[mine] for x in wholes]),
            array(case, size * numel),
            array(case, size * numel, 5),
        )
        inp[:] = wholes[rank]
        work = comm.all_to_all(out, inp, **options)
    else:
        if case.wire is not None:
            options["wire_dtype"] = "float32"
        scatters = case.collective == "reduce_scatter"
        wholes = inputs(case, size * numel if scatters else numel)
        inp = array(case, len(wholes[0]), 5)
        inp[:] = wholes[rank]
        with np.errstate(all="ignore"):
            want = reduction([x[mine] if scatters else x for x in wholes], case.op, comm.nodes, case.wire)
        if scatters:
            out = inp[mine] if case.view == "in place" else array(case, numel, 7)
            work = comm.reduce_scatter(out, inp, case.op, **options)
        else:
            out = inp
            work = comm.all_reduce(out, case.op, **options)
    if work is not None:
        work.wait()
    if not (same_bits if case.op == "sum" else same_numbers)(out, want):
        failures.append(f"rank {rank}, {window or 'default'} window: {case}")


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
