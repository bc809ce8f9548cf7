"""This host as Linux tells it: processor, versions, limits. Nothing is started, loaded or waited for."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hdma import _core
from hdma.version import VERSION

# Without these csrc/kernels is slow: the copy that spares the caches, the reductions of 16-bit floats. AVX-512 is used
# where it is there.
CPU_FEATURES = ("avx2", "f16c")
_UNLIMITED = 1 << 60


def versions() -> dict[str, str | None]:
    """Of hdma, what built its core, Python and the packages that hdma may use; None for what is not installed."""
    found: dict[str, str | None] = {"hdma": VERSION, "compiler": _compiler(), "python": platform.python_version()}
    for name in ("numpy", "torch", "mpi4py", "ml_dtypes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Name, processor, cores that this process may use, and which of CPU_FEATURES the processor has."""
    fields = re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    lines = {name: text for name, text in reversed(fields)}
    flags = {*lines.get("flags", lines.get("Features", "")).split()}
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "cpu": lines.get("model name", platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "cores": _cores(),
        "features": {name: name in flags for name in CPU_FEATURES},
    }


def limits() -> dict[str, Any]:
    """Bytes or counts; None where there is no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    available = _meminfo("MemAvailable")
    memory, pids = _cgroup_memory(), _cgroup("pids", "pids.max", "pids.current", "pids.max", "pids.current")
    return {
        "memlock_nbytes": _finite(memlock),
        "descriptors": {"soft": _finite(soft), "hard": _finite(hard), "open": len(os.listdir("/proc/self/fd"))},
        "shm": _shm(),
        "memory": {
            "total_nbytes": _meminfo("MemTotal"),
            "available_nbytes": min(available, memory["left"]) if memory else available,
            "cgroup_nbytes": memory["limit"] if memory else None,
        },
        "pids": pids,
    }


def _compiler() -> str | None:
    # Compilers sign what they build in the section .comment.
    signed = re.search(rb"(GCC): \([^)\0]*\) ([\w.]+)|(clang) version ([\w.]+)", Path(_core.__file__).read_bytes())
    return b" ".join(part for part in signed.groups() if part).decode() if signed else None


def _cores() -> int:
    found = set()
    for cpu in os.sched_getaffinity(0):
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        core = (_read(f"{topology}/physical_package_id"), _read(f"{topology}/core_id"))
        found.add(core if all(core) else (str(cpu), ""))
    return len(found)


def _shm() -> dict[str, int] | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"total_nbytes": stat.f_blocks * stat.f_frsize, "free_nbytes": stat.f_bavail * stat.f_frsize}


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _cgroup_memory() -> dict[str, int] | None:
    """The tightest limit of the process's control groups, and what is left below it if file caches are given up."""
    names = ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")
    return _cgroup("memory", *names)


def _cgroup(controller: str, limit2: str, used2: str, limit1: str, used1: str) -> dict[str, int] | None:
    """{limit, used, left} of the tightest group of this process, in either version of them; None if unlimited."""
    found = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", controller) if controllers else Path("/sys/fs/cgroup")
        limit_name, used_name = (limit1, used1) if controllers else (limit2, used2)
        # A container often sees its own group as the root, while the path is that of the host.
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
                cached = re.search(r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
                needed = int(used) - (int(cached[1]) if cached and controller == "memory" else 0)
                found.append({"limit": int(limit), "used": int(used), "left": max(0, int(limit) - needed)})
            if group == root:
                break
    return min(found, key=lambda group: group["left"]) if found else None


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
