"""A rank that issues calls faster than they are executed: mixed, skewed, on several streams, of several groups, with
inputs that are dropped or overwritten at once. Whatever reads or writes too soon makes a wrong result."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import places
from reference import reduction, same_bits, values

import hdma

CALLS = int(sys.argv[1])
places.start()
world = hdma.init()
groups = [world, world.group(range(world.size)), world.group(list(range(world.size))[::-1])]
shared, mine = random.Random(7), random.Random(world.rank)


class Check:
    def __init__(self, what: str, out: Any, want: np.ndarray) -> None:
        self.what, self.out, self.want = what, out, want

    def __call__(self) -> None:
        got = places.numpy(self.out, self.want.dtype)
        assert same_bits(got, self.want), f"rank {world.rank}: {self.what}"


def issue(number: int) -> Check:
    comm = shared.choice(groups)
    rank, size = comm.rank, comm.size
    name = shared.choice(("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"))
    numel = shared.choice((1, 100, 5003, 40009))
    async_op = shared.random() < 0.5
    inputs = [values(r, size * numel, np.float32, seed=number) for r in range(size)]
    parts = [[x[r * numel : (r + 1) * numel] for x in inputs] for r in range(size)]
    if mine.random() < 0.2:
        places.sleep(mine.randrange(2000))
    whole, part = places.put(inputs[rank]), places.put(inputs[rank][:numel].copy())
    if name == "all_gather":
        out, want = places.put(np.zeros(size * numel, np.float32)), np.concatenate([x[:numel] for x in inputs])
        work = comm.all_gather(out, part, async_op=async_op)
    elif name == "reduce_scatter":
        out, want = places.put(np.zeros(numel, np.float32)), reduction(parts[rank], "sum", comm.nodes)
        work = comm.reduce_scatter(out, whole, async_op=async_op)
    elif name == "all_reduce":
        out, want = whole, np.concatenate([reduction(each, "sum", comm.nodes) for each in parts])
        work = comm.all_reduce(out, async_op=async_op)
    elif name == "broadcast":
        out, want = whole, inputs[number % size]
        work = comm.broadcast(out, root=number % size, async_op=async_op)
    else:
        out, want = places.put(np.zeros(size * numel, np.float32)), np.concatenate(parts[rank])
        work = comm.all_to_all(out, whole, async_op=async_op)
    if work is not None and shared.random() < 0.7:
        work.wait()
        work = None
    if work is None and out is not part:
        places.fill(part, 0x55)  # Behind the call on this stream.
        if out is not whole:
            places.fill(whole, 0x55)
    pending.append(work)
    return Check(f"call {number}, {name} of {numel}", out, want)


pending: list[Any] = []
checks: list[Check] = []
for number in range(CALLS):
    if number % 10 == 5:
        with places.side_stream():
            check = issue(number)
            if pending[-1] is not None:
                pending[-1].wait()
            check()
    else:
        checks.append(issue(number))
    if len(checks) == 20:
        for work in filter(None, pending):
            work.wait()
        for check in checks:
            check()
        pending.clear()
        checks.clear()
for work in filter(None, pending):
    work.wait()
for check in checks:
    check()
for comm in groups[::-1]:
    comm.close()
print("all right")
