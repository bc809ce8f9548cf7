"""Ranks of which one does not come to a call: the others' TimeoutError names the call, the flag and the absent rank."""

from __future__ import annotations

import sys
import time

import numpy as np

import hdma

absent = int(sys.argv[1])
comm = hdma.init()
comm.barrier()
started = time.monotonic()
try:
    if comm.rank == absent:
        time.sleep(3.0)
    comm.all_gather(np.zeros(comm.size, np.float32), np.zeros(1, np.float32))
    sys.exit("no error")
except hdma.TimeoutError as error:
    took_s = time.monotonic() - started
    assert isinstance(error, TimeoutError)
    assert "waited 1 s in call 2, all_gather(float32, 4 bytes a shard)" in str(error), error
    assert "HDMA_TIMEOUT_S" in str(error), error
    # Whose time is over first tells all: of a rank of another node and rail it has heard nothing.
    assert "was last in call 1, barrier()" in str(error) or "rank 1 was not heard of" in str(error), error
    assert took_s < 2.0 or comm.rank == absent, took_s
