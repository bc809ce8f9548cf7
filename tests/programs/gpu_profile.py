"""Ranks on GPUs of which a kernel holds every SM: what needs none goes on; and what the profiler sees of the rest."""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import places

import hdma

places.start()
torch = places.torch
comm = hdma.init()
rank, size = comm.rank, comm.size
N = 1 << 20
BLOCKS = int(os.environ.get("HDMA_REDUCE_BLOCKS", 128))
symmetric = hdma.empty(size * N, torch.float32)
mine = symmetric[rank * N : (rank + 1) * N]
out, inp = torch.zeros(size * N, device="cuda"), torch.full((N,), float(rank), device="cuda")
part = torch.zeros(N, device="cuda")
hold = torch.cuda._compile_kernel('extern "C" __global__ void hold(volatile int *go) { while (!*go) { } }', "hold")
go = torch.zeros(1, dtype=torch.int32).pin_memory()
held, other = torch.cuda.Stream(), torch.cuda.Stream()
sms = torch.cuda.get_device_properties(0).multi_processor_count


def in_place() -> None:
    comm.all_gather(symmetric, mine)


def plain() -> None:
    comm.all_gather(out, inp)


def reduce() -> None:
    comm.reduce_scatter(part, out)


def finishes_while_all_is_held(call: Callable[[], None], within_s: float) -> bool:
    torch.cuda.synchronize()
    comm.barrier()
    go.zero_()
    hold((2 * sms, 1, 1), (1024, 1, 1), (go,), stream=held)
    time.sleep(0.05)
    assert not held.query(), "nothing is held"
    with torch.cuda.stream(other):
        call()
        event = torch.cuda.Event()
        event.record()
    until = time.monotonic() + within_s
    while not event.query() and time.monotonic() < until:
        time.sleep(0.001)
    finished = event.query()
    assert not held.query(), "the kernel did not hold on"
    comm.barrier()
    go.fill_(1)
    torch.cuda.synchronize()
    return bool(finished)


for call in (in_place, plain, reduce):
    call()  # Whatever is loaded is loaded now.
symmetric.zero_()
mine.fill_(rank)
assert finishes_while_all_is_held(in_place, 5.0), "an AllGather in place in symmetric memory waited for an SM"
want = torch.arange(size, dtype=torch.float32, device="cuda").repeat_interleave(N)
assert torch.equal(symmetric, want)
needs = {call.__name__: not finishes_while_all_is_held(call, 0.3) for call in (plain, reduce)}
assert torch.equal(out, want)


def profile(call: Callable[[], None]) -> dict[str, Any]:
    torch.cuda.synchronize()
    comm.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.load(open(file.name))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    assert all(event["name"].startswith("hdma_") for event in kernels), {event["name"] for event in kernels}
    grids = [int(np.prod(event["args"]["grid"])) for event in kernels]
    assert all(grid <= BLOCKS for grid in grids), grids
    assert all("PtoP" in event["name"] for event in copies), {event["name"] for event in copies}
    return {
        "kernels": dict(collections.Counter(event["name"] for event in kernels)),
        "most blocks": max(grids, default=0),
        "copies": dict(collections.Counter(event["name"] for event in copies)),
    }


found = {call.__name__: profile(call) for call in (in_place, plain, reduce)}
assert not found["in_place"]["kernels"] and found["in_place"]["copies"], found
assert found["plain"]["kernels"] and found["reduce"]["kernels"]
text = json.dumps({"rank": rank, "waits for an SM": needs, "profile of 3 calls": found})
print(text)
if len(sys.argv) > 1:
    with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
        file.write(text + "\n")
comm.close()
