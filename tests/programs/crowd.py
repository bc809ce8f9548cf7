"""One of many ranks: start-up and a few small calls."""

from __future__ import annotations

import numpy as np

import hdma

comm = hdma.init()
x, whole = np.array([comm.rank], np.int32), np.empty(comm.size, np.int32)
for _ in range(3):
    comm.all_gather(whole, x)
    assert whole.tolist() == list(range(comm.size))
    comm.reduce_scatter(x, whole)
    assert x[0] == comm.rank * comm.size
    x[0] = comm.rank
comm.barrier()
comm.close()
