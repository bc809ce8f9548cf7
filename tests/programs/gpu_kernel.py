"""Launches every kernel on the GPU by the driver's own calls and compares with what tests/test_kernels.py expects."""

from __future__ import annotations

import ctypes as c
import itertools
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from cuda_driver import Arguments
from test_kernels import OPS, PAIRS, expected

from hdma import _core, kernels

cu = c.CDLL("libcuda.so.1")


def call(name: str, *args: object) -> None:
    error = getattr(cu, name)(*args)
    assert error == 0, f"{name}: {error}"


context, device, module = c.c_void_p(), c.c_int(), c.c_void_p()
call("cuInit", 0)
call("cuDeviceGet", c.byref(device), 0)
call("cuDevicePrimaryCtxRetain", c.byref(context), device)
call("cuCtxSetCurrent", context)
code = kernels.code("cuda", _core.gpu_info("cuda", 0)[2])
call("cuModuleLoadData", c.byref(module), code)
chance = random.Random(1)
room = c.c_uint64()
ROOM, SLOT = 1 << 26, 1 << 21
call("cuMemAlloc_v2", c.byref(room), c.c_size_t(ROOM))


def launch(name: str, arguments: Arguments, blocks: int) -> None:
    function = c.c_void_p()
    call("cuModuleGetFunction", c.byref(function), module, name.encode())
    parameters = (c.c_void_p * 1)(c.addressof(arguments))
    call("cuLaunchKernel", function, blocks, 1, 1, 512, 1, 1, 0, None, parameters, None)
    call("cuCtxSynchronize")


def store(slot: int, array: np.ndarray, offset: int) -> int:
    address = room.value + slot * SLOT + offset
    if array.nbytes:
        call("cuMemcpyHtoD_v2", c.c_uint64(address), array.ctypes.data_as(c.c_void_p), c.c_size_t(array.nbytes))
    return address


def fetch(address: int, array: np.ndarray) -> None:
    call("cuMemcpyDtoH_v2", array.ctypes.data_as(c.c_void_p), c.c_uint64(address), c.c_size_t(array.nbytes))


count = 0
sizes = (1, 7, 1000, 70_001) if "quick" in sys.argv else (1, 2, 7, 15, 129, 1000, 4099, 70_001, 200_000)
for (source, result), op in itertools.product(PAIRS, OPS):
    if op == "avg" and source.kind in "iub":
        continue
    for numel in sizes:
        sources = chance.choice((1, 2, 3, 8, 9))
        # Floats of all sizes, so that sums overflow, and NaN; bools are 0 or 1.
        raw = np.random.default_rng(count).integers(0, 256, (sources, numel * source.itemsize), np.uint8)
        inputs = [x.view(source) if source.kind != "b" else (x & 1).view(source) for x in raw]
        together, offset = chance.random() < 0.5, chance.randrange(16) * result.itemsize
        offsets = [offset if together else chance.randrange(16) * source.itemsize for _ in inputs]
        addresses = [store(i + 1, x, at) for i, (x, at) in enumerate(zip(inputs, offsets))]
        got = np.full(numel + 4, 0x5A, np.uint8).repeat(result.itemsize).view(result)
        dst = store(0, got, offset)
        divisor = sources if op == "avg" else 1
        pointers = (c.c_void_p * 64)(*addresses)
        arguments = Arguments(dst, None, pointers, sources, OPS.index(op), divisor, 0, numel)
        launch(f"hdma_reduce_{source.name}_{result.name}", arguments, chance.choice((1, 3, 16)))
        fetch(dst, got)
        with np.errstate(all="ignore"):
            want = expected(inputs, op, divisor, result)
        assert (got[numel:].view(np.uint8) == 0x5A).all(), (source, result, op, numel, "wrote past the end")
        a, b = got[:numel], want
        if result.kind not in "iub":
            nan = np.isnan(b.astype(np.float64))
            assert (np.isnan(a.astype(np.float64)) == nan).all(), (source, result, op, numel, sources, "NaN")
            a, b = a[~nan], b[~nan]
        same = a.view(np.uint8) == b.view(np.uint8)
        assert same.all(), (source, result, op, numel, sources, offsets, np.flatnonzero(~same)[:5])
        count += 1
for numel, to, at, second in itertools.product((1, 17, 4096, 1_000_003), (0, 1, 4, 8), (0, 1, 4, 8), (None, 0, 5)):
    x = np.random.default_rng(numel).integers(0, 256, numel, np.uint8)
    got = np.full(numel + 16, 0x5A, np.uint8)
    src, dst = store(1, x, at), store(0, got, to)
    also = None if second is None else store(2, got, second)
    launch("hdma_copy", Arguments(dst, also, (c.c_void_p * 64)(src), 1, 0, 1, 0, numel), 16)
    for place in (dst,) if also is None else (dst, also):
        fetch(place, got)
        assert np.array_equal(got[:numel], x) and (got[numel:] == 0x5A).all(), (numel, to, at, second)
    count += 1
print(f"{count} launches right")
