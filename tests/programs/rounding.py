"""A rank of 2x2 that shows where ReduceScatter rounds, and that skew changes no bit."""

from __future__ import annotations

import random
import time

import ml_dtypes
import numpy as np
from reference import values

import hdma

comm = hdma.init()
assert (comm.nodes, comm.local_size) == (2, 2)
mine = [1.0, 2.0**-8, 2.0**-9, 0.0][comm.rank]
inp = np.full(4, mine, ml_dtypes.bfloat16)
out = np.zeros(1, ml_dtypes.bfloat16)
comm.reduce_scatter(out, inp)
assert float(out[0]) == 1.0, out
comm.reduce_scatter(out, inp, wire_dtype="float32")
assert float(out[0]) == 1.0 + 2.0**-7, out
comm.reduce_scatter(out, inp, wire_dtype=np.float32)
assert float(out[0]) == 1.0 + 2.0**-7, out

inp = values(comm.rank, 4 * 20011, ml_dtypes.bfloat16)
first = None
for _ in range(50):
    time.sleep(random.random() * 0.01)
    out = np.zeros(20011, ml_dtypes.bfloat16)
    comm.reduce_scatter(out, inp)
    first = out.tobytes() if first is None else first
    assert out.tobytes() == first
comm.close()
