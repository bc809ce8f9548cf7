"""Thousands of calls, and a thousand groups made and closed: descriptors, threads and memory stay what they were."""

from __future__ import annotations

import os
import sys

import numpy as np

import hdma

calls, groups = int(sys.argv[1]), int(sys.argv[2])
comm = hdma.init()
x, big = np.ones(1000, np.float32), np.ones(1000 * comm.size, np.float32)


def use(group: hdma.Communicator, times: int) -> None:
    for i in range(times):
        group.all_gather(big, x)
        group.reduce_scatter(x, big)
        x[:] = 1
        group.all_reduce(big[: 1 + i % 1000])
        group.barrier()
        work = group.all_gather(big, x, async_op=True)
        if i % 2:
            work.wait()


def held() -> tuple[int, int, int]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * os.sysconf("SC_PAGE_SIZE")


use(comm, calls // 10)
for _ in range(groups // 10):
    with comm.group(range(comm.size)) as group:
        group.barrier()
before = held()
use(comm, calls // 5)
for i in range(groups):
    with comm.group(range(comm.size)) as group:
        if i % 10 == 0:
            group.barrier()
after = held()
comm.barrier()  # The end of a peer's link is one descriptor less.
print(before, after)
assert after[:2] == before[:2], (before, after)
assert after[2] - before[2] < 8 << 20, (before, after)
comm.close()
