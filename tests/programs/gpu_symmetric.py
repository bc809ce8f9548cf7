"""A rank whose tensors lie in symmetric memory: in place and not, whole and in parts, and what cannot be."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import places

import hdma

places.start()
comm = hdma.init()
rank, size = comm.rank, comm.size
N = 100_003


def symmetric(numel: int, dtype: Any = np.float32) -> Any:
    if places.PLACE == "torch":
        return hdma.empty(numel, getattr(places.torch, np.dtype(dtype).name))
    made = hdma.empty(numel, dtype, device=places.device())
    return places.wrap(made)


out, inp, plain = symmetric(size * N), symmetric(N), places.put(np.zeros(size * N, np.float32))
assert tuple(out.shape) == (size * N,)
whole = np.repeat(np.arange(size, dtype=np.float32), N)
for round_ in range(20):
    want = whole + round_
    mine = places.part(out, slice(rank * N, (rank + 1) * N))
    places.write(mine, np.full(N, rank + round_, np.float32))
    if round_ % 3 == rank % 3:
        places.sleep(3000)
    comm.all_gather(out, mine)  # in place
    places.write(inp, np.full(N, rank + round_, np.float32))
    comm.all_gather(plain, inp, async_op=True).wait()
    places.fill(inp, 0)  # Behind the readers.
    assert np.array_equal(places.numpy(out, np.float32), want), round_
    assert np.array_equal(places.numpy(plain, np.float32), want), round_

places.write(inp, np.full(N, rank, np.float32))
started = comm.start_all_gather(plain, mine if size == 1 else inp)
for shard, part in started.order:
    started.wait(shard, part)
started.finish()
comm.all_to_all(plain, out)
got = places.numpy(plain, np.float32).reshape(size, N)
assert (got == rank + 19).all(), got
comm.broadcast(out, root=size - 1)
assert np.array_equal(places.numpy(out, np.float32), want)
comm.all_reduce(out)
assert np.array_equal(places.numpy(out, np.float32), want * size)

if size > 1:
    try:
        comm.all_gather(plain, inp if rank else places.put(np.zeros(N, np.float32)))
        places.synchronize()
        comm.barrier()
    except hdma.Error as error:
        assert "symmetric" in str(error), error
    else:
        sys.exit("no error where only some are symmetric")
comm.close()
assert tuple(out.shape) == (size * N,)
places.fill(out, 0)  # Still this rank's.
assert (places.numpy(out, np.float32) == 0).all()
assert isinstance(hdma.empty((2, 3), np.float32, device="cpu"), np.ndarray)
