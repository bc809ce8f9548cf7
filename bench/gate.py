"""The equality gate of a benchmark: nothing is timed before every backend's results are those of torch on one rank."""

from __future__ import annotations

import functools
import sys

from operations import Call, Case
from ranks import Ranks


def gate(ranks: Ranks, case: Case) -> None:
    """Ends all ranks with code 1 if a backend's result differs on one of them."""
    for name, backend in ranks.backends.items():
        call = Call(case, False, ranks.rank, ranks.size, empty=ranks.place.empty)
        call.reset()
        function = functools.partial(getattr(backend, case.collective), *call.args)
        ranks.place.timed(function)
        wrong = call.wrong()
        if ranks.maxima([float(wrong)])[0]:
            if wrong:
                first = int((call.result != call.expected).nonzero()[0])
                print(
                    f"equality gate failed: {name} {case.collective} of {case.count} {case.dtype} a shard, rank "
                    f"{ranks.rank}: {wrong} elements differ, the first at {first}: {call.result[first]} instead of "
                    f"{call.expected[first]}",
                    file=sys.stderr,
                    flush=True,
                )
            sys.exit(1)
