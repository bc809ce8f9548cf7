"""A timed plan as trace events (JSON) that Perfetto and chrome://tracing open: a process a rank, a thread a lane."""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike

from hdma.plan import LANES
from hdma.simulator.timing import Span
from hdma.topology import Topology

TRACKS = (*LANES, "wire")


def write_trace(path: str | PathLike[str], topology: Topology, spans: Iterable[Span]) -> None:
    """Writes the file. Times in it are microseconds, as the format asks."""
    events: list[dict[str, object]] = []
    for rank in range(topology.size):
        name = f"rank {rank} (node {topology.node(rank)})"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
        for tid, track in enumerate(TRACKS):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}})
    for span in spans:
        step = span.op.step
        events.append(
            {
                "ph": "X",
                "name": step.verb,
                "cat": step.verb,
                "pid": step.rank,
                "tid": TRACKS.index(span.track),
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"step": " ".join(str(step).split()), "call": span.call},
            }
        )
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)
