"""What hdma needs to know of a tensor or array: where it is, how long, of which dtype. Loads no torch.

A `Buffer` is `numel` elements of `itemsize` bytes at `address`, `nbytes` in all. The core makes it of what is as it
should be; the functions here find out what is not.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hdma._core import Buffer, array_buffer, tensor_buffer
from hdma.errors import UsageError

# By dtype: its name, its bytes, whether it is complex. All are slow to ask for.
_known: dict[Any, tuple[str, int, bool]] = {}


def buffer(tensor: Any, name: str, writable: bool = False) -> Buffer:
    """The memory of a contiguous torch tensor in host memory or of a numpy array; dtypes by their common names.

    Raises `UsageError` for anything else, naming the argument.
    """
    if isinstance(tensor, np.ndarray):
        found = array_buffer(tensor, _known, writable)
        return found if found is not None and type(tensor) is np.ndarray else _odd_array(tensor, name, writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        try:
            found = tensor_buffer(tensor, _known)
        except RuntimeError:  # Of tensors without strides or memory of their own.
            found = None
        return found or _odd_tensor(torch, tensor, name)
    raise UsageError(f"{name} must be a torch.Tensor or a numpy.ndarray, not {type(tensor).__name__}")


def _odd_array(array: np.ndarray[Any, Any], name: str, writable: bool) -> Buffer:
    """A dtype not yet met, a subclass, or the reason why it cannot be used."""
    dtype = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, whose mask would be lost: pass its .data and its .mask")
    if not array.flags.c_contiguous:
        raise UsageError(f"{name} is not contiguous (strides {array.strides}): pass np.ascontiguousarray({name})")
    if writable and not array.flags.writeable:
        raise UsageError(f"{name} is read-only: pass a writable array")
    if not dtype.isnative:
        raise UsageError(f"{name} has dtype {dtype.str}, not in this machine's byte order: convert it first")
    if dtype.hasobject:
        raise UsageError(f"{name} holds Python objects (dtype {dtype}), which cannot be moved as bytes")
    if dtype.itemsize == 0:
        raise UsageError(f"{name} has dtype {dtype}, whose elements have no bytes: there is nothing to move")
    # Of structured dtypes the name tells only the size; and numpy's own structure has no flags for them, so that they
    # always come here.
    text = dtype.name if dtype.names is None else str(dtype)
    _known[dtype] = (text, dtype.itemsize, False)
    return Buffer((array.ctypes.data, array.size, array.nbytes, dtype.itemsize, text))


def _odd_tensor(torch: Any, tensor: Any, name: str) -> Buffer:
    if not tensor.is_cpu:
        raise UsageError(f"{name} is on {tensor.device}, but this communicator moves host memory: pass {name}.cpu()")
    if tensor.layout != torch.strided:
        raise UsageError(f"{name} has layout {tensor.layout}: pass a dense tensor")
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous (strides {tensor.stride()}): pass {name}.contiguous()")
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(f"{name} is a lazily conjugated view: pass {name}.resolve_conj().resolve_neg()")
    _known[tensor.dtype] = (str(tensor.dtype).removeprefix("torch."), tensor.element_size(), tensor.is_complex())
    found = tensor_buffer(tensor, _known)
    if found is None:
        raise UsageError(
            f"{name} has no memory (a fake tensor, or its storage was resized to nothing): give it some first"
        )
    return found


def dtype_name(dtype: Any) -> str:
    """'float32' for torch.float32, numpy.float32, numpy.dtype('float32') and 'float32'."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text
