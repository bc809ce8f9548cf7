"""A rank that forks in every way, also with calls in flight: children are told at once, the parent goes on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np

import hdma

comm = hdma.init()
x, big = np.ones(1 << 20, np.float32), np.ones(comm.size << 20, np.float32)
comm.barrier()


def use() -> int:
    """What a child gets who uses the parent's communicator; 0 if all is as it should be."""
    started = time.monotonic()
    calls = [comm.barrier, lambda: comm.all_gather(big, x), lambda: comm.all_gather(big, x, async_op=True)]
    for call in (*calls, lambda: comm.group([comm.rank])):
        try:
            call()
            return 1
        except hdma.Error as error:
            if "forked" not in str(error):
                return 2
    comm.close()
    return 3 if time.monotonic() - started > 1.0 or not comm.closed else 0


def child(code: int) -> None:
    sys.exit(code or use())


def forked(action: object) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(action())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


for _ in range(2):
    works = [comm.all_gather(big, x, async_op=True) for _ in range(4)]
    if comm.rank == 0:
        assert forked(use) == 0
        assert forked(lambda: 7) == 7
        pid = os.fork()
        if pid == 0:
            sys.exit(use() or 8)  # Runs what runs at exit, which must touch nothing of the parent's.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
        started = time.monotonic()
        assert subprocess.run([sys.executable, "-c", "pass"], timeout=20).returncode == 0
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=child, args=(code,)) for code in (0, 9)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 9]
    for work in works:
        work.wait()
    comm.reduce_scatter(x, big)
    x[:] = 1
comm.close()
