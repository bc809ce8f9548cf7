"""A rank that makes calls until its wire fails, and tells what it got and how soon after `stamp` appeared.

Arguments: the file `stamp`, the most seconds after it, and a pattern that the error must match.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np

import hdma

stamp, limit_s, pattern = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
started = time.time()
try:
    comm = hdma.init()
    x, big = np.ones(100_000, np.float32), np.ones(comm.size * 100_000, np.float32)
    comm.all_gather(big, x)
    stamp.with_suffix(f".{comm.rank}").write_text("calling")
    while time.time() - started < limit_s:
        comm.all_gather(big, x)
        assert (big == 1).all()
        comm.reduce_scatter(x, big)
        x[:] = 1
    sys.exit("nothing failed")
except hdma.Error as error:
    since = stamp.stat().st_mtime if stamp.exists() else started
    print(f"{type(error).__name__} after {time.time() - since:.1f} s: {error}")
    assert re.search(pattern, f"{type(error).__name__}: {error}"), pattern
    assert time.time() - since < limit_s
