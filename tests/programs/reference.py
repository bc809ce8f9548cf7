"""What the collectives must give, computed with numpy in the documented order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

FLOATS: list[Any] = [
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
INTEGERS: list[Any] = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_]
OPS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def values(rank: int, numel: int, dtype: Any, seed: int = 0, start: int = 0) -> np.ndarray:
    """Elements `start` to `start + numel` of the input of a rank: any rank can compute any other's.

    Mixed signs and sizes, so that sums round differently in another order.
    """
    x = np.arange(start, start + numel, dtype=np.uint32) * np.uint32(2654435761)
    x ^= np.uint32((rank * 40503 + seed * 7919) & 0xFFFFFFFF)
    x *= np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    if dtype not in FLOATS and not np.issubdtype(dtype, np.complexfloating):
        return (x >> np.uint32(7)).astype(dtype)
    # A float32 of any sign and mantissa whose exponent lies between -6 and 1.
    bits = (x & np.uint32(0x83FFFFFF)) + np.uint32((127 - 6) << 23)
    return bits.view(np.float32).astype(dtype)


def reduction(inputs: list[np.ndarray], op: str, nodes: int, wire: Any = None) -> np.ndarray:
    """Within the node by local rank, rounded to the wire dtype, then by node, rounded to the dtype."""
    dtype, local = inputs[0].dtype, len(inputs) // nodes
    wide: Any = np.float32 if dtype in FLOATS and dtype.itemsize < 4 else dtype.type
    combine = functools.partial(functools.reduce, OPS[op])
    sums = [combine([x.astype(wide) for x in inputs[n * local : (n + 1) * local]]) for n in range(nodes)]
    if nodes > 1:
        sums = [x.astype(wire or dtype).astype(wide) for x in sums]
    total = combine(sums)
    return np.asarray(total / wide(len(inputs)) if op == "avg" else total).astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits, but that any NaN is as good as another."""
    if a.dtype in FLOATS:
        nan = np.isnan(a.astype(np.float64))
        if not np.array_equal(nan, np.isnan(b.astype(np.float64))):
            return False
        a, b = a[~nan], b[~nan]
    return same_bits(a, b)


def misaligned(numel: int, dtype: Any, offset: int) -> np.ndarray:
    """An array of zeros that begins `offset` bytes past an aligned address."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(numel * itemsize + 64 + offset, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + numel * itemsize].view(dtype)
