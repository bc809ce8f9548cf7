"""Collectives alone, in the manner of nccl-tests: exact results, then times and bandwidths, backends taking turns.

    mpirun -n 4 python bench/collectives.py -b 64K -e 64M -f 4 -B hdma,gloo,mpi --json run.jsonl

SIZE is that of nccl-tests: the whole, so for all_gather and reduce_scatter the shards of ALL ranks together (a rank's
shard is size / ranks, its elements are `count`). all_reduce and broadcast: the one buffer; all_to_all: what a rank has.

  time    microseconds of one call: a turn repeats a small call for about 30 ms and divides; the slowest rank of a
          turn (see -a), the median of -n turns. Backends take turns, so that a drift of the machine meets all alike
  algbw   size / time, GB/s
  busbw   algbw x (n-1)/n for all_gather, reduce_scatter and all_to_all, x 2(n-1)/n for all_reduce, x 1 for broadcast
  bound   the time of copying alone, in the same turns: every rank, all at once, copies the n-1 other blocks out of the
          others' shared memory with memmove, unsynchronised (all_reduce: twice, blocks of size / n; broadcast: all but
          the root copy the whole). Ranks of one host only; nodes simulated there (HDMA_RANKS_PER_NODE) share it. On
          GPUs (-D gpu): copy engines push the blocks to the others' memory, back to back
  xbound  time / bound: 1 is perfect; below 1 only by copying better than memmove, or by chance
  #wrong  elements of all ranks that are not exactly right; checked before anything is timed
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import record
import torch.distributed as dist
from backends import BACKENDS, Backend, add_register, check_places
from bound import Bound
from operations import COLLECTIVES, DTYPES, OPS, Call, Case, count_for
from places import PLACES
from ranks import Ranks
from record import Record
from rows import header_lines, row_line

import hdma
from hdma.env import parse_nbytes

# Longer than the scheduler's slices: where ranks share cores and spin (MPICH), a turn of a few milliseconds shows how
# late the last rank was let in, up to a hundred times the call.
TURN_S = 0.03
MAX_REPEATS = 4096
AVERAGES: tuple[Any, ...] = (None, dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def sizes(args: argparse.Namespace) -> list[int]:
    """From -b to -e: multiplied by -f, or with -i by steps of that many bytes."""
    found = [args.minbytes]
    while True:
        last = found[-1] + args.stepbytes if args.stepbytes else found[-1] * args.stepfactor
        if last > args.maxbytes:
            return found
        found.append(last)


def cases(args: argparse.Namespace, size: int) -> Iterator[Case]:
    """The rows, without repeating a reduction for collectives that have none."""
    for name in args.collectives:
        kind = COLLECTIVES[name]
        for dtype in args.dtype[:1] if name == "barrier" else args.dtype:
            for op in args.op if kind.reduces else [None]:
                counts = [count_for(name, nbytes, DTYPES[dtype], size) for nbytes in sizes(args)]
                for count in dict.fromkeys(counts):
                    yield Case(name, count, dtype, op, args.root if kind.rooted else None)


def repeats_for(ranks: Ranks, call: Callable[[], Any]) -> int:
    """How often a turn repeats the call: doubled or more until a turn is long enough; warms up too."""
    repeats = 1
    while True:
        # The shorter of two: a first call may make connections, and any may be held up.
        took_s = min(ranks.maxima([ranks.timed(lambda: _repeat(call, repeats)) for _ in range(2)]))
        if took_s >= TURN_S / 2 or repeats >= MAX_REPEATS:
            return repeats
        wanted = math.ceil(repeats * TURN_S / took_s)
        repeats = min(MAX_REPEATS, max(2 * repeats, min(16 * repeats, wanted)))


def _repeat(call: Callable[[], Any], repeats: int) -> None:
    for _ in range(repeats):
        call()


def measure(ranks: Ranks, bound: Any, case: Case, args: argparse.Namespace, tell: Callable[[str], None]) -> Any:
    """Records of one row, one a backend and place; and why others were left out."""
    records: list[Record] = []
    skipped: list[str] = []
    calls: dict[int, Callable[[], Any]] = {}
    memories = ranks.memories(args.rows, args.register, args.unalign)
    sets = ranks.place.sets(case.nbytes(ranks.size))
    for in_place in COLLECTIVES[case.collective].in_place:
        for name, backend in ranks.backends.items():
            what = f"{name} {case.collective}{' in place' if in_place else ''}"
            reason = refusal(backend, case, in_place)
            if reason:
                skipped.append(f"{what} left out: {reason}")
                continue
            place = (in_place, ranks.rank, ranks.size, args.unalign, memories[name].empty)
            tensors, *others = [Call(case, *place) for _ in range(sets)]
            function = rotating(getattr(backend, case.collective), [each.args for each in (tensors, *others)])
            for each in (tensors, *others):
                each.reset()
            try:
                ranks.place.timed(function)
            except hdma.UsageError as error:  # Raised alike on all ranks, before anything is moved.
                skipped.append(f"{what} left out: {error}")
                continue
            calls[len(records)] = function
            about = {"kind": "collective", "collective": case.collective, "backend": name, "in_place": in_place}
            about |= {"library": backend.library, "dtype": case.dtype_name, "op": case.op, "root": case.root}
            about |= {"nbytes": case.nbytes(ranks.size), "count": case.count, "wrong": None}
            about["registered"] = args.register == 2
            if args.check:
                about["wrong"] = int(ranks.over_ranks([float(tensors.wrong())], dist.ReduceOp.SUM)[0])
            records.append(about)
            for each in (tensors, *others):
                each.reset()
                each.settle()
    copy = bound.call(case)
    if copy and records:
        calls[-1] = copy
    repeats = {key: repeats_for(ranks, call) for key, call in calls.items()}
    mine: dict[int, list[float]] = {key: [] for key in calls}
    for _ in range(args.warmup_iters + args.iters):
        for key, call in calls.items():
            mine[key].append(ranks.timed(lambda: _repeat(call, repeats[key])) / repeats[key])
        tell(f"{case.collective} {case.nbytes(ranks.size)} bytes")
    times = {key: averaged(ranks, values[args.warmup_iters :], args.average) for key, values in mine.items()}
    for key, about in enumerate(records):
        about |= {"repeats": repeats[key], "time_s": times[key], "bound_s": times.get(-1)}
        about["busbw_factor"] = COLLECTIVES[case.collective].busbw(ranks.size)
    return records, skipped


def rotating(call: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[], Any]:
    """The call on one set of arguments after the other, beginning with the first."""
    turns = itertools.cycle(sets)
    return lambda: call(*next(turns))


def refusal(backend: Backend, case: Case, in_place: bool) -> str:
    if case.op == "avg" and not case.dtype.is_floating_point:
        return f"{case.dtype_name} has no average"
    return backend.refusal(case.collective, case.op, case.dtype, in_place)


def averaged(ranks: Ranks, times_s: list[float], mode: int) -> list[float]:
    """-a: of rank 0, or the mean, the minimum or the maximum over ranks, of each turn."""
    if mode == 0:
        return [float(value) for value in ranks.gather(times_s)[0]]
    values = ranks.over_ranks(times_s, AVERAGES[mode])
    return [value / ranks.size for value in values] if mode == 1 else values


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    dtypes = record.names_of(DTYPES, all_of=True)
    add("-b", "--minbytes", type=parse_nbytes, default=1 << 20, help="smallest size of the whole (1M)")
    add("-e", "--maxbytes", type=parse_nbytes, default=64 << 20, help="largest size of the whole (64M)")
    add("-f", "--stepfactor", type=int, default=4, help="from one size to the next, times (4)")
    add("-i", "--stepbytes", type=parse_nbytes, default=0, help="or plus this many bytes (off)")
    add("-n", "--iters", type=int, default=7, help="measured turns; a turn repeats small calls by itself (7)")
    add("-w", "--warmup_iters", type=int, default=2, help="turns before (2)")
    add("-c", "--check", type=int, choices=[0, 1], default=1, help="compare with exact results (1)")
    add("-d", "--dtype", type=dtypes, default=["float"], help=f"{','.join(DTYPES)} or all (float)")
    add("-o", "--op", type=record.names_of(OPS, all_of=True), default=["sum"], help=f"{','.join(OPS)} or all (sum)")
    add("-r", "--root", type=int, default=0, help="root of broadcast (0)")
    add("-T", "--timeout", type=float, default=0, help="seconds for one row, then all ends with code 1 (0: none)")
    add("-a", "--average", type=int, choices=range(4), default=3, help="0 rank 0, 1 mean, 2 min, 3 max of ranks (3)")
    add("-u", "--unalign", type=int, default=0, metavar="N", help="tensors start N elements past alignment (0)")
    add("-D", "--device", choices=list(PLACES), default="host", help="where tensors are (host)")
    add_register(parser)
    add("-B", "--backends", type=record.names_of(BACKENDS), default=["hdma", "gloo"], help=",".join(BACKENDS))
    known = record.names_of(COLLECTIVES, all_of=True)
    default = ["all_gather", "reduce_scatter"]
    add("--collectives", type=known, default=default, help=f"{','.join(COLLECTIVES)} or all ({','.join(default)})")
    add("--json", metavar="FILE", help="also write JSON lines there, for bench/report.py")
    args = parser.parse_args()
    if args.stepfactor < 2 or args.iters < 1 or args.minbytes < 1 or args.root < 0:
        parser.error("-f must be 2 or more, -n and -b 1 or more, -r 0 or more")
    if args.warmup_iters < 0 or args.unalign < 0 or args.timeout < 0:
        parser.error("-w, -u and -T must be 0 or more")
    check_places(parser, args.backends, args.device, args.register)
    return args


def _bound(ranks: Ranks, nbytes: int) -> Any:
    if ranks.place.memory == "host":
        return Bound(ranks, nbytes)
    from peer_copy import PeerCopy

    return PeerCopy(ranks, nbytes)


def main() -> None:
    args = parse_args()
    with Ranks(args.backends, args.device) as ranks:
        if args.root >= ranks.size:
            raise SystemExit(f"-r {args.root}: there are {ranks.size} ranks")
        wrong = _run(ranks, args)
    sys.exit(1 if wrong else 0)


def _run(ranks: Ranks, args: argparse.Namespace) -> int:
    """Prints rows as they are made; returns the number of wrong elements."""
    args.rows = rows = list(cases(args, ranks.size))
    bound = _bound(ranks, max(case.nbytes(ranks.size) for case in rows))
    header = record.header(ranks.size, ranks.nodes, args.device)
    header["libraries"] = {name: backend.library for name, backend in ranks.backends.items()}
    header["bound"] = bound.reason or "copy"
    records: list[Record] = [header]

    def say(*lines: str) -> None:
        if ranks.rank == 0 and lines:
            print(*lines, sep="\n", flush=True)

    say(*header_lines(header))
    told: set[str] = set()
    with record.progress(len(rows) * (args.warmup_iters + args.iters), ranks.rank) as tell:
        for case in rows:
            if args.timeout:
                faulthandler.dump_traceback_later(args.timeout, exit=True)
            made, skipped = measure(ranks, bound, case, args, tell)
            say(*(f"# {line}" for line in skipped if line not in told))
            told |= {*skipped}
            for name in ranks.backends:
                places = [r for r in made if r["backend"] == name]
                if places:
                    say(row_line(places))
            records += made
    faulthandler.cancel_dump_traceback_later()
    wrong = sum(row["wrong"] or 0 for row in records[1:])
    if args.check:
        say(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    for name in ranks.backends:
        busbw = [
            r["nbytes"] * r["busbw_factor"] / median(r["time_s"]) / 1e9 for r in records[1:] if r["backend"] == name
        ]
        if busbw:
            say(f"# Avg bus bandwidth    : {sum(busbw) / len(busbw):.4f} ({name})")
    if ranks.rank == 0 and args.json:
        record.write(args.json, records)
    return wrong


if __name__ == "__main__":
    main()
