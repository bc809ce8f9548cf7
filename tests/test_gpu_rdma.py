"""What is on GPUs, between nodes by RDMA: on the stubs of a GPU's driver and of libibverbs, which share its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import stub_gpu
import stub_verbs
import wires
from processes import environment, ranks
from remains import nothing_remains  # noqa: F401
from test_collectives import PROGRAMS


def run(program: str, nodes: int, ranks_per_node: int, folder: Path, *args: str, **more: object) -> str:
    """Each rank on one of two GPUs, a node's on one port; the output of all."""
    gpu, nic = stub_gpu.variables(stub_gpu.build(), log=folder / "log"), stub_verbs.variables(stub_verbs.build())
    both = os.pathsep.join([gpu["LD_LIBRARY_PATH"], nic["LD_LIBRARY_PATH"]])
    about = {"HDMA_RANKS_PER_NODE": ranks_per_node, "HDMA_RENDEZVOUS": folder / "meet", "HDMA_TIMEOUT_S": 30}
    about |= {"TEST_PLACE": "stub", "HDMA_DEVICE": "cuda", "LD_LIBRARY_PATH": both}
    env = environment(**(gpu | nic | stub_gpu.WINDOW | about | more))
    finished = ranks(nodes * ranks_per_node, [PROGRAMS / program, *args], env, own=wires.port("stub", ranks_per_node))
    output = "\n".join(each.out for each in finished)
    assert all(each.code == 0 for each in finished), output
    return output


def host_copies(folder: Path) -> int:
    """hdma's own: those of the test's arrays are of pageable memory."""
    assert stub_gpu.calls(folder / "log", "copy")
    return len([line for line in stub_gpu.calls(folder / "log", "copy", pageable=0) if "host" in line["kind"]])


@pytest.mark.parametrize("ordering", [0, 200], ids=["flushed", "ordered"])
@pytest.mark.parametrize("grid", [(2, 1), (2, 2), (3, 1)], ids=lambda grid: "{}x{}".format(*grid))
def test_by_dma_buf(grid: tuple[int, int], ordering: int, tmp_path: Path) -> None:
    """No byte goes by way of the host; a device that may be seen to have written too early is read behind."""
    run("gpu_order.py", *grid, tmp_path, "60", HDMA_GPU_RDMA="auto", STUB_RDMA_ORDERING=ordering, STUB_IBV_DELAY_US=50)
    assert host_copies(tmp_path) == 0


def test_what_lands_late_is_waited_for(tmp_path: Path) -> None:
    """Writes to a GPU may land after the message behind them has come: not seen to have, they are read behind."""
    late = {"HDMA_GPU_RDMA": "auto", "STUB_IBV_LATE": 1, "HDMA_CHUNK_BYTES": 16 << 10}
    run("gpu_order.py", 2, 2, tmp_path / "a", "40", **late)
    with pytest.raises(AssertionError, match=r"AssertionError: rank \d: "):
        run("gpu_order.py", 2, 2, tmp_path / "b", "40", STUB_RDMA_ORDERING=200, **late)


def test_by_way_of_host_memory(tmp_path: Path) -> None:
    run("gpu_order.py", 2, 2, tmp_path, "40")
    assert host_copies(tmp_path) > 0


def test_one_rank_cannot(tmp_path: Path) -> None:
    """All go by way of the host then, and rank 0 says why."""
    output = run("gpu_order.py", 2, 1, tmp_path, "40", HDMA_GPU_RDMA="auto", STUB_IBV_NO_DMABUF=1)
    assert host_copies(tmp_path) > 0
    assert "by way of host memory: rank 0 cannot register its window" in output, output
