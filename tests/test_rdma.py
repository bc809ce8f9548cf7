"""RDMA on real verbs devices; `make test-rdma` boots a VM that has two of them.

torch must not be imported by this file and what it runs: in the VM that takes half a minute.
"""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from devices import cable, counter, gids, missing, rdma_devices  # noqa: F401
from processes import SLOWDOWN, environment, free_port, run
from wire import listens

pytestmark = pytest.mark.rdma


def test_the_cable_is_plugged_in(cable: tuple[str, str]) -> None:  # noqa: F811
    for number, device in enumerate(cable, 1):
        found = gids(device)
        assert found[0].startswith("fe80:"), found
        assert found[1].endswith(f":ffff:0a09:{number:04x}"), found
        assert found[2].startswith("fd09:"), found


@pytest.mark.parametrize("index", [0, 1, 2])
def test_bytes_cross_the_cable(index: int, cable: tuple[str, str]) -> None:  # noqa: F811
    """By perftest, so that hdma's own tests start from a network that is known to work."""
    if not shutil.which("ib_write_bw"):
        missing("no perftest")
    nbytes, repeats, packet = 1 << 16, 50, 4096
    port = free_port()
    command = ["ib_write_bw", "-x", str(index), "-F", "-s", str(nbytes), "-n", str(repeats), "-p", str(port)]
    before = counter(cable[0], "rcvd_pkts")
    with subprocess.Popen([*command, "-d", cable[0]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            until = time.monotonic() + 2 * SLOWDOWN
            while not listens(port) and time.monotonic() < until:
                time.sleep(0.05)
            client = run([*command, "-d", cable[1], "127.0.0.1"], environment(), 3)
            assert client.code == 0, client.out
            assert server.wait(2 * SLOWDOWN) == 0
        finally:
            server.kill()
    assert counter(cable[0], "rcvd_pkts") - before >= nbytes * repeats // packet
