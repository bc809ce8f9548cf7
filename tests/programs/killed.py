"""Ranks that call without end until one of them kills itself in mid-call; the others tell what they got, and when."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import hdma

stamp, victim, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comm = hdma.init()
x, big = np.ones(1 << 20, np.float32), np.ones(comm.size << 20, np.float32)
comm.all_gather(big, x)


def die() -> None:
    time.sleep(0.3)
    stamp.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)


if comm.rank == victim:
    threading.Thread(target=die, daemon=True).start()
try:
    while True:
        comm.all_gather(big, x)
        comm.reduce_scatter(x, big)
except hdma.Error as error:
    late_s = time.time() - float(stamp.read_text())
    print(f"{type(error).__name__} after {late_s:.2f} s: {error}")
    assert f"rank {victim}" in str(error), error
    assert late_s < 2.0
try:
    comm.barrier()
    sys.exit("the communicator went on")
except hdma.Error as again:
    assert f"rank {victim}" in str(again), again
started = time.monotonic()
comm.close()
assert time.monotonic() - started < 1.0
