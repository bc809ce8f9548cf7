"""A rank that compares every reduction of every dtype with numpy, in the documented order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from reference import same_bits, values

import hdma

FLOATS: list[Any] = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
INTEGERS: list[Any] = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_]
OPS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
comm = hdma.init()
rank, size = comm.rank, comm.size


def inputs_of(r: int, numel: int, dtype: Any) -> np.ndarray:
    x = values(r, numel, np.float32)
    if dtype in FLOATS:
        x[r % 3 :: 97] = np.nan
        x[::89] = np.inf
        return x.astype(dtype)
    return (x.view(np.uint32) >> np.uint32(7)).astype(dtype)


def reference(op: str, shards: list[np.ndarray]) -> np.ndarray:
    """Within the node by local rank, rounded to the dtype, then by node."""
    dtype = shards[0].dtype
    wide: Any = np.float32 if dtype in (np.float16, ml_dtypes.bfloat16) else dtype.type
    combine = functools.partial(functools.reduce, OPS[op])
    local = comm.local_size
    nodes = [combine([x.astype(wide) for x in shards[n * local : (n + 1) * local]]) for n in range(comm.nodes)]
    if comm.nodes > 1:
        nodes = [x.astype(dtype).astype(wide) for x in nodes]
    total = combine(nodes)
    return (total / wide(size) if op == "avg" else total).astype(dtype)


with np.errstate(all="ignore"):
    for dtype in FLOATS + INTEGERS:
        for op in OPS:
            if op == "avg" and dtype in INTEGERS:
                continue
            for numel in (1, 37, 5003):
                whole = inputs_of(rank, size * numel, dtype)
                out = np.zeros(numel, dtype)
                comm.reduce_scatter(out, whole, op=op)
                mine = [inputs_of(r, size * numel, dtype)[rank * numel : (rank + 1) * numel] for r in range(size)]
                want = reference(op, mine)
                if dtype in FLOATS:
                    nan = np.isnan(want.astype(np.float64))
                    assert (np.isnan(out.astype(np.float64)) == nan).all(), (np.dtype(dtype).name, op, numel)
                    out[nan] = want[nan] = 0
                assert same_bits(out, want), (np.dtype(dtype).name, op, numel)
comm.close()
