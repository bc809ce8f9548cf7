"""What goes wrong between ranks ends in an error on all of them, soon, with the cause; and leaves nothing behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from processes import environment, ranks
from remains import nothing_remains  # noqa: F401
from test_collectives import PROGRAMS, grid_env, run_grid

SHAPES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (3, 2)]


def shape_name(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


@pytest.mark.parametrize("grid", SHAPES, ids=shape_name)
def test_killed_in_mid_call(grid: tuple[int, int], tmp_path: Path) -> None:
    size = grid[0] * grid[1]
    for victim in {0, size - 1}:
        stamp = tmp_path / f"killed {victim}"
        program = [PROGRAMS / "killed.py", stamp, str(victim), "kill"]
        finished = ranks(size, program, grid_env(grid, tmp_path / f"meet {victim}", HDMA_TIMEOUT_S=30))
        for rank, each in enumerate(finished):
            assert each.code == (-9 if rank == victim else 0), each.out
            assert rank == victim or re.search("Error after [01].*is gone", each.out), each.out


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2), (3, 1)], ids=shape_name)
def test_ranks_disagree(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("disagree.py", grid, tmp_path, str(grid[0] * grid[1] - 1), HDMA_TIMEOUT_S=20)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1)], ids=shape_name)
def test_wrong_arguments(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("misused.py", grid, tmp_path)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)], ids=shape_name)
def test_rank_does_not_come_to_a_call(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("late.py", grid, tmp_path, "1", HDMA_TIMEOUT_S=1)


def test_rank_missing_at_start_up(tmp_path: Path) -> None:
    program = ["-c", "import hdma; hdma.init()"]
    started = time.monotonic()
    finished = ranks(3, program, environment(HDMA_RENDEZVOUS=tmp_path, HDMA_TIMEOUT_S=2), absent=[1])
    assert time.monotonic() - started < 10
    for each in finished:
        assert each.code == 1
        assert re.search(r"hdma.errors.TimeoutError: .*\b1\b", each.out), each.out


@pytest.mark.parametrize(
    "name, values", [("HDMA_CHUNK_BYTES", ("65536", "32768")), ("HDMA_WINDOW_BYTES", ("1M", "2M"))]
)
def test_settings_differ(name: str, values: tuple[str, str], tmp_path: Path) -> None:
    program = ["-c", f"import os; os.environ[{name!r}] = {values!r}[int(os.environ['RANK'])]; import hdma; hdma.init()"]
    for each in ranks(2, program, environment(HDMA_RENDEZVOUS=tmp_path, HDMA_TIMEOUT_S=10)):
        assert re.search(f"UsageError: {name} is .* on rank 1 but .* on rank 0", each.out), each.out


def test_unequal_nodes_and_small_windows(tmp_path: Path) -> None:
    program = ["-c", "import hdma; hdma.init()"]
    warning = "hdma: the nodes have unequal numbers of ranks (2, 1), so all nodes were split to 3x1 (nodes x ranks)\n"
    outs = [each.out for each in ranks(3, program, grid_env((2, 2), tmp_path / "a", HDMA_TIMEOUT_S=10))]
    assert outs == [warning, "", ""]
    for each in ranks(4, program, grid_env((4, 1), tmp_path / "b", HDMA_TIMEOUT_S=10, HDMA_WINDOW_BYTES="4096")):
        assert each.code == 0 or "HDMA_WINDOW_BYTES=4096 is too small" in each.out, each.out


def test_exit_without_close(tmp_path: Path) -> None:
    program = [
        "-c",
        "import hdma, numpy as np; c = hdma.init(); c.all_gather(np.zeros(c.size), np.zeros(1), async_op=True)",
    ]
    for each in ranks(4, program, grid_env((2, 2), tmp_path)):
        assert each.code == 0 and not each.out, each.out


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)], ids=shape_name)
def test_close_before_the_last_push(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("unpushed.py", grid, tmp_path)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
@pytest.mark.parametrize(
    "how",
    [
        "exception",
        "exception in with",
        "interrupted call",
        "interrupted behind a call in flight",
        "interrupted close",
        "closed by another thread",
        "fork",
        "killed with a child alive",
    ],
)
def test_leaving(how: str, grid: tuple[int, int], tmp_path: Path) -> None:
    env = grid_env(grid, tmp_path, HDMA_TIMEOUT_S=20)
    finished = ranks(grid[0] * grid[1], [PROGRAMS / "leaving.py", how], env)
    codes = [each.code for each in finished]
    first = {"exception": 1, "killed with a child alive": -9}.get(how, 0)
    assert codes == [first] + [0] * (len(codes) - 1), "\n".join(each.out for each in finished)


def test_tensor_reused_after_a_failed_call(tmp_path: Path) -> None:
    run_grid("reused.py", (1, 2), tmp_path, HDMA_TIMEOUT_S=20)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
def test_dropped_with_a_call_in_flight(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("dropped.py", grid, tmp_path, HDMA_TIMEOUT_S=20)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
def test_stopped_longer_than_the_time_out(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("stopped.py", grid, tmp_path, "5.0", HDMA_TIMEOUT_S=2.5)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
def test_late_by_less_than_the_time_out(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("ending.py", grid, tmp_path, "late", HDMA_TIMEOUT_S=5)


@pytest.mark.parametrize("how, code", [("sys.exit", 5), ("os._exit", 5)])
@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
def test_exit_in_mid_call(grid: tuple[int, int], how: str, code: int, tmp_path: Path) -> None:
    size = grid[0] * grid[1]
    finished = ranks(size, [PROGRAMS / "ending.py", how], grid_env(grid, tmp_path, HDMA_TIMEOUT_S=20))
    codes = [each.code for each in finished]
    assert codes == [0] * (size - 1) + [code], "\n".join(each.out for each in finished)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
def test_exit_with_calls_in_flight(grid: tuple[int, int], tmp_path: Path) -> None:
    program = [PROGRAMS / "ending.py", "exit with calls in flight"]
    for each in ranks(grid[0] * grid[1], program, grid_env(grid, tmp_path)):
        assert each.code == 0 and not each.out, each.out


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=shape_name)
def test_close_twice_and_in_any_order(grid: tuple[int, int], tmp_path: Path) -> None:
    """Also from several threads; what the communicator held is given back while its works live on."""
    run_grid("ending.py", grid, tmp_path, "close", HDMA_TIMEOUT_S=20)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=shape_name)
def test_fork_with_calls_in_flight(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("forks.py", grid, tmp_path, HDMA_TIMEOUT_S=20)


def test_calls_from_signal_handlers(tmp_path: Path) -> None:
    run_grid("handlers.py", (1, 2), tmp_path, HDMA_TIMEOUT_S=20)


@pytest.mark.long
def test_thousands_of_calls_and_a_thousand_groups(tmp_path: Path) -> None:
    run_grid("leaks.py", (1, 2), tmp_path, "2000", "1000")


def test_more_than_4_gib(tmp_path: Path) -> None:
    available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    if not available or int(available[1]) < 11 << 20:
        pytest.skip("needs 11 GiB of free memory")
    run_grid("huge.py", (1, 2), tmp_path)
