"""Ranks of which one fails at a phase of start-up, once or in turn at all; the others tell what they got, and how soon.

start.py kill PHASE: it dies there. start.py retry: it raises at each phase in turn, all ranks try again in the same
processes, and the last start works. The others must fail soon, with the reason, and be left with what they had.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hdma
from hdma import _core, connect, handshake, launch
from hdma.rendezvous import board

how, phases = sys.argv[1], sys.argv[2:]
failures = 0
me = launch.find()
rank, size = me.rank, me.size
victim = size - 1
# What is about to be called when the victim fails.
PLACES: dict[str, tuple[Any, str]] = {
    "joined": (connect, "discover"),
    "greeted": (connect, "connect"),
    "listening": (handshake.Switchboard, "connect"),
    "linked": (connect, "_swap_memory"),
    "with memory": (_core, "Engine"),
    "ready": (board.Board, "watch"),
}


def fail_at(phase: str, action: Callable[[], None]) -> Callable[[], None]:
    holder, name = PLACES[phase]
    before = getattr(holder, name)

    def replacement(*args: Any, **more: Any) -> Any:
        if phase == "joined":
            time.sleep(0.3)  # The others see that it has joined.
        if phase == "with memory" and action is refuse:
            return before(**(more | {"window_nbytes": 1 << 60}))
        action()

    setattr(holder, name, replacement)
    return lambda: setattr(holder, name, before)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise OSError("on purpose")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def attempt(*reasons: str) -> bool:
    """Whether it started. A failure must come soon and say why."""
    started = time.monotonic()
    try:
        hdma.init()
        return True
    except hdma.Error as error:
        took_s = time.monotonic() - started
        print(f"{type(error).__name__} after {took_s:.2f} s: {error}")
        assert f"rank {victim}" in str(error) and any(reason in str(error) for reason in reasons), error
        assert not isinstance(error, hdma.TimeoutError)
        assert took_s < 4.0 or not failures, took_s  # The first may import torch.
    except OSError as error:
        assert rank == victim and str(error) in reasons
    return False


if how == "kill":
    if rank == victim:
        fail_at(phases[0], die)
    sys.exit(attempt("is gone"))
if how == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    whole = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for spare in (2, 3, 5, 7, 9, 12, 14):
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() - 1 + spare, whole))
        if attempt("too many open files", "Too many open files"):
            break
        failures += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (whole, whole))
    hdma.init().barrier()
    sys.exit(failures < 3)
before = 0
for phase in PLACES:
    undo = fail_at(phase, refuse) if rank == victim else lambda: None
    # Of two failures of the victim in a row the others need not have seen the first: they start with its next attempt.
    if attempt("on purpose", "cannot map the window"):
        assert rank != victim
        break
    undo()
    before = before or descriptors()  # What MPI and torch keep, they have opened by now.
    failures += 1
    assert descriptors() <= before, (phase, os.listdir("/proc/self/fd"))
comm = hdma.init()
assert failures >= 4, failures
x = np.full(3, 1.0)
comm.all_reduce(x)
assert (x == size).all()
comm.close()
assert descriptors() <= before, os.listdir("/proc/self/fd")
