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
# Copies into windows come before the wait, by the threads of all ranks on what cores there are.
LATE_S = 3.0
timeout_s = float(os.environ["HDMA_TIMEOUT_S"])
# For what comes before and after the stop, on a busy machine.
os.environ["HDMA_TIMEOUT_S"] = "60"
comm = hdma.init()
rank, size, victim = comm.rank, comm.size, comm.size - 1


def call(group: hdma.Communicator, whole: np.ndarray, part: np.ndarray) -> None:
    group.all_gather(whole, part)


def barrier(group: hdma.Communicator, whole: np.ndarray, part: np.ndarray) -> None:
    group.barrier()


def asynchronous(group: hdma.Communicator, whole: np.ndarray, part: np.ndarray) -> None:
    group.reduce_scatter(part, whole, async_op=True).wait()


def shards(group: hdma.Communicator, whole: np.ndarray, part: np.ndarray) -> None:
    started = group.start_all_gather(whole, part)
    for pair in started.order:
        started.wait(*pair)


def close(group: hdma.Communicator, whole: np.ndarray, part: np.ndarray) -> None:
    group.all_reduce(whole, async_op=True)
    group.close()


def one(way: Callable[..., None], group: hdma.Communicator, tensors: list[np.ndarray]) -> None:
    started = time.monotonic()
    try:
        way(group, *tensors)
        problems.append(f"{way.__name__}: no error")
    except hdma.Error as error:
        took_s = time.monotonic() - started
        print(f"{way.__name__}: {type(error).__name__} after {took_s:.2f} s: {error}")
        if rank != victim and not (isinstance(error, TimeoutError) and timeout_s - 0.1 < took_s < timeout_s + LATE_S):
            problems.append(f"{way.__name__}: {type(error).__name__} after {took_s:.2f} s: {error}")
        if rank == victim and took_s > 2.0:
            problems.append(f"{way.__name__}: {took_s:.2f} s after it went on")
    started = time.monotonic()
    group.close()
    if time.monotonic() - started > 1.0:
        problems.append(f"{way.__name__}: closing a broken communicator took {time.monotonic() - started:.2f} s")


problems: list[str] = []
ways = [call, barrier, asynchronous, shards, close]
# Made here, and their pages with them, which may take longer than the victim is stopped.
tensors = [[np.ones(numel, np.float32) for numel in (size << 20, 1 << 20)] for _ in ways]
comm.barrier()
os.environ["HDMA_TIMEOUT_S"] = str(timeout_s)
groups = [comm.group(range(size)) for _ in ways]
for group in groups:
    group.barrier()
comm.barrier()
if rank == victim:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {STOPPED_S}; kill -CONT {pid}"]).wait()
else:
    time.sleep(0.5)
threads = [threading.Thread(target=one, args=pair) for pair in zip(ways, groups, tensors)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not problems, problems
comm.barrier()
comm.close()
