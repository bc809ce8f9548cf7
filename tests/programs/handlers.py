"""A rank whose signal handlers use the communicator: they get an answer or an error, and nothing stands still."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

import hdma

comm = hdma.init()
x, big = np.ones(1 << 16, np.float32), np.ones(comm.size << 16, np.float32)
seen: dict[str, int] = {}
action: Callable[[hdma.Communicator], object] = hdma.Communicator.barrier
target = comm


def handler(signum: int, frame: FrameType | None) -> None:
    try:
        action(target)
        seen["done"] = seen.get("done", 0) + 1
    except hdma.Error as error:
        seen[type(error).__name__] = seen.get(type(error).__name__, 0) + 1
        last[0] = error


last: list[Exception | None] = [None]
signal.signal(signal.SIGALRM, handler)


def with_handler(use: Callable[[hdma.Communicator], object], wait: Callable[[hdma.Communicator], object]) -> None:
    """The first rank's handler uses the communicator while it waits for the others, who are late."""
    global action, target
    action, target = use, comm.group(range(comm.size))
    seen.clear()
    target.barrier()
    if comm.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        wait(target)
        signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        time.sleep(0.45)
        wait(target)


def gather(group: hdma.Communicator) -> None:
    group.all_gather(big, x)


def later(group: hdma.Communicator) -> None:
    work = group.all_gather(big, x, async_op=True)
    work.wait()


def started(group: hdma.Communicator) -> None:
    call = group.start_all_gather(big, x)
    for pair in call.order:
        call.wait(*pair)
    call.finish()


for wait in (gather, hdma.Communicator.barrier):
    # The call that was interrupted goes on.
    for use in (hdma.Communicator.barrier, gather, later, hdma.Communicator.close):
        with_handler(use, wait)
        if comm.rank == 0:
            assert seen == {"UsageError": 1} and "from a signal handler" in str(last[0]), (wait, use, seen, last)
        target.barrier()
        target.close()
for wait in (later, started):
    # Nothing holds up a close while the worker walks: it waits for the call like any other close.
    with_handler(hdma.Communicator.close, wait)
    assert comm.rank != 0 or seen == {"done": 1}, seen
    target.close()
    # A handler that interrupts the wait for an asynchronous call may make the next call, if all ranks do.
    with_handler(hdma.Communicator.barrier, wait)
    if comm.rank != 0:
        target.barrier()
    assert comm.rank != 0 or seen == {"done": 1}, seen
    target.close()
# A handler that closes while its own thread does.
with_handler(hdma.Communicator.close, hdma.Communicator.close)
assert target.closed
comm.barrier()
comm.close()
comm.close()
sys.exit()
