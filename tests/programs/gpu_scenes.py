"""What goes wrong on a GPU, one scene a run (the first argument). Ranks print what they saw; the tests look at it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import places

import hdma
import hdma.gpu

SCENE = sys.argv[1]
N = 50_021
places.start()
stub = places.stub
comm = hdma.init()
rank, size = comm.rank, comm.size


def arrays(fill: float = 0, n: int = N) -> tuple[Any, Any]:
    return places.put(np.zeros(size * n, np.float32)), places.put(np.full(n, fill, np.float32))


def check(out: Any, want: Any) -> None:
    assert (places.numpy(out, np.float32).reshape(len(want), -1) == np.array(want)[:, None]).all()


def error_of(what: Callable[[], object]) -> str:
    try:
        what()
    except hdma.Error as error:
        return f"{type(error).__name__}: {error}"
    sys.exit(f"rank {rank}: no error in {SCENE}")


def left() -> dict[str, int]:
    gc.collect()
    live = {what: stub.live(what) for what in ("allocated", "imported", "registered")}
    threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return live | {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(name.startswith("hdma") for name in threads),
    }


def hung() -> None:
    """The caller's stream comes to the call long after the communicator was closed."""
    out, inp = arrays(rank)
    comm.all_gather(out, inp)
    comm.barrier()
    if rank == 0:
        places.sleep(9_000_000)
    began = time.monotonic()
    work = comm.all_gather(out, inp, async_op=True)
    error = error_of(comm.close)
    assert time.monotonic() - began < 8.5, "close() waited for the GPU"
    assert "did not execute" in error or "waited" in error, error
    del work, out, inp
    gc.collect()
    places.synchronize()
    time.sleep(0.5)
    os.environ["HDMA_TIMEOUT_S"] = "20"
    again = hdma.init()
    out, inp = arrays(rank)
    again.all_gather(out, inp)
    check(out, range(size))
    again.close()


def suspended() -> None:
    """A started call that its caller does not go on with, whose peer is gone: the lanes are free for others."""
    group, alone = comm.group(range(size)), comm.group([rank])
    whole, part = arrays(rank)
    for each in (comm, group):
        each.all_gather(whole, part)
    alone.all_gather(part, part)
    comm.barrier()
    if rank == size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    started = group.start_reduce_scatter(part, whole)
    for pair in started.order[:-1]:
        started.push(*pair)
    x, y = arrays(3)[1], arrays(0)[1]
    alone.all_gather(y, x)
    check(y, [3])
    error = error_of(lambda: started.push(*started.order[-1]))
    assert f"rank {size - 1}" in error, error
    for each in (alone, group, comm):
        each.close()


def unfinished() -> None:
    """A started call whose peer never comes, before another communicator's call: the time-out names the right one."""
    group, other = comm.group(range(size)), comm.group(range(size))
    whole, part = arrays(rank)
    for each in (group, other):
        each.all_gather(whole, part)
    comm.barrier()
    if rank:
        other.all_gather(whole, part)
        time.sleep(6)
        error = error_of(group.barrier)
        assert "start_reduce_scatter" in error, error
        check(whole, range(size))
        return
    started = group.start_reduce_scatter(part, whole)
    for pair in started.order[:-1]:
        started.push(*pair)
    work = other.all_gather(whole, part, async_op=True)
    time.sleep(5)
    error = error_of(lambda: started.push(*started.order[-1]))
    assert "TimeoutError" in error and "start_reduce_scatter" in error, error
    assert work.done() and work.exception() is None, work.exception()


def forked() -> None:
    """A child that lets go of what it has of a GPU of its parent's."""
    made = hdma.empty(N, np.float32, device=places.device())
    out, inp = arrays(rank)
    work = comm.all_gather(out, inp, async_op=True)
    work.wait()
    comm.close()
    if (child := os.fork()) == 0:
        del made, work
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    places.fill(places.wrap(made), 0)


def many() -> None:
    """Communicators that come and go leave nothing."""
    out, inp = arrays(rank)
    comm.all_gather(out, inp)
    seen = []
    for turn in range(50):
        with comm.group(range(size)[:: -1 if turn % 2 else 1]) as group:
            group.all_gather(out, inp)
            made = hdma.empty(100, np.float32, device=places.device(), comm=group)
            group.all_gather(out, inp, async_op=True)
            del made
        comm.barrier()
        seen.append(left())
    # A mate that closes later has this rank's memory mapped for a little longer.
    for what in seen[0]:
        early, late = (max(each[what] for each in part) for part in (seen[:10], seen[-10:]))
        assert late <= early, (what, early, late)


def second() -> None:
    """What fails twice on one rank as the GPU is first used: an error on all, nothing is left, and then it works."""
    step, times = sys.argv[2], [2 if rank == size - 1 else 0]

    class Failing:
        """A module of which one function fails, when it is through."""

        def __init__(self, module: Any) -> None:
            self.module = module

        def __getattr__(self, name: str) -> Any:
            real = getattr(self.module, name)

            def fails(*args: Any, **more: Any) -> Any:
                real(*args, **more)
                times[0] -= 1
                raise hdma.DeviceError(f"there is no {step}")

            return fails if name == step and times[0] else real

    for module in ("_core", "kernels", "connect"):
        setattr(hdma.gpu, module, Failing(getattr(hdma.gpu, module)))
    out, inp = arrays(rank)
    counts = []
    for _ in range(2):
        error = error_of(lambda: comm.all_gather(out, inp))
        assert f"there is no {step}" in error, error
        time.sleep(1.5)
        counts.append(left())
    # A window that a mate had mapped for longer goes with the next one.
    assert counts[0] == counts[1] and counts[1]["registered"] == 0, counts
    host = np.ones(10)
    comm.all_reduce(host)
    assert (host == size).all() and not comm.closed
    comm.all_gather(out, inp)
    check(out, range(size))
    comm.close()


def no_room() -> None:
    """Symmetric memory that one rank cannot have, or that they ask for differently: the next is the same for all."""
    out, inp = arrays(rank)
    comm.all_gather(out, inp)
    before = left()
    for _ in range(3):
        error = error_of(lambda: hdma.empty(N + (rank == size - 1), np.float32, device=places.device()))
        assert "all must have the same" in error, error
    error = error_of(lambda: hdma.empty((1 << 40, 1 << 30), np.float32, device=places.device()))
    assert "more than any GPU has" in error, error
    # On one rank alone.
    numel = 1 << 20 if rank < size - 1 else 1 << 40
    error = error_of(lambda: hdma.empty(numel, np.float32, device=places.device()))
    assert "bytes of GPU memory needed" in error, error
    comm.barrier()
    # What mates may still have mapped stays allocated until close().
    for what in ("imported", "registered", "threads"):
        assert left()[what] == before[what], (left(), before)
    made = places.wrap(hdma.empty(N, np.float32, device=places.device()))
    places.write(made, np.full(N, rank, np.float32))
    comm.all_gather(out, made)
    check(out, range(size))
    nothing = hdma.empty((0, 3), np.float32, device=places.device())
    comm.all_gather(hdma.empty(0, np.float32, device=places.device()), nothing)
    comm.close()


def mismatch() -> None:
    """Ranks that make different calls."""
    how = sys.argv[2]
    out, inp = arrays(rank)
    comm.all_gather(out, inp)
    host = np.zeros(N, np.float32)
    first = rank == 0
    whole = np.zeros(size * N, np.float32)

    def act() -> None:
        if how == "place":
            comm.all_gather(out, inp) if first else comm.all_gather(whole, host)
        elif how == "size":
            n = N if first else N - 1
            comm.all_gather(places.part(out, slice(0, size * n)), places.part(inp, slice(0, n)))
        else:
            comm.all_gather(out, inp) if first else comm.reduce_scatter(inp, out)
            comm.reduce_scatter(inp, out) if first else comm.all_gather(out, inp)
        for _ in range(20):
            time.sleep(0.1)
            comm.barrier()

    began = time.monotonic()
    error = error_of(act)
    assert time.monotonic() - began < 10 and "disagree" in error, error
    print(error)
    comm.close()


def interrupted() -> None:
    """Ctrl-C in a wait for a peer that does not come; on the others too it ends in an error."""
    out, inp = arrays(rank)
    comm.all_gather(out, inp)
    comm.barrier()
    if rank:
        time.sleep(1.5)
        print(error_of(lambda: [comm.all_gather(out, inp), places.synchronize(), comm.barrier()]))
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell has its background jobs ignore it.
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        comm.all_gather(out, inp)
        if sys.argv[2] == "close":
            comm.close()
        comm.barrier()
    except KeyboardInterrupt:
        pass
    else:
        sys.exit("no KeyboardInterrupt")
    began = time.monotonic()
    try:
        comm.close()
    except hdma.Error:
        pass
    assert time.monotonic() - began < 2 and comm.closed
    assert left()["registered"] == 0, left()


def aborted() -> None:
    """abort() from another thread while this one waits."""
    out, inp = arrays(rank)
    comm.all_gather(out, inp)
    if rank == 0:
        threading.Timer(0.5, lambda: comm.abort("enough")).start()
        error = error_of(lambda: [comm.all_gather(out, inp), places.synchronize(), comm.barrier()])
    else:
        time.sleep(1)
        error = error_of(lambda: [comm.all_gather(out, inp), comm.barrier()])
    assert "enough" in error, error
    places.synchronize()
    comm.close()
    assert left()["registered"] == 0, left()


globals()[SCENE]()
print(f"rank {rank}: {SCENE} is right")
