"""A rank that compares stats() with the least that must cross, and with what the kernel counted."""

from __future__ import annotations

import numpy as np

import hdma

comm = hdma.init()
size, other_nodes = comm.size, comm.nodes - 1
for numel in (0, 1, 1 << 10, 1 << 18, 3 << 20):
    x, big = np.ones(numel, np.float32), np.ones(size * numel, np.float32)
    y, half = np.ones(numel, np.float16), np.ones(size * numel, np.float16)
    calls = (
        (lambda: comm.all_gather(big, x), 4 * numel),
        (lambda: comm.reduce_scatter(x, big), 4 * numel),
        (lambda: comm.reduce_scatter(y, half), 2 * numel),
        (lambda: comm.reduce_scatter(y, half, wire_dtype="float32"), 4 * numel),
    )
    for call, nbytes in calls:
        comm.barrier()
        before = comm.stats()
        call()
        comm.barrier()  # After it every put of the call has been posted, and all its bytes given to the kernel.
        after = comm.stats()
        put = after["put_nbytes"] - before["put_nbytes"]
        assert put == other_nodes * nbytes, (numel, put, other_nodes * nbytes)
        sent = after["wire_sent_nbytes"] - before["wire_sent_nbytes"]
        if nbytes >= 1 << 20:
            assert put <= sent <= 1.02 * put, (numel, put, sent)
        assert other_nodes or sent == 0
comm.close()
