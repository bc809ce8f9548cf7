"""Where the time of a call on GPUs goes: what the GPU's profiler saw of back-to-back calls, and what the host took.

    torchrun --nproc-per-node 2 bench/timeline.py --sizes 1M,16M,64M,256M --json timeline.jsonl

Sizes are those of a rank's shard. Of rank 0, microseconds a call:

  call     GPU time of a call, back to back, without the profiler
  bound    copy engines pushing the same bytes to the peers, all ranks at once, in the same run
  host     time of the host in a call, while the streams have room
  copies   copies between GPUs (and to and from the host) are going on
  kernels  kernels are: of hdma's, copies on this GPU and sums
  both     copies and kernels at the same time
  neither  nothing is: flags, waits for the peer, the start of a copy
  gap      between a copy's end and the start of the next one, median
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import record
import torch
from operations import Call, Case
from peer_copy import PeerCopy
from ranks import Ranks
from record import Record
from tables import columns, label

from hdma.env import parse_nbytes

CALLS, WARM, REPEATS = 20, 10, 5
# Of which all steps fit the streams, so that the driver holds nobody up.
HOST_CALLS = 10
Span = tuple[float, float]


def merged(spans: list[Span]) -> list[Span]:
    """Sorted, and one where they overlap or touch."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in merged(spans))


def shared(a: list[Span], b: list[Span]) -> float:
    """How long both are going on."""
    return length(a) + length(b) - length(a + b)


def split(events: list[dict[str, Any]]) -> tuple[list[Span], list[Span]]:
    """Copies and kernels of a profiler's trace, microseconds."""
    found: dict[str, list[Span]] = {"gpu_memcpy": [], "kernel": []}
    for event in events:
        if event.get("cat") in found:
            found[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    return found["gpu_memcpy"], found["kernel"]


def profile(ranks: Ranks, call: Any) -> dict[str, float]:
    """Of CALLS calls, in microseconds a call."""
    torch.cuda.synchronize()
    ranks.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        ranks.place.timed(lambda: [call() for _ in range(CALLS)])
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        copies, kernels = split(json.loads(Path(file.name).read_text())["traceEvents"])
    everything = copies + kernels
    # A single rank has nothing to do in place.
    whole = max(end for _, end in everything) - min(start for start, _ in everything) if everything else 0.0
    ordered = merged(copies)
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(ordered)]
    return {
        "profiled": whole / CALLS,
        "copies": length(copies) / CALLS,
        "kernels": length(kernels) / CALLS,
        "both": shared(copies, kernels) / CALLS,
        "neither": (whole - length(everything)) / CALLS,
        "gap": median(gaps) if gaps else 0.0,
        "copy_count": len(copies) / CALLS,
        "kernel_count": len(kernels) / CALLS,
    }


def measure(
    ranks: Ranks, bound: PeerCopy, backend: str, collective: str, nbytes: int, in_place: bool, largest: int
) -> Record:
    op = "sum" if collective == "reduce_scatter" else None
    case = Case(collective, nbytes // 2, "bfloat16", op)
    every = [Case(collective, largest // 2, "bfloat16", op)]
    memory = ranks.memories(every, 2 if in_place else 0, names=[backend])[backend]
    tensors = Call(case, in_place, ranks.rank, ranks.size, empty=memory.empty)
    tensors.reset()

    def call() -> None:
        getattr(ranks.backends[backend], collective)(*tensors.args)

    def gpu_us(what: Any) -> float:
        times = [ranks.timed(lambda: [what() for _ in range(CALLS)]) / CALLS * 1e6 for _ in range(REPEATS)]
        return median(ranks.maxima(times))

    for _ in range(WARM):
        call()
    copy = bound.call(case)
    host = []
    for _ in range(4 * REPEATS):
        torch.cuda.synchronize()
        ranks.barrier()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        host.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    about = {"kind": "timeline", "backend": backend, "collective": collective, "in_place": in_place, "nbytes": nbytes}
    figures = {"call": gpu_us(call), "bound": gpu_us(copy) if copy else None, "host": median(host)}
    return {**about, **figures, **profile(ranks, call)}


def table(records: list[Record]) -> str:
    keys = ("call", "bound", "host", "copies", "kernels", "both", "neither", "gap")
    lines: list[tuple[str, ...]] = [
        ("collective", "backend", "shard MiB", *(f"{key} us" for key in keys), "copies", "kernels")
    ]
    for r in records[1:]:
        what = f"{r['collective']}{' in place' if r['in_place'] else ''}"
        cells = ["" if r[key] is None else f"{r[key]:.1f}" for key in keys]
        counts = (f"{r['copy_count']:g}", f"{r['kernel_count']:g}")
        lines.append((what, r["backend"], f"{r['nbytes'] / 2**20:g}", *cells, *counts))
    return "\n\n".join([label(records[0]), columns(lines, 2)])


def parse_sizes(text: str) -> list[int]:
    return [parse_nbytes(size) for size in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=parse_sizes, default="1M,16M,64M,256M", help="of a shard (1M,16M,64M,256M)")
    parser.add_argument("-B", "--backends", type=record.names_of(("hdma", "nccl")), default=["hdma"], help="hdma,nccl")
    parser.add_argument("--json", metavar="FILE", help="also write JSON lines there")
    args = parser.parse_args()
    with Ranks(args.backends, "gpu") as ranks:
        records = [record.header(ranks.size, ranks.nodes, "gpu")]
        bound = PeerCopy(ranks, max(args.sizes) * ranks.size)
        for collective, in_place in (("all_gather", False), ("all_gather", True), ("reduce_scatter", False)):
            for nbytes in args.sizes:
                for backend in args.backends if not in_place else [name for name in args.backends if name == "hdma"]:
                    records.append(measure(ranks, bound, backend, collective, nbytes, in_place, max(args.sizes)))
        if ranks.rank == 0:
            print(table(records), flush=True)
            if args.json:
                record.write(args.json, records)


if __name__ == "__main__":
    main()
