"""A rank that closes before it has pushed every shard: an error, here and on the others, and no long wait."""

from __future__ import annotations

import sys
import time

import numpy as np

import hdma

comm = hdma.init()
started = time.monotonic()
try:
    # Also a rank that comes when rank 0 has already closed gets its reason.
    call = comm.start_reduce_scatter(np.zeros(4, np.float32), np.ones(4 * comm.size, np.float32))
    for shard, part in call.order[: -1 if comm.rank == 0 else None]:
        call.push(shard, part)
    if comm.rank == 0:
        comm.close()
    call.finish()
    comm.barrier()  # A rank that did not need the missing shard learns of it here.
    sys.exit("no error")
except hdma.UsageError as error:
    assert "rank 0 closed its communicator in start_reduce_scatter(" in str(error), error
    assert "before it had pushed every shard" in str(error), error
assert time.monotonic() - started < 5.0
