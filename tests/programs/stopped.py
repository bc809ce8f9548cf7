"""Ranks of which one is stopped for a while (SIGSTOP): every call, wait and close of the others ends at the time-out.

Each way of calling has a communicator and a thread of its own, so that one stop serves all. Whoever was stopped fails
cleanly once it goes on; a communicator that nobody used meanwhile works on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import hdma

STOPPED_S = float(sys.argv[1])
# Copies of the tensors come before the wait, by twelve threads on what cores there are.
LATE_S = 3.0
comm = hdma.init()
rank, size, victim = comm.rank, comm.size, comm.size - 1
timeout_s = float(os.environ["HDMA_TIMEOUT_S"])
big = np.ones(size << 20, np.float32)


def call(group: hdma.Communicator) -> None:
    group.all_gather(big.copy(), np.ones(1 << 20, np.float32))


def asynchronous(group: hdma.Communicator) -> None:
    group.reduce_scatter(np.ones(1 << 20, np.float32), big.copy(), async_op=True).wait()


def shards(group: hdma.Communicator) -> None:
    started = group.start_all_gather(big.copy(), np.ones(1 << 20, np.float32))
    for pair in started.order:
        started.wait(*pair)


def close(group: hdma.Communicator) -> None:
    group.all_reduce(big.copy(), async_op=True)
    group.close()


def one(ways: Callable[[hdma.Communicator], None], group: hdma.Communicator) -> None:
    started = time.monotonic()
    try:
        ways(group)
        problems.append(f"{ways.__name__}: no error")
    except hdma.Error as error:
        took_s = time.monotonic() - started
        print(f"{ways.__name__}: {type(error).__name__} after {took_s:.2f} s: {error}")
        if rank != victim and not (isinstance(error, TimeoutError) and timeout_s - 0.1 < took_s < timeout_s + LATE_S):
            problems.append(f"{ways.__name__}: {type(error).__name__} after {took_s:.2f} s: {error}")
        if rank == victim and took_s > 2.0:
            problems.append(f"{ways.__name__}: {took_s:.2f} s after it went on")
    started = time.monotonic()
    group.close()
    if time.monotonic() - started > 1.0:
        problems.append(f"{ways.__name__}: closing a broken communicator took {time.monotonic() - started:.2f} s")


problems: list[str] = []
ways = [call, hdma.Communicator.barrier, asynchronous, shards, close]
groups = [comm.group(range(size)) for _ in ways]
for group in groups:
    group.barrier()
comm.barrier()
if rank == victim:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {STOPPED_S}; kill -CONT {pid}"]).wait()
else:
    time.sleep(0.5)
threads = [threading.Thread(target=one, args=pair) for pair in zip(ways, groups)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not problems, problems
comm.barrier()
comm.close()
