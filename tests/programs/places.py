"""Where a rank program's arrays are: in host memory, on a GPU (through torch), or on the stub of one (TEST_PLACE).

Programs make numpy arrays, put() them, call hdma, and look at numpy() of the results, so that each runs anywhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PLACE = os.environ.get("TEST_PLACE", "host")
ON_GPU = PLACE != "host"
torch: Any = None
stub: Any = None
_streams: list[Any] = [None]  # of the stub: the current one is the last


def start(rank: int | None = None) -> None:
    """Once, before hdma.init(): the GPU of this rank, of TEST_GPUS or all that there are."""
    global torch, stub
    number = int(os.environ["RANK"]) if rank is None else rank
    if PLACE == "torch":
        import torch as module

        torch = module
        torch.cuda.set_device(number % int(os.environ.get("TEST_GPUS", torch.cuda.device_count())))
    if PLACE == "stub":
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        import stub_gpu

        import hdma.kernels

        stub = stub_gpu
        hdma.kernels.code = lambda runtime, arch: b"the stub knows its kernels by name"
        stub.use(number % int(os.environ["STUB_GPUS"]))
        _streams[0] = stub.Stream()


def put(array: np.ndarray) -> Any:
    """The array's contents, as far off alignment as it is itself."""
    offset, nbytes = array.ctypes.data % 64, array.nbytes
    if PLACE == "host":
        return array
    if PLACE == "torch":
        name = "bool" if array.dtype == np.bool_ else array.dtype.name
        made = torch.zeros(offset + nbytes, dtype=torch.uint8, device="cuda")[offset:].view(getattr(torch, name))
        if nbytes:
            made.view(torch.uint8).copy_(torch.from_numpy(np.array(array).view(np.uint8)))
        return made
    # Longer, so that an empty array too lies within an allocation.
    made = stub.StubArray(offset + nbytes + 64, np.uint8, _streams[-1]).part(offset, offset + nbytes)
    made.dtype, made.shape = array.dtype, array.shape
    if nbytes:
        stub.copy_in(made.address, array)
    return made


def part(x: Any, where: slice) -> Any:
    return x.part(where.start, where.stop) if PLACE == "stub" else x[where]


def numpy(x: Any, dtype: Any) -> np.ndarray:
    """The contents, behind the current stream's work."""
    if PLACE == "host":
        return np.asarray(x)
    if PLACE == "torch":
        return x.view(torch.uint8).cpu().numpy().view(dtype) if x.numel() else np.zeros(0, dtype)
    _streams[-1].synchronize()
    return x.numpy()


def write(x: Any, array: np.ndarray) -> None:
    """New contents, behind the current stream's work."""
    if PLACE == "host":
        x[...] = array
    elif PLACE == "torch":
        if array.nbytes:
            x.view(torch.uint8).copy_(torch.from_numpy(np.array(array).view(np.uint8)))
    elif array.nbytes:
        _streams[-1].synchronize()
        stub.copy_in(x.address, array)


def fill(x: Any, byte: int) -> None:
    """All bytes, on the current stream."""
    if PLACE == "host":
        x.view(np.uint8)[...] = byte
    elif PLACE == "torch":
        x.view(torch.uint8).fill_(byte)
    else:
        _streams[-1].fill(x, byte)


def sleep(us: int) -> None:
    """Holds the current stream for about so long."""
    if PLACE == "torch":
        torch.cuda._sleep(us * 1500)
    elif PLACE == "stub":
        _streams[-1].sleep(us)


def synchronize() -> None:
    if PLACE == "torch":
        torch.cuda.synchronize()
    elif PLACE == "stub":
        _streams[-1].synchronize()


def synchronize_current() -> None:
    """Waits for the current stream alone."""
    if PLACE == "torch":
        torch.cuda.current_stream().synchronize()
    else:
        synchronize()


def device() -> int:
    """The number of this rank's GPU."""
    number = int(os.environ["RANK"])
    return torch.cuda.current_device() if PLACE == "torch" else number % int(os.environ["STUB_GPUS"])


def wrap(array: Any) -> Any:
    """An array of hdma.empty() on the stub, as the stub's own."""
    made = object.__new__(stub.StubArray)
    made.shape, made.dtype, made.base, made.stream = array.shape, array.dtype, array, _streams[-1]
    made.address, _ = array.__cuda_array_interface__["data"]
    made.nbytes = int(np.prod(array.shape)) * array.dtype.itemsize
    return made


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """A new current stream; arrays that are put meanwhile belong to it."""
    if PLACE == "torch":
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
        return
    if PLACE == "stub":
        _streams.append(stub.Stream())
    yield
    if PLACE == "stub":
        _streams.pop().synchronize()
