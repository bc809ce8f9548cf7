"""A rank that is 120 calls ahead of the other, as hosts of GPUs are, which then makes another call than it did."""

from __future__ import annotations

import sys
import time

import numpy as np
import places

import hdma

AHEAD, DIFFERENT = 120, 10
places.start()
comm = hdma.init()
out, inp = places.put(np.zeros(4 * comm.size, np.float32)), places.put(np.zeros(4, np.float32))
comm.all_gather(out, inp)
places.synchronize()
try:
    if comm.rank == 0:
        for _ in range(AHEAD):
            comm.all_gather(out, inp)
    else:
        time.sleep(1)
        for call in range(DIFFERENT):
            numel = 4 if call < DIFFERENT - 1 else 2
            comm.all_gather(places.part(out, slice(0, numel * comm.size)), places.part(inp, slice(0, numel)))
    until = time.monotonic() + 5
    while not comm.closed and time.monotonic() < until:
        time.sleep(0.01)
    comm.all_gather(out, inp)
except hdma.Error as error:
    assert f"disagree on call {DIFFERENT + 1} " in str(error), error
else:
    sys.exit("no error")
places.synchronize()
