"""Arrays on a GPU as other libraries describe them: shapes, strides, dtypes, streams; and what cannot be right."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import places

import hdma

places.start()
comm = hdma.init()
rank, size = comm.rank, comm.size


class Array:
    """Any description of an array that is there."""

    def __init__(self, whole: Any, **more: Any) -> None:
        self._whole, self.device = whole, places.device()
        self.__cuda_array_interface__ = whole.__cuda_array_interface__ | more


def ones(numel: int, dtype: Any = np.float32) -> Any:
    return places.put(np.ones(numel, dtype))


def refused(call: Any, expected: str) -> None:
    try:
        call()
    except hdma.UsageError as error:
        assert expected in str(error), error
    else:
        sys.exit(f"no error that says {expected!r}")


# What is dense, however it says so.
for shape, strides in [
    ((), ()),
    ((), None),
    ((6,), (4,)),
    ((2, 3), (12, 4)),
    ((1, 6), (4, 4)),
    ((6, 1), (4, 1000)),
    ((2, 1, 3), [12, -8, 4]),
]:
    x = Array(ones(6), shape=shape, strides=strides)
    comm.all_reduce(x)
    numel = int(np.prod(shape, dtype=int))
    want = [size] * numel + [1] * (6 - numel)
    assert (places.numpy(x._whole, np.float32) == want).all(), (shape, strides)
for shape, strides in [((0,), (4,)), ((0, 3), (5, 7)), ((3, 0), None)]:
    comm.all_reduce(Array(ones(6), shape=shape, strides=strides))
    comm.all_reduce(Array(ones(6), shape=shape, strides=strides, data=(0, False)))
for shape, strides in [((3,), (8,)), ((3, 2), (4, 12)), ((6,), (-4,)), ((6,), (0,))]:
    refused(lambda: comm.all_reduce(Array(ones(6), shape=shape, strides=strides)), "not contiguous")
refused(lambda: comm.all_reduce(Array(ones(6), typestr=">f4")), "byte order")
refused(lambda: comm.broadcast(Array(ones(6), typestr="|O", shape=(3,))), "Python objects")
refused(lambda: comm.broadcast(Array(ones(6), typestr="|V0")), "no bytes")
refused(lambda: comm.all_reduce(Array(ones(6), typestr="|V8", shape=(3,))), "dtype")
whole = ones(6)
refused(lambda: comm.all_reduce(Array(whole, data=(whole.address, True))), "read-only")
refused(lambda: comm.all_reduce(Array(whole, mask=whole)), "mask")
comm.broadcast(Array(ones(6), typestr="|V8", shape=(3,)))
comm.broadcast(Array(ones(6), typestr="<c8", shape=(3,)))

# Each array with a stream of its own: the call comes after both, and both after the call.
N = 50_021
for turn in range(6):
    out = places.put(np.zeros(size * N, np.float32))
    a = places._streams[-1]
    with places.side_stream():
        b = places._streams[-1]
        inp, values = places.put(np.zeros(N, np.float32)), places.put(np.full(N, rank + 1, np.float32))
        places.sleep(3000)
        b.copy(inp, values)
        if turn % 3 == 0:
            comm.all_gather(out, inp)
        elif turn % 3 == 1:
            comm.all_gather(out, inp, async_op=True).wait()
        else:
            started = comm.start_all_gather(out, inp)
            for pair in started.order:
                started.wait(*pair)
            started.finish()
        places.fill(inp, 0)
    a.synchronize()
    assert (out.numpy().reshape(size, N) == np.arange(1, size + 1)[:, None]).all(), turn
    part = places.put(np.zeros(N, np.float32))
    with places.side_stream():
        values, inp = out, places.put(np.zeros(size * N, np.float32))
        started = comm.start_reduce_scatter(part, inp)
        places.sleep(3000)
        places._streams[-1].copy(inp, values)
        for pair in started.order:
            started.push(*pair)
        started.finish()
        places.fill(inp, 0)
    a.synchronize()
    assert (part.numpy() == size * (rank + 1)).all(), turn
comm.close()
