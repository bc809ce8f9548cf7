"""What hdma needs to know of a tensor or array: where it is, how long, of which dtype. Loads no torch.

A `Buffer` is `numel` elements of `itemsize` bytes at `address`, `nbytes` in all. The core makes it of what is as it
should be; the functions here find out what is not.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from typing import Any

import numpy as np

from hdma import env
from hdma._core import Buffer, array_buffer, gpu_of, tensor_buffer
from hdma.errors import UsageError

# By dtype: its name, its bytes, whether it is complex. All are slow to ask for.
_known: dict[Any, tuple[str, int, bool]] = {}


def buffer(tensor: Any, name: str, writable: bool = False) -> Buffer:
    """The memory of a contiguous torch tensor, numpy array, or array on a GPU; dtypes by their common names.

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
    if hasattr(tensor, "__cuda_array_interface__"):
        return _gpu_array(tensor, name, writable)
    raise UsageError(
        f"{name} must be a torch.Tensor, a numpy.ndarray or an array with __cuda_array_interface__, not "
        f"{type(tensor).__name__}"
    )


def runtime() -> str:
    """ "cuda" or "hip": what tensors on GPUs belong to. Raises `UsageError` where HDMA_DEVICE keeps GPUs out."""
    wanted = _wanted(os.environ.get("HDMA_DEVICE", ""))
    if wanted == "host":
        raise UsageError("the tensor is on a GPU, but HDMA_DEVICE=host: unset it, or pass tensors in host memory")
    if wanted != "auto":
        return wanted
    torch = sys.modules.get("torch")
    return "hip" if torch is not None and torch.version.hip else "cuda"


@functools.cache
def _wanted(text: str) -> str:
    """HDMA_DEVICE, wanted for every array: read anew only where it has changed, for reading takes as long as a call."""
    return env.DEVICE.read()


def current_streams(tensors: tuple[Any, ...], index: int) -> tuple[int, ...]:
    """The streams that the caller's work on tensors is on, that of the first one first: torch's current one, or what
    the arrays themselves say."""
    if hasattr(tensors[0], "is_cuda"):
        return (int(sys.modules["torch"]._C._cuda_getCurrentRawStream(index)),)
    # Where an array names none it has to be ready for any: 1 is the legacy default stream.
    return tuple(dict.fromkeys(each.__cuda_array_interface__.get("stream") or 1 for each in tensors))


def _gpu_array(array: Any, name: str, writable: bool) -> Buffer:
    """Of CuPy, Numba and others."""
    interface = array.__cuda_array_interface__
    # Names such as bfloat16 are not in the interface: there it is a void of two bytes.
    try:
        dtype = np.dtype(getattr(array, "dtype", interface["typestr"]))
    except TypeError:  # Of a library's own making.
        dtype = np.dtype(interface["typestr"])
    _check_dtype(dtype, name)
    address, read_only = interface["data"]
    address = int(address or 0)
    numel = math.prod(interface["shape"])
    if writable and read_only:
        raise UsageError(f"{name} is read-only: pass a writable array")
    if interface.get("mask") is not None:
        raise UsageError(f"{name} is a masked array, whose mask would be lost: pass its data and its mask")
    if not _is_dense(interface["shape"], interface.get("strides"), dtype.itemsize):
        raise UsageError(f"{name} is not contiguous (strides {interface['strides']}): pass a contiguous copy")
    # Their interface does not say which GPU. The driver knows, though not of an empty array without an address, nor in
    # a thread that has no GPU.
    index = gpu_of(runtime(), address) if address else -1
    if index < 0:
        device = getattr(array, "device", 0)
        index = int(device if isinstance(device, int) else getattr(device, "id", 0))
    return Buffer((address, numel, numel * dtype.itemsize, dtype.itemsize, _text(dtype), index))


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    """In order and without gaps. Nothing is ever one stride on where a dimension has a length of one, or none."""
    if strides is None or 0 in shape:
        return True
    nbytes = itemsize
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length != 1 and stride != nbytes:
            return False
        nbytes *= length
    return True


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if not dtype.isnative:
        raise UsageError(f"{name} has dtype {dtype.str}, not in this machine's byte order: convert it first")
    if dtype.hasobject:
        raise UsageError(f"{name} holds Python objects (dtype {dtype}), which cannot be moved as bytes")
    if dtype.itemsize == 0:
        raise UsageError(f"{name} has dtype {dtype}, whose elements have no bytes: there is nothing to move")


def _text(dtype: np.dtype[Any]) -> str:
    # Of structured dtypes the name tells only the size.
    return dtype.name if dtype.names is None else str(dtype)


def _odd_array(array: np.ndarray[Any, Any], name: str, writable: bool) -> Buffer:
    """A dtype not yet met, a subclass, or the reason why it cannot be used."""
    dtype = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, whose mask would be lost: pass its .data and its .mask")
    if not array.flags.c_contiguous:
        raise UsageError(f"{name} is not contiguous (strides {array.strides}): pass np.ascontiguousarray({name})")
    if writable and not array.flags.writeable:
        raise UsageError(f"{name} is read-only: pass a writable array")
    _check_dtype(dtype, name)
    # Numpy's own structure has no flags for structured dtypes, so that they always come here.
    text = _text(dtype)
    _known[dtype] = (text, dtype.itemsize, False)
    return Buffer((array.ctypes.data, array.size, array.nbytes, dtype.itemsize, text, -1))


def _odd_tensor(torch: Any, tensor: Any, name: str) -> Buffer:
    if not tensor.is_cpu and not tensor.is_cuda:
        raise UsageError(f"{name} is on {tensor.device}: hdma moves host memory and that of CUDA and ROCm GPUs")
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
