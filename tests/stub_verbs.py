"""A libibverbs without RDMA devices (tests/stub/ibverbs.cc): built here, for ranks to find it like a real one."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "stub-verbs"
SOURCES = [HERE / "stub" / "ibverbs.cc", HERE / "stub" / "ibverbs.map", HERE.parent / "csrc" / "wire" / "ibverbs.h"]
DEVICES = ("mlx5_0", "mlx5_1")


def build(folder: Path = BUILD) -> Path:
    """Compiles libibverbs.so.1 into the folder unless it is there and new, beside a sysfs that lists its devices."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libibverbs.so.1"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Several test processes may share the folder.
        newest = max(source.stat().st_mtime for source in [*SOURCES, Path(__file__)])
        if not library.exists() or library.stat().st_mtime < newest:
            for number, device in enumerate(DEVICES):
                _list_device(folder / "root", number, device)
            source, script, _ = SOURCES
            flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", f"-Wl,--version-script={script}"]
            command = ["g++", *flags, "-Wl,-soname,libibverbs.so.1", source, "-o", folder / "new"]
            subprocess.run([str(part) for part in command], check=True)
            os.replace(folder / "new", library)
    return folder


def variables(folder: Path, **more: object) -> dict[str, str]:
    """Environment variables of ranks that are to find it; `more` in lower case without STUB_IBV_: delay_us=100."""
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("LD_LIBRARY_PATH", "")) if part)
    modules = [HERE.parent, HERE / "stub" / "site", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    stub = {"root": folder / "root", "devices": ",".join(DEVICES), **more}
    found = {"LD_LIBRARY_PATH": path, "PYTHONPATH": os.pathsep.join(str(part) for part in modules if part)}
    return found | {"HDMA_WIRE": "verbs"} | {f"STUB_IBV_{name.upper()}": str(value) for name, value in stub.items()}


def _list_device(root: Path, number: int, device: str) -> None:
    nic, port = root / "sys/class/infiniband" / device, root / "sys/class/infiniband" / device / "ports/1"
    verbs = root / "sys/class/infiniband_verbs" / f"uverbs{number}"
    gid = f"0000:0000:0000:0000:0000:ffff:0a09:000{number + 1}"
    texts = {
        nic / "node_type": "1: CA",
        port / "state": "4: ACTIVE",
        port / "phys_state": "5: LinkUp",
        port / "link_layer": "Ethernet",
        port / "rate": "100 Gb/sec (4X EDR)",
        port / "lid": "0x0",
        port / "gids/1": gid,
        port / "gid_attrs/types/1": "RoCE v2",
        port / "gid_attrs/ndevs/1": f"eth{number}",
        verbs / "ibdev": device,
        root / "dev/infiniband" / f"uverbs{number}": "",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
