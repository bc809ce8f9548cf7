"""Ranks that end in every way: closing in any order, twice, from two threads, late; or without closing at all."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np

import hdma

how = sys.argv[1]
comm = hdma.init()
rank, size = comm.rank, comm.size
x, big = np.ones(1 << 18, np.float32), np.ones(size << 18, np.float32)
comm.all_gather(big, x)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("hdma-" in line for line in file)


if how == "close":
    # A second call needs the credits of the first: when all are through it, every connection is there.
    comm.all_gather(big, x)
    comm.barrier()
    before = descriptors()
    for order in (1, -1):
        group = comm.group(range(size))
        works = [group.all_gather(big, x, async_op=True) for _ in range(3)]
        time.sleep(0.2 * (rank if order == 1 else size - 1 - rank))  # The last is late.
        threads = [threading.Thread(target=group.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.close()
        assert group.closed and descriptors() == before
        # What was begun before is over, and works outlive the engine; so do the counts.
        assert all(work.done() and work.wait() for work in works)
        assert group.stats()["calls"] == 3
        for call in (group.barrier, lambda: group.all_gather(big, x, async_op=True), lambda: group.group([rank])):
            try:
                call()
                sys.exit("closed, but went on")
            except hdma.Error as error:
                assert "closed" in str(error), error
    comm.barrier()
    comm.close()
    assert mappings() == 0
elif how == "late":
    # Less than the time-out is fine, again and again.
    for _ in range(3):
        if rank == size - 1:
            time.sleep(0.7)
        comm.all_gather(big, x)
    if rank == 0:
        time.sleep(0.7)
    work = comm.all_gather(big, x, async_op=True)
    work.wait()
elif how in ("sys.exit", "os._exit"):
    if rank == size - 1:
        if how == "os._exit":
            threading.Timer(0.3, os._exit, (5,)).start()
        for i in range(10_000):
            work = comm.all_gather(big, x, async_op=True)
            if i % 4 == 0:
                work.wait()
            if how == "sys.exit" and i == 50:
                sys.exit(5)
    started = time.monotonic()
    try:
        while True:
            comm.all_gather(big, x)
            started = time.monotonic()
    except hdma.Error as error:
        assert f"rank {size - 1}" in str(error), error
        assert time.monotonic() - started < 3.0
elif how == "exit with calls in flight":
    for _ in range(20):
        comm.all_gather(big, x, async_op=True)
