"""Ranks of which rank 0 leaves in an unusual way; the others tell what they got, and how soon."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

import hdma

how = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell has its background jobs ignore it.
comm = hdma.init()
comm.barrier()
if comm.rank == 0:
    time.sleep(0.3)  # The others may still be in the barrier.
x, big = np.ones(4, np.float32), np.ones(4 * comm.size, np.float32)


def later(action: object, *args: object) -> None:
    timer = threading.Timer(0.5, action, args)
    timer.daemon = True
    timer.start()


def expect(text: str, within_s: float = 3.0) -> None:
    started = time.monotonic()
    try:
        comm.all_gather(big, x)
        comm.barrier()
        sys.exit("no error")
    except hdma.Error as error:
        assert text in str(error), error
        assert time.monotonic() - started < within_s


def interrupted(call: object) -> None:
    later(os.kill, os.getpid(), signal.SIGINT)
    started = time.monotonic()
    try:
        call()
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        assert time.monotonic() - started < 3.0


if how == "exception":
    if comm.rank == 0:
        raise ValueError("on purpose")
    expect("rank 0 ended the communicator: it ended with ValueError")
elif how == "exception in with":
    if comm.rank == 0:
        try:
            with comm:
                raise KeyError("on purpose")
        except KeyError:
            sys.exit()
    expect("rank 0 ended the communicator: it ended with KeyError")
elif how == "interrupted call":
    if comm.rank == 0:
        interrupted(lambda: comm.all_gather(big, x))
    else:
        time.sleep(1.5)
        expect("rank 0 was interrupted")
elif how == "interrupted behind a call in flight":
    if comm.rank == 0:
        comm.start_reduce_scatter(x, big)
        interrupted(comm.barrier)
        try:
            comm.close()
            sys.exit("no error")
        except hdma.UsageError as error:
            assert "before it had pushed every shard" in str(error), error
    else:
        call = comm.start_reduce_scatter(x, big)
        for pair in call.order:
            call.push(*pair)
        expect("rank 0 closed its communicator in start_reduce_scatter")
elif how == "interrupted close":
    if comm.rank == 0:
        comm.all_gather(big, x, async_op=True)
        interrupted(comm.close)
    else:
        time.sleep(2.0)
        expect("rank 0 was interrupted")
elif how == "closed by another thread":
    if comm.rank == 0:
        later(comm.close)
        expect("rank 0 closed its communicator during all_gather")
    else:
        time.sleep(1.5)
        expect("rank 0 closed its communicator during all_gather")
elif how == "fork":
    if comm.rank == 0:
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
                os._exit(1)
            except hdma.Error as error:
                assert "forked" in str(error), error
            sys.exit(7)  # Runs what runs at exit; it must touch nothing of the parent's.
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for _ in range(3):
        comm.all_gather(big, x)
    comm.close()
elif how == "killed with a child alive":
    if comm.rank == 0:
        if os.fork() == 0:
            time.sleep(4.0)
            os._exit(0)
        later(os.kill, os.getpid(), signal.SIGKILL)
        time.sleep(30)
    expect("is gone", within_s=2.5)
