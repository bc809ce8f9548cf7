"""A rank that calls without end over a link that is taken down: every side must find out by itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import hdma

comm = hdma.init()
x, big = np.ones(1 << 18, np.float32), np.ones(comm.size << 18, np.float32)
Path(sys.argv[1], f"up {comm.rank}").touch()
try:
    while True:
        started = time.monotonic()
        comm.all_gather(big, x)
        comm.reduce_scatter(x, big)
except (hdma.TimeoutError, hdma.WireError) as error:
    took_s = time.monotonic() - started
    print(f"{type(error).__name__} after {took_s:.1f} s: {error}")
    assert took_s < 4.0
