"""The equality gate of a benchmark: nothing is timed before every backend's results are those of torch on one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable

from operations import Call
from ranks import Ranks


def gate(ranks: Ranks, name: str, call: Call, function: Callable[..., object]) -> None:
    """Ends all ranks with code 1 if what the backend's `function` makes of the call differs on one of them."""
    call.reset()
    ranks.place.timed(lambda: function(*call.args))
    wrong = call.wrong()
    if ranks.maxima([float(wrong)])[0]:
        if wrong:
            case = call.case
            print(
                f"equality gate failed: {name} {case.collective} of {case.count} {case.dtype} a shard, rank "
                f"{ranks.rank}: {wrong} elements differ, {call.first_wrong()}",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(1)
