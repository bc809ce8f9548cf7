"""A rank that a timer signal interrupts every millisecond, without SA_RESTART: in start-up, calls, waits and close."""

from __future__ import annotations

import signal
import time

import numpy as np

count = 0


def tick(*_: object) -> None:
    global count
    count += 1


signal.signal(signal.SIGALRM, tick)
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

import hdma  # noqa: E402

comm = hdma.init()
size = comm.size
x, whole = np.full(100_003, comm.rank, np.float32), np.empty(size * 100_003, np.float32)
until = time.monotonic() + 1.0
calls = np.zeros(1)
while calls[0] < size:
    comm.all_gather(whole, x)
    assert (whole.reshape(size, -1) == np.arange(size, dtype=np.float32)[:, None]).all()
    comm.reduce_scatter(x, whole)
    assert (x == comm.rank * size).all()
    x[:] = comm.rank
    work = comm.all_reduce(np.ones(1000), async_op=True)
    work.wait()
    call = comm.start_all_gather(whole, x)
    for pair in call.order:
        call.wait(*pair)
    call.finish()
    comm.barrier()
    calls[0] = time.monotonic() > until
    comm.all_reduce(calls)
comm.group(range(size)).close()
comm.close()
signal.setitimer(signal.ITIMER_REAL, 0)
assert count > 100, count
