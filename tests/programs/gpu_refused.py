"""A rank whose GPU cannot be used, in the way that the first argument says: a clear error, and the host goes on."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import hdma

HOW, EXPECTED = sys.argv[1], sys.argv[2]


class Array:
    """Says that it is on a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}


def refused(call: Any, expected: str) -> None:
    try:
        call()
    except hdma.Error as error:
        assert expected in str(error), f"{type(error).__name__}: {error}"
    else:
        sys.exit(f"no error that says {expected!r}")


out: Any = Array()
inp: Any = Array()
if HOW not in ("nothing", "no gpu"):
    import places

    if HOW == "no code":
        import hdma.kernels as kernels

        compile_it = kernels.code
    places.start()
comm = hdma.init()
if HOW == "no code":
    kernels.code = compile_it
if out.__class__ is Array and HOW not in ("nothing", "no gpu"):
    out, inp = places.put(np.zeros(comm.size * 4, np.float32)), places.put(np.ones(4, np.float32))
if HOW == "host only":
    refused(lambda: comm.all_gather(out, inp), EXPECTED)
elif HOW == "usage":
    comm.all_gather(out, inp)
    host = np.zeros(4, np.float32)
    refused(lambda: comm.all_gather(out, host), "inp is in host memory")
    refused(lambda: comm.reduce_scatter(host, out), "must be in the same place")
    refused(lambda: comm.all_to_all(out, np.zeros(comm.size * 4, np.float32)), "must be in the same place")
    if places.PLACE == "stub":
        odd = places.put(np.zeros(comm.size * 4 + 1, np.float32))
        odd.address += 1
        refused(lambda: comm.all_reduce(odd), "not aligned")
        odd.address -= 1
        stream = places._streams[-1]
        stream.set_capturing(True)
        refused(lambda: comm.all_gather(out, inp), "captured")
        stream.set_capturing(False)
        places.stub.use(1 - comm.rank % 2)
        there = places.stub.StubArray.from_numpy(np.zeros(4, np.float32), None)
        refused(lambda: comm.all_reduce(there), "one GPU a rank")
        places.stub.use(comm.rank % 2)
    else:
        torch = places.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            refused(lambda: comm.all_gather(out, inp), "captured")
    comm.all_gather(out, inp)
    assert (places.numpy(out, np.float32) == 1).all()
else:
    for _ in range(2):
        refused(lambda: comm.all_gather(out, inp), EXPECTED)
assert not comm.closed
x = np.full(1000, 1.0)
comm.all_reduce(x)
assert (x == comm.size).all()
comm.close()
