"""python -m hdma.info: exit code 0 if no check fails, 1 if one does, 2 for wrong arguments."""

from __future__ import annotations

import argparse
import json
import sys
import warnings

from hdma.info import report, settings, text


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hdma.info",
        description="What hdma finds on this machine, checked; under mpirun, torchrun or srun of the whole job.",
        epilog="Exit code: 0, or 1 if a check fails.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--env", action="store_true", help="print only the HDMA_* variables")
    parser.add_argument("--try", action="store_true", dest="tries", help="use each GPU once, as a first call would")
    args = parser.parse_args()
    # What is wrong with variables is one of the checks.
    warnings.simplefilter("ignore", RuntimeWarning)
    if args.env:
        rows = settings.table()
        print(json.dumps(rows, indent=2) if args.json else text.settings(rows))
        return 1 if any(row["error"] for row in rows) else 0
    found = report.make(args.tries)
    if found["job"]["rank"] == 0:
        print(json.dumps(found, indent=2) if args.json else text.report(found), flush=True)
    elif not found["job"]["joined"]:
        # Nobody reports for a rank that could not join.
        lines = [text.check(check) for check in found["checks"] if check["verdict"] == "fail"]
        print(f"rank {found['job']['rank']}:", *lines, sep="\n", file=sys.stderr, flush=True)
    return 1 if found["verdict"] == "fail" else 0


if __name__ == "__main__":
    sys.exit(main())
