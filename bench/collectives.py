"""AllGather and ReduceScatter alone, in the manner of nccl-tests: backends take turns, results are checked first.

    HDMA_RANKS_PER_NODE=2 mpirun -n 4 python bench/collectives.py -b 1M -e 64M -f 4 -n 7 -w 2 -B hdma,gloo

Sizes are bytes of one rank's shard. Times: slowest rank of a turn, median of turns. algbw = all shards / time;
busbw = algbw * (ranks - 1) / ranks, what must pass through each rank. vs gloo = gloo's time / this one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import record
import report
import torch
from backends import BACKENDS, COLLECTIVES, Ranks, gate, tensors
from record import Record

from hdma.env import parse_nbytes


def sizes(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... up to last."""
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def measure(
    ranks: Ranks, collective: str, nbytes: int, args: argparse.Namespace, tell: Callable[[str], None]
) -> list[Record]:
    """One record a backend."""
    dtype = getattr(torch, args.dtype)
    numel = max(1, nbytes // dtype.itemsize)
    gate(ranks, collective, numel, dtype)
    out, inp = tensors(collective, numel, dtype, ranks.rank, ranks.size)
    calls = {name: getattr(backend, collective) for name, backend in ranks.backends.items()}
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.warmups + args.iterations):
        for name, call in calls.items():
            mine[name].append(ranks.timed(lambda call=call: call(out, inp)))  # type: ignore[misc]
            tell(f"{collective} {nbytes} bytes {name}")
    about = {"kind": "collective", "collective": collective, "dtype": args.dtype}
    about["shard_nbytes"] = numel * dtype.itemsize
    return [{**about, "backend": name, "time_s": ranks.maxima(times[args.warmups :])} for name, times in mine.items()]


def table(records: list[Record]) -> str:
    """The printed table."""
    size = records[0]["ranks"]
    lines: list[tuple[str, ...]] = [
        ("collective", "shard bytes", "backend", "time ms", "algbw GB/s", "busbw GB/s", "vs gloo")
    ]
    rows = records[1:]
    for row in rows:
        time_s = median(row["time_s"])
        gloo = [median(r["time_s"]) for r in rows if r["backend"] == "gloo" and _case(r) == _case(row)]
        algbw = row["shard_nbytes"] * size / time_s / 1e9
        figures = (f"{time_s * 1e3:.2f}", f"{algbw:.2f}", f"{algbw * (size - 1) / size:.2f}")
        ratio = f"{gloo[0] / time_s:.2f}" if gloo else ""
        lines.append((row["collective"], str(row["shard_nbytes"]), row["backend"], *figures, ratio))
    return report.label(records[0]) + "\n\n" + report.columns(lines, text_columns=3)


def _case(row: Record) -> tuple[str, int]:
    return row["collective"], row["shard_nbytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-b", "--minbytes", type=parse_nbytes, default=1 << 20, help="smallest shard (1M)")
    parser.add_argument("-e", "--maxbytes", type=parse_nbytes, default=64 << 20, help="largest shard (64M)")
    parser.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (4)")
    parser.add_argument("-n", "--iterations", type=int, default=7, help="measured turns (7)")
    parser.add_argument("-w", "--warmups", type=int, default=2, help="turns before (2)")
    parser.add_argument("-B", "--backends", type=record.names_of(BACKENDS), default=["hdma", "gloo"])
    parser.add_argument("--collectives", type=record.names_of(COLLECTIVES), default=list(COLLECTIVES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--json", metavar="FILE", help="also write JSON lines there")
    args = parser.parse_args()
    if args.factor < 2 or args.iterations < 1 or args.minbytes < 1:
        parser.error("-f must be 2 or more, -n and -b 1 or more")
    ranks = Ranks(args.backends)
    records = [record.header(ranks.size, ranks.nodes)]
    cases = [(c, nbytes) for c in args.collectives for nbytes in sizes(args.minbytes, args.maxbytes, args.factor)]
    turns = (args.warmups + args.iterations) * len(args.backends)
    with record.progress(len(cases) * turns, ranks.rank) as tell:
        for collective, nbytes in cases:
            records += measure(ranks, collective, nbytes, args, tell)
    if ranks.rank == 0:
        print(table(records), flush=True)
        if args.json:
            record.write(args.json, records)
    ranks.close()


if __name__ == "__main__":
    main()
