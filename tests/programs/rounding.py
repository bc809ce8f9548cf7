"""A rank of 2x2 that shows where ReduceScatter rounds, and that skew changes no bit."""

from __future__ import annotations

import random
import time

import ml_dtypes
import numpy as np
import places
from reference import values

import hdma

places.start()
comm = hdma.init()
assert (comm.nodes, comm.local_size) == (2, 2)
mine = [1.0, 2.0**-8, 2.0**-9, 0.0][comm.rank]
inp = places.put(np.full(4, mine, ml_dtypes.bfloat16))
out = places.put(np.zeros(1, ml_dtypes.bfloat16))
for wire, want in ((None, 1.0), ("float32", 1.0 + 2.0**-7), (np.float32, 1.0 + 2.0**-7)):
    comm.reduce_scatter(out, inp, wire_dtype=wire)
    assert float(places.numpy(out, ml_dtypes.bfloat16)[0]) == want, (wire, want)

inp = places.put(values(comm.rank, 4 * 20011, ml_dtypes.bfloat16))
first = None
for _ in range(50):
    time.sleep(random.random() * 0.01)
    out = places.put(np.zeros(20011, ml_dtypes.bfloat16))
    comm.reduce_scatter(out, inp)
    got = places.numpy(out, ml_dtypes.bfloat16).tobytes()
    first = got if first is None else first
    assert got == first
comm.close()
