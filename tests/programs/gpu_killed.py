"""Ranks of which the last is killed while the others' streams wait for it: they get an error, and keep the GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import places

import hdma

N = int(os.environ.get("TEST_NUMEL", 300_007))
places.start()
comm = hdma.init()
rank, size = comm.rank, comm.size
out, inp = places.put(np.zeros(size * N, np.float32)), places.put(np.full(N, rank + 1, np.float32))
part = places.put(np.zeros(N, np.float32))
comm.all_gather(out, inp)
comm.reduce_scatter(part, out)
assert (places.numpy(part, np.float32) == size * (rank + 1)).all()
comm.barrier()
if rank == size - 1:
    if sys.argv[1:] == ["stopped"]:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
works = []
try:
    for _ in range(10):
        works.append(comm.all_gather(out, inp, async_op=True))
        comm.reduce_scatter(part, out)
    for work in works:
        work.wait()
    places.synchronize()
    comm.barrier()
    sys.exit("no error")
except hdma.Error as error:
    assert f"rank {size - 1}" in str(error), error
places.synchronize()  # The streams were released.
took_s = time.monotonic() - began
assert comm.closed and all(work.done() for work in works)
assert any(work.exception() for work in works) or not works
for again in (lambda: comm.all_gather(out, inp), lambda: [work.wait() for work in works] or comm.barrier()):
    try:
        again()
    except hdma.Error:
        continue
    sys.exit("no error of a later call")
comm.close()
places.write(inp, np.full(N, 7, np.float32))
places.fill(part, 0)
assert (places.numpy(inp, np.float32) == 7).all() and (places.numpy(part, np.float32) == 0).all()
print(f"rank {rank}: an error after {took_s:.2f} s, and the GPU works")
