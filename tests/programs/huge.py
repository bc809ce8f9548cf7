"""AllGather of more than 4 GiB, more than 2^32 elements of one byte: counts and offsets have 64 bits everywhere."""

from __future__ import annotations

import numpy as np

import hdma

comm = hdma.init()
shard = (1 << 32) // comm.size + 4097
out = np.zeros(comm.size * shard, np.uint8)
own = out[comm.rank * shard :][:shard]
# Blocks whose bytes differ from place to place by more than a wrap at 2^31 or 2^32 would leave equal; zeros between
# them, which a wrap would bring here.
step = 1 << 20
pattern = np.arange(step, dtype=np.uint32).view(np.uint8)[::4].copy()
# No zero is written: that would take the most of the test's time.
blocks = (0, step * 3, (1 << 31) - step * 2, shard // step * step - step, shard // step * step)


def expected(rank: int, start: int) -> np.ndarray:
    return pattern[: min(step, shard - start)] + np.uint8((start // step * 7 + rank * 101) % 251)


for start in blocks:
    own[start : start + step] = expected(comm.rank, start)
comm.all_gather(out, own)
for rank in range(comm.size):
    for start in blocks:
        part = out[rank * shard + start : rank * shard + min(start + step, shard)]
        assert (part == expected(rank, start)).all(), (rank, start)
comm.close()
