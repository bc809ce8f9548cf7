"""The RDMA wire: on a stub of libibverbs in the ordinary suite, and on real devices by `make test-rdma`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wires
from devices import SYSFS, cable, counter, rdma_devices  # noqa: F401
from processes import SLOWDOWN
from test_collectives import run_grid

GRIDS: list[Any] = [(2, 1), (2, 2), (3, 1), (4, 1)]
GRID = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "{}x{}".format(*grid))
WIRE = pytest.mark.parametrize("wire", wires.RDMA)
pytestmark = [pytest.mark.timeout(180 * SLOWDOWN)]


@pytest.fixture(autouse=True)
def devices(wire: str, request: pytest.FixtureRequest) -> None:
    """Skips, or in the VM fails, where there are no devices."""
    if wire == "verbs":
        request.getfixturevalue("cable")


@WIRE
@GRID
def test_calls(grid: tuple[int, int], wire: str, tmp_path: Path) -> None:
    """Also a put that is longer than a message may be: 8 MiB in the VM, 100,000 bytes on the stub."""
    stub = wires.settings("stub", max_message=100_000, delay_us=50) if wire == "stub" else {}
    if grid == (2, 1) and wire == "verbs":
        long = {"HDMA_CHUNK_BYTES": "12M", "HDMA_WINDOW_BYTES": "400M"}
        run_grid("wire_calls.py", grid, tmp_path, str(5 << 20), "verbs", wire=wire, **long)
    else:
        run_grid("wire_calls.py", grid, tmp_path, "300007", "verbs", wire=wire, HDMA_WINDOW_BYTES="16M", **stub)


@WIRE
def test_matrix(wire: str, tmp_path: Path) -> None:
    run_grid("matrix.py", (2, 1), tmp_path, wire=wire)


@pytest.mark.parametrize("wire", ["stub"])
def test_matrix_of_two_by_two(wire: str, tmp_path: Path) -> None:
    run_grid("matrix.py", (2, 2), tmp_path, wire=wire)


@WIRE
@pytest.mark.parametrize("grid", [(2, 1), (3, 1)], ids=lambda grid: "{}x{}".format(*grid))
def test_shards_as_they_land(grid: tuple[int, int], wire: str, tmp_path: Path) -> None:
    run_grid("landing.py", grid, tmp_path, wire=wire, HDMA_WINDOW_BYTES=1 << 20)


@WIRE
def test_bytes_on_the_wire(wire: str, tmp_path: Path) -> None:
    """Exactly (nodes - 1) shards a rank by stats(); on real devices also as they, and the way that TCP takes, count."""
    before = traffic() if wire == "verbs" else {}
    for nodes, local in ((2, 2), (3, 1)) if wire == "stub" else ((2, 1), (2, 2)):
        run_grid("counts.py", (nodes, local), tmp_path / f"{nodes}x{local}", wire=wire)
    if wire == "verbs":
        put_nbytes = 6 * 4 * (3 << 20)
        after = traffic()
        packets = sum(after[name] - before[name] for name in ("rxe0", "rxe1"))
        assert packets >= put_nbytes // 4096, (before, after)
        assert after["lo"] - before["lo"] < put_nbytes // 100, (before, after)


def traffic() -> dict[str, int]:
    """Packets that the devices have sent, and bytes that TCP may have."""
    lo = int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
    return {"lo": lo} | {name: counter(name, "sent_pkts") for name in wires.DEVICES["verbs"]}
