"""Ranks that share neither loopback nor abstract sockets: two network namespaces joined by a veth pair."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Finished, environment, run_all
from test_collectives import PROGRAMS

NAMES = ("hdma-a", "hdma-b")


def ip(*args: str) -> bool:
    return subprocess.run(["ip", *args], capture_output=True, timeout=20).returncode == 0


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    names = tuple(f"{name}-{os.getpid()}" for name in NAMES)
    if not shutil.which("ip") or not ip("netns", "add", names[0]):
        pytest.skip("needs root and the ip command (iproute2) to make network namespaces")
    try:
        assert ip("netns", "add", names[1])
        assert ip("link", "add", "hdma0", "netns", names[0], "type", "veth", "peer", "name", "hdma0", "netns", names[1])
        for number, name in enumerate(names, 1):
            assert ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "hdma0")
            assert ip("-n", name, "link", "set", "hdma0", "up") and ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            ip("netns", "del", name)


def run_hosts(hosts: tuple[str, str], folder: Path, program: list[str], **more: object) -> list[Finished]:
    """Two ranks on each host."""
    commands = []
    for rank in range(4):
        env = environment(HDMA_RENDEZVOUS=folder, RANK=rank, WORLD_SIZE=4, **more)
        commands.append((["ip", "netns", "exec", hosts[rank // 2], sys.executable, *program], env))
    return run_all(commands, 60)


def test_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    finished = run_hosts(hosts, tmp_path, [str(PROGRAMS / "matrix.py"), "0,7,300001"], HDMA_TIMEOUT_S=30)
    assert all(each.code == 0 for each in finished), "\n".join(each.out for each in finished)
    if not Path("/sys/class/infiniband").is_dir() or not os.listdir("/sys/class/infiniband"):
        told = ["no RDMA device: TCP carries what goes between nodes" in each.out for each in finished]
        assert told == [True, False, False, False]


def test_link_down_in_mid_call(hosts: tuple[str, str], tmp_path: Path) -> None:
    from threading import Thread

    def cut() -> None:
        until = time.monotonic() + 30
        while len(list(tmp_path.glob("up *"))) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        assert ip("-n", hosts[0], "link", "set", "hdma0", "down")

    thread = Thread(target=cut)
    thread.start()
    finished = run_hosts(hosts, tmp_path / "meet", [str(PROGRAMS / "cut_off.py"), str(tmp_path)], HDMA_TIMEOUT_S=2)
    thread.join()
    for each in finished:
        assert each.code == 0 and "Error after" in each.out, each.out
