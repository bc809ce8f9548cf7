"""What a test file must not leave behind: processes, and files in the places where they would pile up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _files() -> set[str]:
    return {f"{folder}/{name}" for folder in ("/dev/shm", "/tmp") for name in os.listdir(folder) if "hdma" in name}


def _processes() -> dict[int, str]:
    """Children of this process, and theirs, by what they inherited from it (processes.environment)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            mine = f"TESTED_BY={os.getpid()}\0".encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if mine and int(path.name) != os.getpid():
            found[int(path.name)] = command
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_remains() -> Iterator[None]:
    """For a whole file: no process of its tests lives on, and no file of hdma is left in /tmp or /dev/shm."""
    before = _files()
    yield
    until = time.monotonic() + 5  # Some children of killed ranks end by themselves.
    while _processes() and time.monotonic() < until:
        time.sleep(0.1)
    assert not _processes()
    assert not _files() - before
