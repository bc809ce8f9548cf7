"""What hdma needs to know of a tensor or array: where it is, how long, of which dtype. Loads no torch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from hdma import _core
from hdma.errors import UsageError

# Flags of numpy's array interface.
_CONTIGUOUS, _WRITABLE = 0x1, 0x400


class Buffer(NamedTuple):
    """`numel` elements of `itemsize` bytes at `address`."""

    address: int
    numel: int
    itemsize: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def buffer(tensor: Any, name: str, writable: bool = False) -> Buffer:
    """The memory of a contiguous torch tensor in host memory or of a numpy array; dtypes by their common names.

    Raises `UsageError` for anything else, naming the argument.
    """
    if isinstance(tensor, np.ndarray):
        return _array_buffer(tensor, name, writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_buffer(torch, tensor, name)
    raise UsageError(f"{name} must be a torch.Tensor or a numpy.ndarray, not {type(tensor).__name__}")


# By dtype: its name and bytes. Both are slow to ask for.
_known: dict[Any, tuple[str, int]] = {}


def _array_buffer(array: np.ndarray[Any, Any], name: str, writable: bool) -> Buffer:
    dtype, itemsize = _known.get(array.dtype) or _learn_array(array.dtype, name)
    address, flags = _core.array_address(array)
    if not flags & _CONTIGUOUS:
        raise UsageError(f"{name} is not contiguous (strides {array.strides}): pass np.ascontiguousarray({name})")
    if writable and not flags & _WRITABLE:
        raise UsageError(f"{name} is read-only: pass a writable array")
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, whose mask would be lost: pass its .data and its .mask")
    return Buffer(address, array.size, itemsize, dtype)


def _learn_array(dtype: np.dtype[Any], name: str) -> tuple[str, int]:
    if not dtype.isnative:
        raise UsageError(f"{name} has dtype {dtype.str}, not in this machine's byte order: convert it first")
    if dtype.hasobject:
        raise UsageError(f"{name} holds Python objects (dtype {dtype}), which cannot be moved as bytes")
    # Of structured dtypes the name tells only the size.
    known = _known[dtype] = (dtype.name if dtype.names is None else str(dtype), dtype.itemsize)
    return known


def _torch_buffer(torch: Any, tensor: Any, name: str) -> Buffer:
    if not tensor.is_cpu:
        raise UsageError(f"{name} is on {tensor.device}, but this communicator moves host memory: pass {name}.cpu()")
    if tensor.layout != torch.strided:
        raise UsageError(f"{name} has layout {tensor.layout}: pass a dense tensor")
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous (strides {tensor.stride()}): pass {name}.contiguous()")
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(f"{name} is a lazily conjugated view: pass {name}.resolve_conj().resolve_neg()")
    known = _known.get(tensor.dtype)
    if known is None:
        known = _known[tensor.dtype] = (str(tensor.dtype).removeprefix("torch."), tensor.element_size())
    return Buffer(tensor.data_ptr(), tensor.numel(), known[1], known[0])


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
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes and a.numel > 0 and b.numel > 0
