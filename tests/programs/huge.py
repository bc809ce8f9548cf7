"""AllGather of more than 4 GiB, more than 2^32 elements of one byte: counts and offsets have 64 bits everywhere."""

from __future__ import annotations

import numpy as np

import hdma

comm = hdma.init()
shard = (1 << 32) // comm.size + 4097
out = np.empty(comm.size * shard, np.uint8)
own = out[comm.rank * shard :][:shard]
# Bytes that differ from place to place by more than a wrap at 2^31 or 2^32 would leave equal.
step = 1 << 20
pattern = np.arange(step, dtype=np.uint32).view(np.uint8)[::4].copy()
for start in range(0, shard, step):
    part = own[start : start + step]
    np.add(pattern[: part.size], (start // step * 7 + comm.rank * 101) % 251, out=part, casting="unsafe")
comm.all_gather(out, own)
for rank in range(comm.size):
    for start in (0, step * 3, (1 << 31) - step * 2, shard // step * step - step, shard // step * step):
        part = out[rank * shard + start : rank * shard + min(start + step, shard)]
        expected = pattern[: part.size] + np.uint8((start // step * 7 + rank * 101) % 251)
        assert (part == expected).all(), (rank, start)
comm.close()
