"""A rank that sums every 16-bit pattern with its neighbours': infinities, NaN, subnormal numbers, ties."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import places
from reference import reduction

import hdma

places.start()
comm = hdma.init()
patterns = np.arange(65536, dtype=np.uint16)
with np.errstate(all="ignore"):
    for dtype in (np.float16, ml_dtypes.bfloat16):
        inputs = [np.roll(patterns, r * 257).view(dtype) for r in range(comm.size)]
        whole = [np.tile(x, comm.size) for x in inputs]
        for wire in (dtype, np.float32):
            landed = places.put(np.zeros(65536, dtype))
            comm.reduce_scatter(landed, places.put(whole[comm.rank]), wire_dtype=np.dtype(wire))
            out = places.numpy(landed, dtype)
            want = reduction(inputs, "sum", comm.nodes, wire)
            nan = np.isnan(want.astype(np.float32))
            assert (np.isnan(out.astype(np.float32)) == nan).all(), dtype
            assert (out.view(np.uint16)[~nan] == want.view(np.uint16)[~nan]).all(), dtype
    x = np.array([np.inf, -np.inf, np.nan, 1e-45, 3e38, -0.0], np.float32)
    landed = places.put(np.zeros(6, np.float32))
    comm.reduce_scatter(landed, places.put(np.tile(x, comm.size)))
    out = places.numpy(landed, np.float32)
    want = reduction([x] * comm.size, "sum", comm.nodes)
    assert np.array_equal(out, want, equal_nan=True), (out, want)
comm.close()
