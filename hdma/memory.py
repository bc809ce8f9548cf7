"""Symmetric memory: allocated by all ranks at once and mapped by node mates, so that a call needs no stage for it."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hdma import _core
from hdma.communicator import Communicator
from hdma.errors import UsageError
from hdma.tensors import dtype_name
from hdma.world import init


class GpuArray:
    """Bytes on a GPU for any library that takes `__cuda_array_interface__`. Holds the memory."""

    def __init__(self, allocation: _core.Allocation, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
        self._allocation = allocation
        self.shape, self.dtype, self.device = shape, dtype, device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self._allocation.address if math.prod(self.shape) else 0
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (address, False), "version": 3, "stream": None}


def empty(shape: int | Sequence[int], dtype: Any, device: Any = None, comm: Communicator | None = None) -> Any:
    """A tensor in symmetric memory, its contents undefined. Collective over `comm` (the world, if None).

    All ranks give the same shape and dtype. `device`: a CUDA or ROCm GPU, or "cpu"; None: torch's current GPU, or the
    host where there is none. On a GPU, AllGather, AllToAll and Broadcast within one node read an input in symmetric
    memory where it is, with no copy before: on all ranks at the same place of the same memory, or (AllGather) all in
    place. In place it runs on copy engines alone. In host memory any tensor is as good.

    A torch dtype gives a `torch.Tensor`; any other, on a GPU, an array with `__cuda_array_interface__`, in host memory
    a numpy array. The memory is given back when `comm` is closed and the tensor is gone, not before.
    Raises `UsageError` where the ranks ask for different things, `DeviceError` where the GPU has no room or no link.
    """
    try:
        whole = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
    except TypeError:
        raise UsageError(f"empty: shape must be a number of elements or several, not {shape!r}") from None
    if any(length < 0 for length in whole):
        raise UsageError(f"empty: there is no shape {whole}")
    comm = init() if comm is None else comm
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    index = _index(device, torch)
    if index is None:
        return torch.empty(whole, dtype=dtype) if torch is not None and is_torch else np.empty(whole, dtype)
    itemsize = (
        torch.empty((), dtype=dtype).element_size() if torch is not None and is_torch else np.dtype(dtype).itemsize
    )
    nbytes = math.prod(whole) * itemsize
    if nbytes >> 60:
        raise UsageError(f"empty: shape {whole} is more than any GPU has")
    allocation = comm._empty(nbytes, index, f"hdma.empty({whole}, {dtype_name(dtype)})")
    if torch is None or not is_torch:
        return GpuArray(allocation, whole, np.dtype(dtype), index)
    if not nbytes:
        return torch.empty(whole, dtype=dtype, device=f"cuda:{index}")
    raw = GpuArray(allocation, (nbytes,), np.dtype(np.uint8), index)
    return torch.as_tensor(raw, device=f"cuda:{index}").view(dtype).view(whole)


def _index(device: Any, torch: Any) -> int | None:
    """The GPU's number in this process; None for the host."""
    if device is None:
        if torch is None or not torch.cuda.is_available():
            return None
        return int(torch.cuda.current_device())
    if isinstance(device, int):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind not in ("cuda", "hip") or (number and not number.isdecimal()):
        raise UsageError(f"empty: device must be a GPU such as cuda:0, or cpu, not {device!r}")
    if number:
        return int(number)
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0
