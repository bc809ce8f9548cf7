"""A rank that ends with calls in flight: by close(), by leaving, after a fork."""

from __future__ import annotations

import os
import sys

import numpy as np
import places

import hdma

HOW, N = sys.argv[1], 50_021
places.start()
comm = hdma.init()
rank, size = comm.rank, comm.size
out, inp = places.put(np.zeros(size * N, np.float32)), places.put(np.full(N, rank, np.float32))
comm.all_gather(out, inp)
if HOW == "fork":
    if (child := os.fork()) == 0:
        for use in (lambda: comm.all_gather(out, inp), lambda: comm.barrier()):
            try:
                use()
            except hdma.Error:
                continue
            os._exit(1)
        comm.close()
        sys.exit(0)  # Not _exit: what runs at exit must not touch the parent's GPU.
    assert os.waitpid(child, 0)[1] == 0
places.sleep(20_000 if rank else 0)
works = [comm.all_gather(out, inp, async_op=True) for _ in range(20)]
if HOW == "leave":
    print("left")
    sys.exit(0)
comm.close()
assert all(work.done() and work.exception() is None for work in works)
works[-1].wait()
got = places.numpy(out, np.float32).reshape(size, N)
assert (got == np.arange(size)[:, None]).all()
try:
    comm.all_gather(out, inp)
except hdma.Error as error:
    assert "closed" in str(error)
# Another communicator on the same GPU.
if HOW == "close":
    again = hdma.init()
    assert again is not comm
    places.fill(out, 0)
    again.all_gather(out, inp)
    got = places.numpy(out, np.float32).reshape(size, N)
    assert (got == np.arange(size)[:, None]).all()
