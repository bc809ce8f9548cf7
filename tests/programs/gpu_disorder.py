"""Two ranks that issue the calls of two communicators in different orders: an error on both that says so."""

from __future__ import annotations

import sys

import numpy as np
import places

import hdma

N = 1000
places.start()
world = hdma.init()
rank, size = world.rank, world.size
groups = [world.group(range(size)), world.group(range(size))]
out, inp = places.put(np.zeros(size * N, np.float32)), places.put(np.full(N, rank, np.float32))
for comm in groups:
    comm.all_gather(out, inp)
places.synchronize()
world.barrier()
first, second = groups if rank else groups[::-1]
try:
    for comm in (first, second):
        comm.all_gather(out, inp)
    places.synchronize()
    for comm in (first, second):
        comm.all_gather(out, inp)
except hdma.Error as error:
    assert "in the same order" in str(error) or "rank" in str(error), error
    print(error)
else:
    sys.exit("no error")
for comm in groups:
    try:
        comm.close()
    except hdma.Error:
        pass
world.barrier()
places.fill(out, 0)
places.synchronize()
