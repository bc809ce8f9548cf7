"""A rank of a node on which one rank may not read the others' memory: all agree to go through the windows."""

from __future__ import annotations

import sys

import numpy as np
from reference import same_bits, values

import hdma
from hdma import _core

forbidden = sys.argv[1] == "forbidden"
read_process = _core.read_process
asked = []


def read(pid: int, address: int, nbytes: int) -> bytes | None:
    asked.append(pid)
    return None if forbidden and len(asked) == 2 else read_process(pid, address, nbytes)


_core.read_process = read
comm = hdma.init()
assert asked
for numel in (8191, 8192, 8193, 100003, 2097152, 2097153):  # Around the bounds of what is read directly.
    shards = [values(r, numel, np.float32) for r in range(comm.size)]
    out = np.zeros(comm.size * numel, np.float32)
    before = comm.stats()["copies"]
    comm.all_gather(out, shards[comm.rank])
    copies = comm.stats()["copies"] - before
    assert same_bits(out, np.concatenate(shards)), numel
    # One for each shard, or in pieces and by way of the window.
    assert (copies == comm.size) == (not forbidden and 32768 <= 4 * numel <= 8 << 20), (numel, copies)
comm.close()
