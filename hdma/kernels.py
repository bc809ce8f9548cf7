"""The GPU's kernels as machine code, compiled where they run, by the compiler that comes with the GPU's runtime.

Why not code objects in the wheel: one wheel, built on a machine without any GPU toolkit, serves every architecture,
of today and of later; it holds source that can be read, not blobs; and the compilers (NVRTC, hipRTC) are there
wherever torch's GPU builds are. It costs a few seconds once per machine: what was compiled is kept in
$XDG_CACHE_HOME/hdma or ~/.cache/hdma. Without such a folder each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hdma import _core
from hdma.errors import DeviceError

# No contraction to fma, subnormals kept, exact division: the same numbers as the host's.
CUDA_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")
HIP_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fhip-fp32-correctly-rounded-divide-sqrt")


@dataclass(frozen=True)
class Kind:
    """A run-time compiler: the two have the same interface but for the names."""

    prefix: str
    sonames: tuple[str, ...]
    folders: tuple[str, ...]  # in which wheels keep it, below each entry of sys.path
    homes: tuple[tuple[str, str], ...]  # variables, or nothing, and the folder below them
    options: tuple[str, ...]
    arch: str
    result: str  # what it calls the machine code
    advice: str


KINDS = {
    "cuda": Kind(
        "nvrtc",
        ("libnvrtc.so.13", "libnvrtc.so.12"),
        ("nvidia/cu1*/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"),
        (("CUDA_HOME", "lib64"), ("CUDA_PATH", "lib64"), ("", "/usr/local/cuda/lib64"), ("CONDA_PREFIX", "lib")),
        CUDA_OPTIONS,
        "--gpu-architecture=",
        "CUBIN",
        "pip install nvidia-cuda-nvrtc (it comes with torch's CUDA builds and with the CUDA toolkit)",
    ),
    "hip": Kind(
        "hiprtc",
        ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"),
        ("_rocm_sdk_core/lib", "torch/lib"),
        (("ROCM_PATH", "lib"), ("ROCM_HOME", "lib"), ("", "/opt/rocm/lib")),
        HIP_OPTIONS,
        "--offload-arch=",
        "Code",
        "install ROCm's hipRTC (it comes with torch's ROCm builds, and with ROCm as package hip-runtime-amd)",
    ),
}


def code(runtime: str, arch: str) -> bytes:
    """The module of all kernels for `arch` ("sm_90"; "gfx942") of `runtime` ("cuda"; "hip"), compiled or kept.

    For a CUDA architecture that the compiler is too old to know it is PTX, which the driver compiles.
    Raises `DeviceError` where there is no compiler or it fails.
    """
    compiler = Compiler(KINDS[runtime])
    options, result, key = _order(compiler, runtime, arch)
    found = _read(key)
    if found is None:
        found = compiler.compile(_core.kernel_source(), options, result)[0]
        _write(key, found)
    return found


def prospect(runtime: str, arch: str) -> tuple[str, bool]:
    """The compiler that `code` would use, and whether what it would compile is kept. Raises as `code` does."""
    compiler = Compiler(KINDS[runtime])
    kept = _read(_order(compiler, runtime, arch)[2]) is not None
    return f"{compiler.path} ({compiler.version[0]}.{compiler.version[1]})", kept


def _order(compiler: Compiler, runtime: str, arch: str) -> tuple[list[str], str, bytes]:
    """Options, name of the result, and key in the cache."""
    target, result = compiler.target(arch)
    options = [*compiler.kind.options, compiler.kind.arch + target]
    what = [runtime, arch, *map(str, compiler.version), *options, _core.kernel_source()]
    return options, result, hashlib.sha256("\0".join(what).encode()).digest()


class Compiler:
    """NVRTC or hipRTC, called by ctypes."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.path, self._library = _load(kind)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def target(self, arch: str) -> tuple[str, str]:
        """What to compile for, and the name of the result."""
        number = "".join(filter(str.isdigit, arch))
        if self.kind.prefix == "nvrtc" and number:
            count = ctypes.c_int()
            self._call("GetNumSupportedArchs", ctypes.byref(count))
            known = (ctypes.c_int * count.value)()
            self._call("GetSupportedArchs", known)
            if int(number) > max(known):
                return f"compute_{max(known)}", "PTX"
        return arch, self.kind.result

    def compile(self, source: str, options: list[str], result: str) -> tuple[bytes, str]:
        """The code, and what the compiler had to say."""
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"reduce_gpu.cu", 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = self._status("CompileProgram", program, len(options), given)
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if failed:
                raise DeviceError(
                    f"{self._name} cannot compile hdma's kernels: {self._error(failed)}. "
                    f"Options: {' '.join(options)}. Its log:\n{log}"
                )
            return self._bytes(result, program), log
        finally:
            self._status("DestroyProgram", ctypes.byref(program))

    @property
    def _name(self) -> str:
        return f"{self.kind.prefix} ({self.path})"

    def _status(self, name: str, *args: object) -> int:
        try:
            return int(getattr(self._library, self.kind.prefix + name)(*args))
        except AttributeError:
            raise DeviceError(f"{self._name} has no {self.kind.prefix}{name}: too old, or another library") from None

    def _call(self, name: str, *args: object) -> None:
        failed = self._status(name, *args)
        if failed:
            raise DeviceError(f"{self.kind.prefix}{name} of {self.path}: {self._error(failed)}")

    def _error(self, status: int) -> str:
        describe = getattr(self._library, self.kind.prefix + "GetErrorString")
        describe.restype = ctypes.c_char_p
        return f"{(describe(status) or b'unknown error').decode()} ({status})"

    def _bytes(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"Get{name}", program, text)
        return text.raw[: size.value]


def _load(kind: Kind) -> tuple[str, ctypes.CDLL]:
    """The compiler that this process uses already, the system's, or a wheel's or toolkit's."""
    for mode in (os.RTLD_NOLOAD, 0):
        for name in kind.sonames:
            with suppress(OSError):
                library = ctypes.CDLL(name, mode=mode | os.RTLD_NOW)
                path = _loaded_from(name)
                _load_builtins(path.parent)
                return str(path), library
    failures, folders = [], list(dict.fromkeys(_folders(kind)))
    for folder in folders:
        for path in (folder / name for name in kind.sonames):
            if not path.is_file():
                continue
            try:
                _load_builtins(folder)
                return str(path), ctypes.CDLL(str(path))
            except OSError as error:
                failures.append(f"{path}: {error}")
    raise DeviceError(
        f"no {kind.prefix} to compile hdma's GPU kernels with: tried {', '.join(kind.sonames)} by name and in "
        f"{', '.join(map(str, folders)) or 'no folder, as none of the usual ones exists'}. "
        + "".join(f"{failure}. " for failure in failures)
        + f"What helps: {kind.advice}"
    )


def _load_builtins(folder: Path) -> None:
    """NVRTC opens this library by its bare name, which is found if it is loaded already."""
    for path in sorted(folder.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


def _loaded_from(name: str) -> Path:
    """The file of a library of this process that was asked for by name; the name if that cannot be found out."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.is_absolute() and path.name.startswith(name):
                return path
    return Path(name)


def _folders(kind: Kind) -> Iterator[Path]:
    for entry in sys.path:
        for pattern in kind.folders:
            with suppress(OSError):
                yield from sorted(Path(entry).glob(pattern), reverse=True)
    for variable, folder in kind.homes:
        home = os.environ.get(variable, "") if variable else "/"
        if home and Path(home, folder).is_dir():
            yield Path(home, folder)


# The cache. A file is a digest and the code; it is machine code, so that only this user's own files are run. Whatever
# is wrong with it costs a compilation, no more.


def folder() -> Path | None:
    """Where compiled kernels are kept; None if there is no such place."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    above = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(above, "hdma") if os.path.isabs(above) else None


def _path(key: bytes) -> Path | None:
    kept = folder()
    return kept / f"kernels-{key.hex()[:32]}" if kept else None


def _digest(key: bytes, text: bytes) -> bytes:
    return hashlib.sha256(key + text).digest()


def _read(key: bytes) -> bytes | None:
    path = _path(key)
    try:
        if path is None:
            return None
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not ours or not stat.S_ISREG(status.st_mode):
                return None
            digest, text = file.read(32), file.read()
    except OSError:
        return None
    return text if text and digest == _digest(key, text) else None


def _write(key: bytes, text: bytes) -> None:
    path = _path(key)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several ranks at once: each writes a file of its own, and the last to rename it wins.
        fd, name = tempfile.mkstemp(prefix="new-", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(_digest(key, text) + text)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
