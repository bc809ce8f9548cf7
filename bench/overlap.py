"""A GEMM alone, a collective alone, both together: what does the collective cost the GEMM that runs beside it?

    mpirun -n 4 python bench/overlap.py -B hdma,gloo --json overlap.json       (or torchrun --nproc-per-node=4)

Each shape m x n x k is a layer under fully sharded data parallelism: beside its GEMM, AllGather brings the n x k
weights of the next layer, or ReduceScatter sums the gradients of the last; a shard is that matrix over the ranks.
Results are compared with torch's before anything is timed; a difference ends the run with code 1.

On GPUs (-D gpu -B hdma,nccl,nccl-zero,low --dtype bfloat16 --turns 20) the default shapes are those of the matrices of
Llama 3 8B and 70B at 8192 tokens, --shard sets the bytes of a shard instead (for tensor parallelism, whose activations
have any length), and a region is as many GEMMs as take 2 ms beside as many collectives as take about as long.
With -R 2 tensors are in registered memory, and AllGather is in place there, as FSDP calls it; torch's low-contention
one, which makes its own result, is not. HDMA_REDUCE_BLOCKS and HDMA_STREAM_PRIORITY are what may be compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import record
import report_overlap
from backends import BACKENDS, add_register, check_places
from beside import CASES, FIGURES
from gate import gate
from operations import COLLECTIVES as KINDS
from operations import DTYPES as KNOWN
from operations import Call
from operations import Case as Operation
from places import PLACES
from ranks import Ranks
from record import Record

from hdma.env import parse_nbytes

SHAPES = "512x1024x1024,512x2048x2048,512x4096x2048"
# Attention output, gate and up, down (8B: d 4096, ff 14336; 70B: d 8192, ff 28672).
GPU_SHAPES = "8192x4096x4096,8192x28672x4096,8192x4096x14336,8192x8192x8192,8192x28672x8192,8192x8192x28672"
# Clocks settle under load (a GEMM slows by up to a fifth within seconds): warm until two medians agree.
STEADY, WARM_TURNS = 0.05, 3
COLLECTIVES = ("all_gather", "reduce_scatter")
# torch's names, and nccl-tests' for operations.py
DTYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "half"}


def shard_numel(gemm: tuple[int, int, int], size: int) -> int:
    """Elements of the n x k matrix that one rank holds, rounded up."""
    return -(-gemm[1] * gemm[2] // size)


def operation_of(ranks: Ranks, collective: str, gemm: tuple[int, int, int], args: argparse.Namespace) -> Operation:
    dtype = DTYPES[args.dtype]
    numel = args.shard // KNOWN[dtype].itemsize if args.shard else shard_numel(gemm, ranks.size)
    return Operation(collective, numel, dtype, "sum" if collective == "reduce_scatter" else None)


def warm_up(ranks: Ranks, cases: list[Any], limit_s: float) -> None:
    """Turns until the time of a round is steady on the slowest rank, or the limit is reached; the same on all ranks."""
    start, last = time.perf_counter(), 0.0
    while True:
        times = [sum(sum(case.turn()[:3]) for case in cases) for _ in range(WARM_TURNS)]
        now, spent_s = ranks.maxima([median(times), time.perf_counter() - start])
        if abs(now - last) < STEADY * now or spent_s > limit_s:
            return
        last = now


def prepare(
    ranks: Ranks, name: str, operation: Operation, gemm: tuple[int, int, int], memory: Any, registered: bool
) -> tuple[Any, Record]:
    """A backend's case, its results checked, and what is recorded about it."""
    backend = ranks.backends[name]
    in_place = registered and operation.collective == "all_gather"
    in_place = in_place and not backend.refusal(operation.collective, operation.op, operation.dtype, True)
    function = getattr(backend, operation.collective)
    place = (in_place, ranks.rank, ranks.size, 0, memory.empty)
    sets = [Call(operation, *place) for _ in range(ranks.place.sets(operation.nbytes(ranks.size)))]
    for call in sets:
        gate(ranks, name, call, function)
    case = CASES[ranks.place.memory](ranks, function, sets, gemm)
    about: Record = {"kind": "overlap", "backend": name, "collective": operation.collective, "gemm": gemm}
    about |= {"in_place": in_place, "registered": registered, "calls": case.calls}
    return case, {**about, "shard_nbytes": operation.count * operation.dtype.itemsize}


def measure(
    ranks: Ranks, collective: str, gemm: tuple[int, int, int], args: argparse.Namespace, tell: Callable[[str], None]
) -> list[Record]:
    """One record a backend for this shape. Backends take turns, so that a drift of the machine meets all alike."""
    operation = operation_of(ranks, collective, gemm, args)
    every = [operation_of(ranks, each, shape, args) for each in args.collectives for shape in args.shapes]
    memories = ranks.memories(every, args.register)
    cases: dict[str, Any] = {}
    about: dict[str, Record] = {}
    for name in ranks.backends:
        cases[name], about[name] = prepare(ranks, name, operation, gemm, memories[name], bool(args.register))
    warm_up(ranks, list(cases.values()), args.warm_limit_s)
    mine: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(args.turns):
        for name, case in cases.items():
            mine[name].append(case.turn())
            tell(f"{collective} {'x'.join(map(str, gemm))} {name}")
    records = []
    for name, turns in mine.items():
        flat = ranks.maxima([value for turn in turns for value in turn])
        columns: Record = {key: flat[i :: len(FIGURES)] for i, key in enumerate(FIGURES)}
        if args.device == "host":
            del columns["lost"]
        columns |= {"dtype": args.dtype, "busbw_factor": KINDS[collective].busbw(ranks.size) * ranks.size}
        records.append({**about[name], **columns})
    return records


def parse_shapes(text: str) -> list[tuple[int, int, int]]:
    shapes = []
    for shape in text.split(","):
        parts = shape.split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"{shape!r} is not a shape such as 512x1024x1024 (m x n x k)")
        m, n, k = map(int, parts)
        shapes.append((m, n, k))
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-B", "--backends", type=record.names_of(BACKENDS), default=["hdma", "gloo"])
    parser.add_argument("--collectives", type=record.names_of(COLLECTIVES), default=list(COLLECTIVES))
    parser.add_argument("-D", "--device", choices=list(PLACES), default="host", help="where tensors are (host)")
    add_register(parser)
    parser.add_argument("--shapes", type=parse_shapes, help=f"m x n x k of the GEMMs ({SHAPES}; on GPUs: see above)")
    parser.add_argument("--shard", type=parse_nbytes, default=0, help="bytes of a shard (those of the shape)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--turns", type=int, default=7, help="measured turns of each case (7)")
    parser.add_argument("--warm-limit-s", type=float, default=4.0, help="longest warm-up of each shape, seconds (4)")
    parser.add_argument("--json", metavar="FILE", help="also write JSON lines there")
    parser.add_argument("--plot", metavar="PNG", help="also draw bars into this file")
    args = parser.parse_args()
    check_places(parser, args.backends, args.device, args.register)
    args.shapes = args.shapes or parse_shapes(SHAPES if args.device == "host" else GPU_SHAPES)
    with Ranks(args.backends, args.device) as ranks:
        records = [record.header(ranks.size, ranks.nodes, args.device)]
        cases = [(collective, shape) for collective in args.collectives for shape in args.shapes]
        with record.progress(len(cases) * args.turns * len(args.backends), ranks.rank) as tell:
            for collective, shape in cases:
                records += measure(ranks, collective, shape, args, tell)
        if ranks.rank == 0:
            print(report_overlap.table(records), flush=True)
            if args.json:
                record.write(args.json, records)
            if args.plot:
                report_overlap.plot(records, args.plot)


if __name__ == "__main__":
    main()
