"""RDMA devices for tests: those of the VM that `make test-rdma` boots (tests/rdma), or of this machine.

Tests without devices are skipped; but where TEST_RDMA is "expected", as in the VM, they fail.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SYSFS = Path("/sys/class/infiniband")


def missing(what: str) -> None:
    """Ends a test that cannot run here."""
    if os.environ.get("TEST_RDMA") == "expected":
        pytest.fail(f"{what}, and TEST_RDMA expects it")
    pytest.skip(what)


def active(device: str) -> bool:
    return "ACTIVE" in (SYSFS / device / "ports/1/state").read_text()


def gids(device: str) -> dict[int, str]:
    """The RoCE v2 GIDs of a device's first port, by index."""
    port, found = SYSFS / device / "ports/1", {}
    for kind in (port / "gid_attrs/types").iterdir():
        try:
            if kind.read_text().strip() == "RoCE v2":
                found[int(kind.name)] = (port / "gids" / kind.name).read_text().strip()
        except OSError:  # An empty entry.
            continue
    return found


def counter(device: str, name: str) -> int:
    """Of a software device: packets and failures since it was made."""
    return int((SYSFS / device / "ports/1/hw_counters" / name).read_text())


@pytest.fixture
def rdma_devices() -> list[str]:
    """Names of the devices whose first port is active: at least one."""
    names = sorted(entry.name for entry in SYSFS.iterdir()) if SYSFS.is_dir() else []
    names = [name for name in names if active(name)]
    if not names:
        missing("no RDMA device")
    return names


@pytest.fixture
def cable(rdma_devices: list[str]) -> tuple[str, str]:
    """The VM's two devices, whose packets cross one virtual cable between the interfaces va and vb."""
    if rdma_devices != ["rxe0", "rxe1"]:
        missing("not the VM of tests/rdma")
    return ("rxe0", "rxe1")
