"""The torch.distributed backend between real processes, against torch's own arithmetic and torch's own wrappers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import ROOT, Finished, environment, free_port, run, torchrun

PROGRAMS = Path(__file__).parent / "programs"


def run_ranks(size: int, program: str, *args: str, **more: object) -> Finished:
    """`size` ranks that meet as torch.distributed's env:// does."""
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), **more)
    return run([sys.executable, PROGRAMS / "forked.py", str(size), PROGRAMS / program, *args], env, timeout_s=100.0)


def check(done: Finished) -> None:
    assert done.code == 0, done.out


@pytest.mark.parametrize(
    ("size", "settings"),
    [(2, {}), (3, {"HDMA_RANKS_PER_NODE": 1, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})],
    ids=["a node of 2", "3 nodes, checked by torch"],
)
def test_every_operation(size: int, settings: dict[str, object]) -> None:
    check(run_ranks(size, "backend_operations.py", **settings))


def test_training(tmp_path: Path) -> None:
    check(run_ranks(2, "backend_training.py", str(tmp_path)))


def test_groups() -> None:
    check(run_ranks(4, "backend_groups.py", HDMA_RANKS_PER_NODE=2))


def test_faults() -> None:
    done = run_ranks(2, "backend_faults.py")
    assert "exit codes 0 -9" in done.out and "survived" in done.out, done.out


def test_example() -> None:
    done = torchrun(2, [ROOT / "examples" / "tensor_parallel.py"], environment())
    assert done.code == 0, done.out
