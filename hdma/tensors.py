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
    """`numel` elements of `itemsize` bytes at `address`, `nbytes` in all."""

    address: int
    numel: int
    nbytes: int
    itemsize: int
    dtype: str


# A quarter of the time of calling Buffer, twice in every call.
_new = tuple.__new__


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


# By dtype: its name, its bytes, whether it is complex. All are slow to ask for.
_known: dict[Any, tuple[str, int, bool]] = {}


def _array_buffer(array: np.ndarray[Any, Any], name: str, writable: bool) -> Buffer:
    dtype, itemsize, _ = _known.get(array.dtype) or _learn_array(array.dtype, name)
    address, flags = _core.array_address(array)
    if not flags & _CONTIGUOUS:
        raise UsageError(f"{name} is not contiguous (strides {array.strides}): pass np.ascontiguousarray({name})")
    if writable and not flags & _WRITABLE:
        raise UsageError(f"{name} is read-only: pass a writable array")
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, whose mask would be lost: pass its .data and its .mask")
    numel = array.size
    return _new(Buffer, (address, numel, numel * itemsize, itemsize, dtype))


def _learn_array(dtype: np.dtype[Any], name: str) -> tuple[str, int, bool]:
    if not dtype.isnative:
        raise UsageError(f"{name} has dtype {dtype.str}, not in this machine's byte order: convert it first")
    if dtype.hasobject:
        raise UsageError(f"{name} holds Python objects (dtype {dtype}), which cannot be moved as bytes")
    # Of structured dtypes the name tells only the size.
    known = _known[dtype] = (dtype.name if dtype.names is None else str(dtype), dtype.itemsize, False)
    return known


def _torch_buffer(torch: Any, tensor: Any, name: str) -> Buffer:
    try:
        dtype, itemsize, is_complex = _known.get(tensor.dtype) or _learn_torch(tensor)
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not (is_complex and tensor.is_conj()):
            numel = tensor.numel()
            return _new(Buffer, (tensor.data_ptr(), numel, numel * itemsize, itemsize, dtype))
    except RuntimeError as error:  # Of tensors without strides or memory of their own.
        raise UsageError(f"{name} has layout {tensor.layout}: pass a dense tensor ({error})") from error
    if not tensor.is_cpu:
        raise UsageError(f"{name} is on {tensor.device}, but this communicator moves host memory: pass {name}.cpu()")
    if tensor.layout != torch.strided:
        raise UsageError(f"{name} has layout {tensor.layout}: pass a dense tensor")
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous (strides {tensor.stride()}): pass {name}.contiguous()")
    raise UsageError(f"{name} is a lazily conjugated view: pass {name}.resolve_conj().resolve_neg()")


def _learn_torch(tensor: Any) -> tuple[str, int, bool]:
    name = str(tensor.dtype).removeprefix("torch.")
    known = _known[tensor.dtype] = (name, tensor.element_size(), tensor.is_complex())
    return known


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
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes
