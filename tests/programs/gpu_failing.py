"""A driver of which a function fails on the last rank, from some call on (name:code@n): an error that names it, on
all ranks and in bounded time, and what the communicator had is given back."""

from __future__ import annotations

import gc
import os
import sys
import time

import numpy as np
import places

import hdma

if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    os.environ["STUB_FAIL"] = sys.argv[1]  # Read with the driver's first call.
places.start()
N = 50_021
comm = hdma.init()
rank, size = comm.rank, comm.size
out, inp = places.put(np.zeros(size * N, np.float32)), places.put(np.full(N, rank, np.float32))
part = places.put(np.zeros(N, np.float32))
began, works = time.monotonic(), []
try:
    for _ in range(8):
        works.append(comm.all_gather(out, inp, async_op=True))
        comm.reduce_scatter(part, out)
        started = comm.start_reduce_scatter(part, out)
        for pair in started.order:
            started.push(*pair)
        started.finish()
        comm.all_reduce(out)
    for work in works:
        work.wait()
    # The failure comes to who has issued everything by now, too.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not comm.closed:
        time.sleep(0.01)
    comm.barrier()
    sys.exit(f"rank {rank}: no error")
except hdma.Error as error:
    assert "cu" in str(error) or "hip" in str(error), error
    assert f"rank {size - 1}" in str(error) or rank == size - 1, error
    print(f"rank {rank}: {error}")
try:
    comm.close()
except hdma.Error as error:
    print(f"rank {rank}: {error}")
took_s = time.monotonic() - began
assert took_s < 8, f"{took_s} s"
works.clear()
work = started = None
gc.collect()
if rank < size - 1:  # Whose driver is well.
    assert places.stub.live("imported") == 0
    assert places.stub.live("registered") == 0 or places.stub.RUNTIME == "hip"  # Its flags', which stay.
    places.synchronize()
