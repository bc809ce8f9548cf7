"""The collectives between real processes, equal to numpy bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wires
from processes import SLOWDOWN, Finished, environment, mpirun, ranks, torchrun

PROGRAMS = Path(__file__).parent / "programs"
GRIDS: list[Any] = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (3, 2), (4, 2)]
GRIDS += [pytest.param(grid, marks=pytest.mark.long) for grid in ((4, 1), (2, 3), (8, 1), (2, 4))]


def grid_env(grid: tuple[int, int], folder: Path, **more: object) -> dict[str, str]:
    """Nodes of ranks on this machine; they meet in `folder`."""
    settings: dict[str, object] = {"HDMA_RANKS_PER_NODE": grid[1], "HDMA_RENDEZVOUS": folder}
    return environment(**(settings | {"HDMA_TIMEOUT_S": 60 * SLOWDOWN} | more))


def run_grid(program: str, grid: tuple[int, int], folder: Path, *args: str, wire: str = "tcp", **more: object) -> None:
    env, own = grid_env(grid, folder, **(wires.settings(wire) | more)), wires.port(wire, grid[1])
    finished = ranks(grid[0] * grid[1], [PROGRAMS / program, *args], env, timeout_s=150.0, own=own)
    assert all(each.code == 0 for each in finished), "\n".join(each.out for each in finished)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "{}x{}".format(*grid))
def test_matrix(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("matrix.py", grid, tmp_path)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)], ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_shards_as_they_land(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("landing.py", grid, tmp_path, HDMA_WINDOW_BYTES=1 << 20)


def test_bytes_on_the_wire(tmp_path: Path) -> None:
    for nodes, local in ((2, 2), (3, 1), (1, 2)):
        run_grid("counts.py", (nodes, local), tmp_path / f"{nodes}x{local}")


def test_rounding_and_determinism(tmp_path: Path) -> None:
    run_grid("rounding.py", (2, 2), tmp_path)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_special_numbers(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("specials.py", grid, tmp_path)


@pytest.mark.parametrize("size, local_size", [(1, 1), (4, 2), (5, 5)])
def test_groups(size: int, local_size: int, tmp_path: Path) -> None:
    finished = ranks(size, [PROGRAMS / "groups.py"], grid_env((0, local_size), tmp_path))
    assert all(each.code == 0 for each in finished), "\n".join(each.out for each in finished)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_groups_under_a_launcher(launch: Callable[..., Finished]) -> None:
    done = launch(4, [PROGRAMS / "groups.py"], environment(HDMA_RANKS_PER_NODE=2, HDMA_TIMEOUT_S=60))
    assert done.code == 0, done.out


@pytest.mark.parametrize("how", ["allowed", "forbidden"])
def test_tensors_read_where_they_are(how: str, tmp_path: Path) -> None:
    run_grid("unreadable.py", (1, 2), tmp_path, how)


def test_torch_tensors_under_mpirun() -> None:
    done = mpirun(4, [PROGRAMS / "tensors.py"], environment(HDMA_RANKS_PER_NODE=2, HDMA_TIMEOUT_S=60))
    assert done.code == 0, done.out
