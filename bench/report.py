"""Table and plot of recorded runs: python bench/report.py RUN.jsonl [RUN.jsonl ...] [--plot PNG].

Of bench/overlap.py and bench/blocks.py one run. Of bench/collectives.py one or several, such as the same command under
Open MPI and under MPICH: they are compared by xbound, the time over the copy bound that the same run measured.
"""

from __future__ import annotations

import argparse
import sys

import record
import report_blocks
import report_collectives
import report_overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="what --json wrote")
    parser.add_argument("--plot", metavar="PNG", help="also draw into this file")
    args = parser.parse_args()
    runs = [record.read(path) for path in args.runs]
    kinds = {row["kind"] for run in runs for row in run[1:]}
    if kinds == {"overlap"} and len(runs) == 1:
        print(report_overlap.table(runs[0]))
        if args.plot:
            report_overlap.plot(runs[0], args.plot)
    elif kinds == {"blocks"} and len(runs) == 1:
        print(report_blocks.table(runs[0]))
        if args.plot:
            report_blocks.plot(runs[0], args.plot)
    elif kinds == {"collective"} and all("nbytes" in row for run in runs for row in run[1:]):
        print(report_collectives.table(runs))
        if args.plot:
            report_collectives.plot(runs, args.plot)
    else:
        old = "collective" in kinds and kinds == {"collective"}
        reason = "a run was recorded before sizes were those of the whole" if old else f"they hold {sorted(kinds)}"
        sys.exit(
            f"cannot report on {', '.join(args.runs)}: one run of overlap or blocks, or runs of collectives; {reason}"
        )
    if args.plot:
        print(f"\nplot: {args.plot}")


if __name__ == "__main__":
    main()
