"""The CUDA driver's own calls, for what torch does not offer, and the arguments of hdma's kernels."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


class Arguments(ctypes.Structure):
    """ReduceArguments of csrc/kernels/reduce_gpu.cu."""

    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("also", ctypes.c_void_p),
        ("srcs", ctypes.c_void_p * 64),
        ("source_count", ctypes.c_uint),
        ("op", ctypes.c_uint),
        ("divisor", ctypes.c_int),
        ("unused", ctypes.c_uint),
        ("element_count", ctypes.c_longlong),
    )


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """Ends the program where the driver says that it has failed."""
    error = getattr(library(), name)(*args)
    if error:
        raise SystemExit(f"{name}: error {error} of the CUDA driver")
