"""A GPU driver that runs on the CPU (tests/stub): built here, and used by rank programs for arrays and streams.

A test builds it and starts ranks with `environment(**variables(build()))`, where hdma finds it like a real one. In the
ranks, StubArray is memory of the stub's GPU, which the CPU cannot touch, and Stream a stream of it.
"""

from __future__ import annotations

import ctypes as c
import fcntl
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "stub"
KERNELS = HERE.parent / "csrc" / "kernels" / "reduce_gpu.cu"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")


# For tests.


def build(folder: Path = BUILD) -> Path:
    """Compiles libcuda.so.1 and libamdhip64.so into the folder, unless they are there and newer than their sources."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {"libcuda.so.1": "cuda", "libamdhip64.so": "hip"}
    sources = [Path(__file__), *(HERE / "stub").iterdir(), KERNELS]
    newest = max(source.stat().st_mtime for source in sources)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Several test processes may share the folder.
        if all((folder / name).exists() and (folder / name).stat().st_mtime > newest for name in libraries):
            return folder
        objects = {name: folder / f"{name}.o" for name in ("driver", "kernels", "cuda", "hip")}
        _compile(["g++", *FLAGS, "-c", HERE / "stub" / f"{name}.cc", "-o", out] for name, out in objects.items())
        for library, names in libraries.items():
            parts = [objects["driver"], objects["kernels"], objects[names]]
            _compile([["g++", "-shared", f"-Wl,-soname,{library}", "-pthread", *parts, "-ldl", "-o", folder / "new"]])
            os.replace(folder / "new", folder / library)
    return folder


def _compile(commands: Iterable[Sequence[str | Path]]) -> None:
    started = [subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE) for command in commands]
    for process in started:
        errors = process.communicate()[1].decode()
        if process.returncode:
            raise RuntimeError(f"the stub does not compile:\n{errors[:4000]}")


# The stub touches every page of its memory: less than the defaults (256 and 512 MiB a rank), which matrix.py takes.
WINDOW = {"HDMA_WINDOW_BYTES": 32 << 20}


def variables(folder: Path, runtime: str = "cuda", gpus: int = 2, **more: object) -> dict[str, str]:
    """Environment variables of ranks that are to find the stub; `more` in lower case without STUB_: delay_us=100."""
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("LD_LIBRARY_PATH", "")) if part)
    stub = {"runtime": runtime, "gpus": gpus, **more}
    return {"LD_LIBRARY_PATH": path} | {f"STUB_{name.upper()}": str(value) for name, value in stub.items()}


class Line(dict[str, str]):
    """A line of the call log: `what`, and its fields."""

    def __init__(self, text: str) -> None:
        self.what, *fields = text.split()
        super().__init__(field.split("=", 1) for field in fields)


def calls(prefix: str | Path, what: str = "", **fields: object) -> list[Line]:
    """Lines of all logs with STUB_LOG=prefix, of one kind and with such fields: calls(log, "copy", kind="local")."""
    prefix = Path(prefix)
    logs = [log for log in prefix.parent.iterdir() if re.fullmatch(re.escape(prefix.name) + r"\.\d+", log.name)]
    lines = [Line(text) for log in sorted(logs) for text in log.read_text().splitlines()]
    wanted = {name: str(value) for name, value in fields.items()}
    return [line for line in lines if line.what == (what or line.what) and wanted.items() <= line.items()]


def tally(lines: Iterable[Line], field: str) -> Counter[str]:
    """How many lines have each value of a field: tally(calls(log, "copy"), "kind")."""
    return Counter(line.get(field, "") for line in lines)


# For rank programs.

RUNTIME = os.environ.get("STUB_RUNTIME", "cuda")
_library: c.CDLL | None = None


def library() -> c.CDLL:
    """The stub's library, as LD_LIBRARY_PATH finds it; never a real driver."""
    global _library
    if _library is None:
        _library = c.CDLL("libcuda.so.1" if RUNTIME == "cuda" else "libamdhip64.so")
        if not hasattr(_library, "stub_live"):
            raise RuntimeError("this is a real driver, not the stub")
        if RUNTIME == "cuda":
            call("cuInit", 0)
    return _library


def status(name: str, *args: Any) -> int:
    """Calls a function; its result. Integers that are no ctypes object pass as 64 bits, which suits all the ABI's."""
    function = getattr(library(), name)
    function.restype = c.c_int
    return int(function(*[c.c_uint64(arg & (1 << 64) - 1) if isinstance(arg, int) else arg for arg in args]))


def call(name: str, *args: Any) -> None:
    """Calls a function that has to succeed."""
    error = status(name, *args)
    if error:
        raise RuntimeError(f"{name}: {error}")


def either(cuda: str, hip: str) -> str:
    """The name of a function in the runtime in use."""
    return cuda if RUNTIME == "cuda" else hip


def use(device: int) -> None:
    """Makes a device the current one of this thread, as torch.cuda.set_device does."""
    if RUNTIME == "cuda":
        library()
        context = c.c_void_p()
        if device not in _retained:
            call("cuDevicePrimaryCtxRetain", c.byref(context), device)
            _retained[device] = context.value or 0
        call("cuCtxSetCurrent", _retained[device])
    else:
        call("hipSetDevice", device)


_retained: dict[int, int] = {}


def live(what: str) -> int:
    """What this process has not given back: "allocated", "imported", "registered", "streams", "events", "modules"."""
    return status("stub_live", what.encode())


def copy_in(address: int, array: np.ndarray) -> None:
    """Writes an array's bytes to memory of a GPU."""
    source = np.ascontiguousarray(array)
    if source.nbytes:
        more = () if RUNTIME == "cuda" else (1,)
        call(either("cuMemcpyHtoD_v2", "hipMemcpy"), address, source.ctypes.data, source.nbytes, *more)


def copy_out(address: int, nbytes: int) -> np.ndarray:
    """Reads memory of a GPU."""
    out = np.empty(nbytes, np.uint8)
    if nbytes:
        more = () if RUNTIME == "cuda" else (2,)
        call(either("cuMemcpyDtoH_v2", "hipMemcpy"), out.ctypes.data, address, nbytes, *more)
    return out


class Stream:
    """A stream of the current device. It is destroyed with this object, when its work is done."""

    def __init__(self) -> None:
        handle = c.c_void_p()
        call(either("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"), c.byref(handle), 1, 0)
        self.handle = handle.value or 0

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # Modules go first.
            return
        if getattr(self, "handle", 0):
            status(either("cuStreamDestroy_v2", "hipStreamDestroy"), self.handle)

    def synchronize(self) -> None:
        call(either("cuStreamSynchronize", "hipStreamSynchronize"), self.handle)

    def idle(self) -> bool:
        return status(either("cuStreamQuery", "hipStreamQuery"), self.handle) == 0

    def sleep(self, us: int) -> None:
        """Holds the stream for a while, as a long kernel does."""
        call("stub_sleep", self.handle, us)

    def fill(self, array: StubArray, byte: int) -> None:
        """Sets all bytes of an array, in this stream's order."""
        name = either("cuMemsetD8Async", "hipMemsetAsync")
        call(name, array.address, byte, array.nbytes, self.handle)

    def copy(self, dst: StubArray, src: StubArray) -> None:
        """Copies, in this stream's order: what an application's kernel does in tests."""
        more = () if RUNTIME == "cuda" else (3,)
        name = either("cuMemcpyAsync", "hipMemcpyAsync")
        call(name, dst.address, src.address, src.nbytes, *more, self.handle)

    def set_capturing(self, on: bool) -> None:
        call("stub_set_capturing", self.handle, int(on))


class StubArray:
    """A contiguous array in memory of the current device; never zeros at first. `stream`: what it is produced on."""

    def __init__(self, shape: int | Sequence[int], dtype: Any = np.float32, stream: Stream | None = None) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.stream = stream
        self.base: StubArray | None = None
        address = c.c_uint64()
        call(either("cuMemAlloc_v2", "hipMalloc"), c.byref(address), max(self.nbytes, 1))
        self.address = address.value

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # Modules go first.
            return
        if getattr(self, "address", 0) and self.base is None:
            status(either("cuMemFree_v2", "hipFree"), self.address)

    @classmethod
    def from_numpy(cls, array: np.ndarray, stream: Stream | None = None) -> StubArray:
        made = cls(array.shape, array.dtype, stream)
        copy_in(made.address, array)
        return made

    def write(self, array: np.ndarray) -> None:
        """Replaces the contents, at once."""
        assert array.dtype == self.dtype and array.shape == self.shape
        copy_in(self.address, array)

    def numpy(self) -> np.ndarray:
        """The contents now: waits for no stream but the null one."""
        return copy_out(self.address, self.nbytes).view(self.dtype).reshape(self.shape)

    def part(self, start: int, stop: int) -> StubArray:
        """Rows [start, stop) as an array over the same memory."""
        piece = object.__new__(StubArray)
        piece.shape, piece.dtype = (stop - start, *self.shape[1:]), self.dtype
        piece.stream, piece.base = self.stream, self
        row = self.nbytes // max(self.shape[0], 1)
        piece.address, piece.nbytes = self.address + start * row, (stop - start) * row
        return piece

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": self.stream.handle if self.stream else 1,  # 1: the legacy null stream
        }
