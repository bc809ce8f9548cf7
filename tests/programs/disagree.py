"""Ranks that disagree in one way after another; each time a new communicator."""

from __future__ import annotations

import sys

import numpy as np

import hdma

F32, F16 = np.float32, np.float16


def ag(n: int, dtype: type = F32) -> None:
    comm.all_gather(np.zeros(n * comm.size, dtype), np.zeros(n, dtype))


def rs(n: int, dtype: type = F32, **options: object) -> None:
    comm.reduce_scatter(np.zeros(n, dtype), np.zeros(n * comm.size, dtype), **options)


def swapped(first: int) -> None:
    for numel in (first, 303 - first):
        ag(numel)


CASES = {
    "operation": (lambda: ag(100), lambda: rs(100), "all_gather(float32, 400", "reduce_scatter(sum, float32, 400"),
    "size": (lambda: ag(100), lambda: ag(101), "400 bytes", "404 bytes"),
    "large size": (lambda: rs(1 << 20), lambda: rs(3 << 20), "4194304 bytes", "12582912 bytes"),
    "dtype": (lambda: ag(100, F16), lambda: ag(100, np.int16), "float16", "int16"),
    "nothing": (lambda: ag(0), lambda: ag(100), "all_gather(float32, 0 bytes", "400 bytes"),
    "barrier": (lambda: comm.barrier(), lambda: ag(0), "barrier()", "all_gather"),
    "wire dtype": (
        lambda: rs(100, F16),
        lambda: rs(100, F16, wire_dtype="float32"),
        "float16 on the wire",
        "float32 on",
    ),
    "order": (lambda: swapped(101), lambda: swapped(202), "404 bytes", "808 bytes"),
    "asynchronous": (
        lambda: comm.all_gather(np.zeros(comm.size), np.zeros(1), async_op=True).wait(),
        lambda: comm.reduce_scatter(np.zeros(1, F32), np.zeros(comm.size, F32), async_op=True).wait(),
        "all_gather(float64",
        "reduce_scatter(sum, float32",
    ),
    "one call fewer": (lambda: comm.close(), lambda: ag(100), "closed its communicator after 1 calls", "made call 2"),
}
odd = int(sys.argv[1])
for name, (common, different, *both) in CASES.items():
    comm = hdma.init()
    odd_rank = odd % comm.size
    try:
        comm.barrier()
        (different if comm.rank == odd_rank else common)()
        # A rank whose own call was over before the others' began learns of it in its next.
        comm.barrier()
        sys.exit(f"{name}: no error on rank {comm.rank}")
    except hdma.Error as error:
        if comm.closed and name == "one call fewer" and "is closed" in str(error):
            continue
        text = str(error)
    assert all(each in text for each in both), (name, comm.rank, text)
    assert str(odd_rank) in text, (name, text)
    assert comm.closed
    comm.close()
print("all found")
