"""Networks, devices and launchers that are here, whether or not this version of hdma uses them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# A program that only prints its version needs no longer, unless it never will.
_PROGRAM_S = 10.0
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(*MPI.get_vendor()[:1], ".".join(map(str, MPI.get_vendor()[1])), sep="\\n")
"""


def wires() -> list[dict[str, Any]]:
    """Networks by name but RDMA, which is in rdma.py: whether this version uses them, the library and the devices."""
    return [{"name": "tcp", "used": True, "library": None, "devices": _names("/sys/class/net")}]


def devices() -> list[dict[str, Any]]:
    """Where tensors may be: the driver's library and the device files found. What the drivers say: gpus.py."""
    nvidia = [f"/dev/{name}" for name in _names("/dev") if name.removeprefix("nvidia").isdecimal()]
    amd = [path for path in ("/dev/kfd",) if os.path.exists(path)]
    return [
        {"name": "host", "used": True, "library": None, "devices": []},
        {"name": "cuda", "used": False, "library": _library("libcuda.so.1"), "devices": nvidia},
        {"name": "hip", "used": False, "library": _hip_library(), "devices": amd},
    ]


def mpirun() -> dict[str, str] | None:
    """The mpirun that the shell would start: path, `mpi` (Open MPI, MPICH or empty), version line."""
    path = shutil.which("mpirun")
    if path is None:
        return None
    printed = _output([path, "--version"])
    mpi = "Open MPI" if "Open MPI" in printed else "MPICH" if "HYDRA" in printed else ""
    number = re.search(r"(?:Open MPI\)|Version:)\s+([\w.]+)", printed)
    return {"path": path, "mpi": mpi, "version": number[1] if number else ""}


def mpi4py_library() -> dict[str, str] | None:
    """The MPI that mpi4py loads, in a process of its own that does not initialise it; `error` if it cannot."""
    done = _run([sys.executable, "-c", _MPI])
    if isinstance(done, str):
        return {"mpi": "", "version": "", "error": done}
    lines = done.stdout.split("\n")
    if done.returncode or len(lines) < 2:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        if any("No module named 'mpi4py'" in line for line in errors):
            return None
        return {"mpi": "", "version": "", "error": errors[-1] if errors else f"exit code {done.returncode}"}
    return {"mpi": lines[0], "version": lines[1], "error": ""}


def _library(name: str) -> str | None:
    """`name` if the loader finds it. Loading a driver's library neither starts nor holds a device."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


def _hip_library() -> str | None:
    """By the names that the core tries; else that of torch or of ROCm's wheels, which programs that load them use."""
    names = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
    brought = (
        str(Path(entry, folder, name))
        for entry in sys.path
        for folder in ("torch/lib", "_rocm_sdk_core/lib")
        for name in names
    )
    return next(filter(None, map(_library, names)), None) or next(filter(os.path.isfile, brought), None)


def _names(folder: str) -> list[str]:
    try:
        return sorted(path.name for path in Path(folder).iterdir())
    except OSError:
        return []


def _output(command: list[str]) -> str:
    done = _run(command)
    return done if isinstance(done, str) else done.stdout + done.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | str:
    """What the command printed; a text that says why it did not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
