"""What the collectives must give, computed with numpy in the documented order."""

from __future__ import annotations

from typing import Any

import numpy as np


def values(rank: int, numel: int, dtype: Any, seed: int = 0, start: int = 0) -> np.ndarray:
    """Elements `start` to `start + numel` of the input of a rank: any rank can compute any other's.

    Mixed signs and sizes, so that sums round differently in another order.
    """
    x = np.arange(start, start + numel, dtype=np.uint32) * np.uint32(2654435761)
    x ^= np.uint32((rank * 40503 + seed * 7919) & 0xFFFFFFFF)
    x *= np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    # A float32 of any sign and mantissa whose exponent lies between -6 and 1.
    bits = (x & np.uint32(0x83FFFFFF)) + np.uint32((127 - 6) << 23)
    return bits.view(np.float32).astype(dtype)


def reduce_scatter(inputs: list[np.ndarray], nodes: int, local_size: int, wire: Any) -> np.ndarray:
    """The sum over ranks: within the node by rank, rounded to the wire dtype, then by node, rounded to the dtype."""
    total: Any = None
    for node in range(nodes):
        part: Any = None
        for local_rank in range(local_size):
            x = inputs[node * local_size + local_rank].astype(np.float32)
            part = x if part is None else part + x
        if nodes > 1:
            part = part.astype(wire).astype(np.float32)
        total = part if total is None else total + part
    return total.astype(inputs[0].dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))


def misaligned(numel: int, dtype: Any, offset: int) -> np.ndarray:
    """An array of zeros that begins `offset` bytes past an aligned address."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(numel * itemsize + 64 + offset, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + numel * itemsize].view(dtype)
