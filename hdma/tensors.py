"""What hdma needs to know of a tensor or array: where it is, how long, of which dtype. Loads no torch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from hdma.errors import UsageError


class Buffer(NamedTuple):
    """`numel` elements of `itemsize` bytes at `address`; `owner` keeps them alive."""

    address: int
    numel: int
    itemsize: int
    dtype: str
    owner: Any

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def buffer(tensor: Any, name: str, writable: bool = False) -> Buffer:
    """The memory of a contiguous torch tensor in host memory or of a numpy array; dtypes by their common names.

    Raises `UsageError` for anything else, naming the argument.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_buffer(torch, tensor, name)
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous:
            raise UsageError(f"{name} is not contiguous (strides {tensor.strides}): pass np.ascontiguousarray({name})")
        if writable and not tensor.flags.writeable:
            raise UsageError(f"{name} is read-only: pass a writable array")
        if not tensor.dtype.isnative:
            raise UsageError(f"{name} has dtype {tensor.dtype.str}, not in this machine's byte order: convert it first")
        if tensor.dtype.hasobject:
            raise UsageError(f"{name} holds Python objects (dtype {tensor.dtype}), which cannot be moved as bytes")
        return Buffer(tensor.ctypes.data, tensor.size, tensor.dtype.itemsize, tensor.dtype.name, tensor)
    raise UsageError(f"{name} must be a torch.Tensor or a numpy.ndarray, not {type(tensor).__name__}")


def _torch_buffer(torch: Any, tensor: Any, name: str) -> Buffer:
    if tensor.layout != torch.strided:
        raise UsageError(f"{name} has layout {tensor.layout}: pass a dense tensor")
    if tensor.device.type != "cpu":
        raise UsageError(f"{name} is on {tensor.device}, but this communicator moves host memory: pass {name}.cpu()")
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous (strides {tensor.stride()}): pass {name}.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"{name} is a lazily conjugated view: pass {name}.resolve_conj().resolve_neg()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Buffer(tensor.data_ptr(), tensor.numel(), tensor.element_size(), dtype, tensor)


def dtype_name(dtype: Any) -> str:
    """'float32' for torch.float32, numpy.float32, numpy.dtype('float32') and 'float32'."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text


def overlap(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers share a byte."""
    return a.nbytes > 0 and b.nbytes > 0 and a.address < b.address + b.nbytes and b.address < a.address + a.nbytes
