"""Two ranks of the backend that disagree, come late, or are stopped in mid-call; each case is a new group."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import hdma
import hdma.backend

rank, cases = int(os.environ["RANK"]), iter(range(100))
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)


@contextmanager
def group(timeout_s: float = 20.0) -> Iterator[dist.ProcessGroup]:
    """The default group for one case; destroyed at its end, which must be quick."""
    place = dist.PrefixStore(f"case {next(cases)}", store)
    dist.init_process_group("hdma", store=place, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    yield dist.group.WORLD
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.destroy_process_group()
    assert time.monotonic() - started < 2.0


def fails(call: Callable[[], object], *words: str, error: type[Exception] = hdma.Error, within_s: float = 5.0) -> str:
    started = time.monotonic()
    try:
        call()
    except error as problem:
        text = str(problem)
        assert all(word in text for word in words), text
        assert time.monotonic() - started < within_s, time.monotonic() - started
        return text
    raise AssertionError(f"no error on rank {rank}: {words}")


def both(first: Callable[[], object], second: Callable[[], object]) -> None:
    (second if rank else first)()
    dist.barrier()  # Who was through before the other came learns of it here.


def gather(n: int, dtype: torch.dtype = torch.float32, **options: object) -> object:
    return dist.all_gather_single(torch.zeros(2, n, dtype=dtype), torch.zeros(n, dtype=dtype), **options)


# The ranks disagree: an error on both, that names both sides; then the group stays ended.
for first, second, words in (
    (lambda: gather(100), lambda: gather(101), ("400 bytes", "404 bytes")),
    (lambda: gather(100, torch.float16), lambda: gather(100, torch.int16), ("float16", "int16")),
    (lambda: gather(100), lambda: dist.all_reduce(torch.zeros(100)), ("all_gather", "reduce")),
    (
        lambda: dist.all_reduce(torch.zeros(100)),
        lambda: dist.all_reduce(torch.zeros(100), op=dist.ReduceOp.MAX),
        ("sum", "max"),
    ),
    (lambda: gather(100, async_op=True).wait(), lambda: gather(101, async_op=True).wait(), ("400 bytes",)),
):
    with group() as world:
        dist.barrier()
        text = fails(lambda: both(first, second), *words)
        assert fails(dist.barrier, within_s=0.5) and world.get_error() != 0
        future = dist.barrier(async_op=True) if not world._comm.closed else None
        assert future is None
        fails(lambda: gather(1), within_s=0.5)

# A rank is late: the group's time-out rules, also where it comes with the call, and the last operations are shown.
with group(1.0) as world:
    gather(10)
    dist.barrier()
    if rank == 0:
        text = fails(lambda: gather(20), "last operations", "all_gather, 10 x float32, done", error=TimeoutError)
        assert "all_gather, 20 x float32, not done" in text, text
    else:
        time.sleep(1.5)
        fails(lambda: gather(20))
with group() as world:
    dist.barrier()
    if rank == 0:
        started = time.monotonic()
        fails(lambda: world.barrier(timeout=timedelta(seconds=0.5)).wait(), "0.5 s", error=TimeoutError, within_s=1.5)
        fails(dist.barrier, within_s=0.5)
    else:
        time.sleep(1.0)
        fails(dist.barrier)
with group() as world:
    world.set_timeout(timedelta(seconds=0.5))
    dist.barrier()
    if rank == 0:
        fails(lambda: gather(3), "0.5 s", error=TimeoutError, within_s=1.5)
    else:
        time.sleep(1.0)
        fails(lambda: gather(3))

# wait() for less than it takes: an error, and the call goes on.
with group() as world:
    if rank == 1:
        time.sleep(0.6)
    out = torch.zeros(2, 3)
    work = dist.all_gather_single(out, torch.ones(3), async_op=True)
    future = work.get_future()
    if rank == 0:
        fails(lambda: work.wait(timedelta(seconds=0.1)), "0.1 s", error=TimeoutError, within_s=0.4)
        assert not work.is_completed() and not future.done()
    work.wait()
    assert out.all() and future.wait()[0] is out
    dist.barrier()

# A failed call, as a future: its waiters get the error.
with group(0.5) as world:
    dist.barrier()
    if rank == 0:
        future = gather(10, async_op=True).get_future()
        fails(future.wait, "waited 0.5 s", error=RuntimeError)
    else:
        time.sleep(1.0)

# abort() on one rank wakes the other.
with group() as world:
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)
        world.abort()
        fails(dist.barrier, "abort")
    else:
        fails(dist.barrier, "rank 0", "abort", within_s=2.0)

# Destroyed with a call in flight that the other will never make.
with group(3.0) as world:
    dist.barrier()
    if rank == 0:
        gather(10, async_op=True)
        world._timeout_s = 0.5
print("all found", flush=True)

# A rank is killed: the other has an error within two seconds. It leaves without destroying its group, with code 0.
place = dist.PrefixStore("killed", store)
dist.init_process_group("hdma", store=place, rank=rank, world_size=2)
gather(10)
if rank == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
fails(lambda: [gather(1 << 20) for _ in range(10000)], "rank 1", within_s=2.3)
fails(lambda: dist.all_reduce(torch.zeros(3)), "rank 1", within_s=0.5)
works = [dist.isend(torch.zeros(3), 1)] if len(sys.argv) > 1 else []
print("survived", flush=True)
