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
            return tensor_buffer(tensor, _known) or _odd_tensor(torch, tensor, name)
        except RuntimeError as error:  # Of tensors without strides or memory of their own.
            raise UsageError(f"{name} has layout {tensor.layout}: pass a dense tensor ({error})") from error
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
    # Of structured dtypes the name tells only the size.
    _known[dtype] = (dtype.name if dtype.names is None else str(dtype), dtype.itemsize, False)
    found = array_buffer(array, _known, writable)
    assert found is not None
    return found


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
    assert found is not None
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
