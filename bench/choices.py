"""What hdma/requests.py chooses between, measured side by side on one machine.

    mpirun -n 2 python bench/choices.py

AllReduce in one shot or as ReduceScatter and AllGather; AllGather of 2 ranks (AllToAll of more) that reads tensors
where they are or by way of the windows. Sizes are those of a shard, or of the tensor. Times in us: slowest rank of a
turn, median of interleaved turns. `*`: what requests.py chooses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import record

import hdma
from hdma import requests

ALL_REDUCE = [1 << p for p in range(10, 21)]
MOVED = [1 << p for p in range(12, 27)]
TURN_S = 0.02


class Choices:
    """The world communicator, told what to choose."""

    def __init__(self) -> None:
        self.comm = hdma.init()
        self.requests = self.comm._requests
        self.chosen = (requests.ONCE_NBYTES, requests.DIRECT_NBYTES)

    def choose(self, once_nbytes: int, direct_nbytes: range) -> None:
        requests.ONCE_NBYTES, requests.DIRECT_NBYTES = once_nbytes, direct_nbytes
        self.requests.reduced.cache_clear()
        self.requests.moved.cache_clear()

    def turn(self, call: Callable[[], Any], count: int) -> float:
        """Microseconds of a call by the slowest rank."""
        call()
        self.comm.barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            call()
        took_us = np.array([(time.perf_counter() - start_s) / count * 1e6])
        self.comm.all_reduce(took_us, "max")
        return float(took_us[0])

    def compare(self, call: Callable[[], Any], ways: dict[str, tuple[int, range]]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in ways}
        count = 3
        for turn in range(8):
            for name, way in ways.items():
                self.choose(*way)
                times[name].append(self.turn(call, count))
            if turn == 0:
                # The same on all ranks: it comes from a maximum over them.
                count = max(3, int(TURN_S * 1e6 / max(took[0] for took in times.values())))
        self.choose(*self.chosen)
        return {name: median(took[1:]) for name, took in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    choices = Choices()
    comm, never, always = choices.comm, range(0), range(1 << 40)
    lines = []

    def row(name: str, nbytes: int, times: dict[str, float], chosen: str) -> None:
        figures = "   ".join(f"{way} {us:9.1f}{'*' if way == chosen else ' '}" for way, us in times.items())
        lines.append(f"{name:11} {nbytes:9} B   {figures}")

    for nbytes in ALL_REDUCE:
        x = np.ones(nbytes // 4, np.float32)
        ways = {"one shot": (1 << 40, never), "two rounds": (0, never)}
        peers = max(comm.local_size - 1, comm.nodes - 1, 1)
        chosen = "one shot" if nbytes <= choices.chosen[0] // peers else "two rounds"
        row("all_reduce", nbytes, choices.compare(lambda x=x: comm.all_reduce(x), ways), chosen)  # type: ignore[misc]
    if comm.nodes == 1 and choices.requests._direct:
        # What has one reader a shard.
        name, shards = ("all_gather", 1) if comm.size == 2 else ("all_to_all", comm.size)
        for nbytes in MOVED:
            inp, out = np.ones(nbytes * shards, np.uint8), np.ones(nbytes * comm.size, np.uint8)
            call = getattr(comm, name)
            ways = {"read in place": (0, always), "by windows": (0, never)}
            chosen = "read in place" if nbytes in choices.chosen[1] else "by windows"
            row(name, nbytes, choices.compare(lambda: call(out, inp), ways), chosen)
    if comm.rank == 0:
        about = record.header(comm.size, comm.nodes)
        machine = about["machine"]
        print(f"# {about['date']}, {machine['cpu']} ({machine['cores']} cores), {machine['system']}, {about['commit']}")
        print(f"# {about['ranks']} ranks on {about['nodes']} nodes: {about['command']}")
        print("\n".join(lines), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
