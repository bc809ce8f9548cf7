"""The collectives on GPUs, equal to numpy bit for bit, and what goes wrong there.

Everywhere on a stub of the driver (tests/stub); with `-m gpu` on the GPUs that there are, through torch.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import stub_gpu
from processes import Finished, environment, free_port, ranks, run

from hdma.errors import UsageError
from hdma.layout import Layout
from hdma.requests import Requests
from hdma.topology import Topology

PROGRAMS = Path(__file__).parent / "programs"


@functools.cache
def gpu_count() -> int:
    """GPUs that torch sees, asked in another process: this one must not hold a GPU."""
    text = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    return int(done.stdout or 0) if done.returncode == 0 else 0


class Place:
    """Runs a program of tests/programs on some ranks, on the stub or on real GPUs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.runs = name, folder, 0

    def start(
        self,
        program: str | list[str],
        size: int,
        gpus: int,
        ranks_per_node: int = 0,
        stub: dict[str, object] | None = None,
        timeout_s: float = 100,
        **more: object,
    ) -> list[Finished]:
        settings: dict[str, object] = {"HDMA_TIMEOUT_S": 60, "HDMA_RENDEZVOUS": self.folder / f"run{self.runs}"}
        self.runs += 1
        if ranks_per_node:
            settings["HDMA_RANKS_PER_NODE"] = ranks_per_node
        if self.name == "torch":
            if gpus > gpu_count():
                pytest.skip(f"needs {gpus} GPUs, there are {gpu_count()}")
            settings |= {"TEST_PLACE": "torch", "TEST_GPUS": gpus}
        else:
            runtime = "hip" if self.name == "hip" else "cuda"
            more_stub = {"delay_us": 100} | (stub or {})
            settings |= stub_gpu.variables(stub_gpu.build(), runtime, gpus, **more_stub)
            settings |= {"TEST_PLACE": "stub", "HDMA_DEVICE": runtime} | stub_gpu.WINDOW
        name, *args = program.split() if isinstance(program, str) else program
        return ranks(size, [PROGRAMS / name, *args], environment(**settings | more), (), timeout_s)

    def run(self, program: str | list[str], size: int, gpus: int, ranks_per_node: int = 0, **more: object) -> str:
        finished = self.start(program, size, gpus, ranks_per_node, **more)  # type: ignore[arg-type]
        output = "\n".join(each.out for each in finished)
        assert all(each.code == 0 for each in finished), output
        return output


@pytest.fixture(params=["cuda", "hip", pytest.param("torch", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture(params=["cuda", pytest.param("torch", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """What has nothing to do with the runtime."""
    return Place(request.param, tmp_path)


def ids(grid: tuple[int, int, int]) -> str:
    return "{} ranks on {} GPUs, {} a node".format(*grid)


# Ranks, GPUs, ranks a node.
GRIDS = [(1, 1, 0), (2, 2, 0), (2, 1, 0), (4, 1, 0), (4, 2, 0), (4, 2, 2), (2, 1, 1), (3, 2, 1), (8, 1, 0), (8, 1, 4)]
# With a GPU for each of many ranks.
WIDE = [(4, 4, 0), (4, 4, 2), (8, 8, 0), (8, 8, 4)]
# On the stub, whose time all tests share, those that differ most; eight ranks are left out for their time.
STUB_GRIDS = {"cuda": [(3, 1, 0), (4, 2, 2), *WIDE[2:]], "hip": [(4, 2, 2)]}
PLACED = [pytest.param("torch", grid, marks=pytest.mark.gpu, id=f"torch-{ids(grid)}") for grid in GRIDS + WIDE]
PLACED += [
    pytest.param(name, grid, id=f"{name}-{ids(grid)}", marks=[pytest.mark.long] if grid in WIDE else [])
    for name in STUB_GRIDS
    for grid in STUB_GRIDS[name]
]


def long(*grids: tuple[int, int, int]) -> list[object]:
    """Grids that `make test` leaves out for their time."""
    return [pytest.param(grid, marks=pytest.mark.long) for grid in grids]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("place, grid", PLACED, indirect=["place"])
def test_matrix(place: Place, grid: tuple[int, int, int]) -> None:
    place.run("matrix.py", *grid, timeout_s=170)


# Which is how every call goes on AMD.
@pytest.mark.long
@pytest.mark.parametrize("connections", [1])
@pytest.mark.parametrize("grid", [(2, 2, 0), (4, 2, 2)], ids=ids)
def test_matrix_where_streams_cannot_hold_waits(cuda: Place, grid: tuple[int, int, int], connections: int) -> None:
    cuda.run("matrix.py", *grid, CUDA_DEVICE_MAX_CONNECTIONS=connections)


@pytest.mark.long
@pytest.mark.parametrize("flag, copy", [("write", "default")])
def test_other_ways_of_amd(tmp_path: Path, flag: str, copy: str) -> None:
    Place("hip", tmp_path).run("matrix.py", 4, 2, 2, HDMA_AMD_FLAG=flag, HDMA_AMD_COPY=copy)


@pytest.mark.parametrize("grid", [(1, 1, 0), (2, 2, 0), (4, 2, 2), *long(*WIDE)], ids=ids)
def test_shards_as_they_land(place: Place, grid: tuple[int, int, int]) -> None:
    place.run("landing.py", *grid, HDMA_WINDOW_BYTES=1 << 20)


def test_rounding_and_special_numbers(cuda: Place) -> None:
    cuda.run("rounding.py", 4, 2, 2)
    cuda.run("specials.py", 4, 2, 2)


@pytest.mark.parametrize(
    "connections, grid",
    [(8, (2, 2, 0)), (8, (3, 1, 0)), (8, (4, 2, 2)), (1, (4, 2, 2))]
    + [pytest.param(1, grid, marks=pytest.mark.long) for grid in ((2, 2, 0), (3, 1, 0), *WIDE)]
    + [pytest.param(8, grid, marks=pytest.mark.long) for grid in WIDE],
    ids=lambda value: ids(value) if isinstance(value, tuple) else str(value),
)
def test_calls_in_flight(cuda: Place, grid: tuple[int, int, int], connections: int) -> None:
    cuda.run(f"gpu_order.py {500 if cuda.name == 'torch' else 150}", *grid, CUDA_DEVICE_MAX_CONNECTIONS=connections)


def test_calls_in_flight_on_amd(tmp_path: Path) -> None:
    Place("hip", tmp_path).run("gpu_order.py 150", 4, 2, 2)


@pytest.mark.parametrize("connections", [8, 1])
def test_groups_that_wait_leave_the_gpu_free(cuda: Place, connections: int) -> None:
    print(cuda.run("gpu_late.py", 2, 2, CUDA_DEVICE_MAX_CONNECTIONS=connections, stub={"delay_us": 0}))


@pytest.mark.parametrize("connections", [8, 1])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_peer(cuda: Place, how: str, connections: int) -> None:
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "HDMA_TIMEOUT_S": 3 if how == "stopped" else 60}
    finished = cuda.start(f"gpu_killed.py {how}", 2, 2, timeout_s=40, **more)  # type: ignore[arg-type]
    assert finished[0].code == 0, finished[0].out
    print(finished[0].out)


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.long)])
def test_a_lost_peer_when_the_streams_are_full(cuda: Place, how: str) -> None:
    # A million elements in slots of 4 KiB: thousands of steps, of which a stream takes a thousand.
    more = {"HDMA_WINDOW_BYTES": 1 << 16, "TEST_NUMEL": 1 << 20, "HDMA_TIMEOUT_S": 3 if how == "stopped" else 60}
    finished = cuda.start(f"gpu_killed.py {how}", 2, 2, timeout_s=60, **more)  # type: ignore[arg-type]
    assert finished[0].code == 0, finished[0].out


def test_communicators_in_another_order(cuda: Place) -> None:
    output = cuda.run("gpu_disorder.py", 2, 2, HDMA_TIMEOUT_S=2)
    assert "must issue their calls in the same order" in output, output


def test_a_rank_far_ahead_in_another_call(cuda: Place) -> None:
    cuda.run("gpu_ahead.py", 2, 1)


@pytest.mark.parametrize("how", ["close", "leave", "fork"])
@pytest.mark.parametrize("connections", [8, 1])
def test_the_end_with_calls_in_flight(cuda: Place, how: str, connections: int) -> None:
    cuda.run(f"gpu_ending.py {how}", 2, 2, CUDA_DEVICE_MAX_CONNECTIONS=connections)


@pytest.mark.parametrize("grid", [(1, 1, 0), (2, 2, 0), (4, 2, 0), *long((4, 4, 0), (8, 8, 0))], ids=ids)
def test_symmetric_memory(place: Place, grid: tuple[int, int, int]) -> None:
    place.run("gpu_symmetric.py", *grid)


def test_wrong_arguments(cuda: Place) -> None:
    cuda.run("gpu_refused.py usage -", 2, 2)


@pytest.mark.parametrize(
    "how, stub, expected",
    [
        ("mapping", {"fail": "cuIpcOpenMemHandle_v2:217"}, "cannot map memory of rank"),
        ("memory", {"memory_nbytes": 1 << 20}, "of GPU memory needed"),
        ("no gpu", {"no_gpu": 1}, "cuInit(0)"),
        ("pinning", {"fail": "cuMemHostRegister_v2:2"}, "cuMemHostRegister"),
    ],
)
def test_a_gpu_that_cannot_be_used(tmp_path: Path, how: str, stub: dict[str, object], expected: str) -> None:
    Place("cuda", tmp_path).run(["gpu_refused.py", how, expected], 2, 2, stub=stub)


def test_no_driver(tmp_path: Path) -> None:
    settings = {"HDMA_RENDEZVOUS": tmp_path, "HDMA_TIMEOUT_S": 30, "HDMA_DEVICE": "hip"}
    for each in ranks(2, [PROGRAMS / "gpu_refused.py", "nothing", "no HIP runtime"], environment(**settings)):
        assert each.code == 0, each.out


def test_gpus_kept_out(tmp_path: Path) -> None:
    Place("cuda", tmp_path).run(["gpu_refused.py", "host only", "HDMA_DEVICE=host"], 2, 2, HDMA_DEVICE="host")


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize(
    "function",
    [
        "cuCtxPushCurrent_v2:201",
        "cuEventQuery:700",
        "cuEventRecord:700",
        "cuLaunchKernel:1",
        "cuMemcpyAsync:700",
        "cuStreamBatchMemOp_v2:700",
        "cuStreamWaitEvent:700",
        "hipEventQuery:700",
        "hipEventRecord:700",
        "hipMemcpyAsync:700",
        "hipModuleLaunchKernel:1",
    ],
)
def test_a_driver_that_fails(tmp_path: Path, function: str, n: int) -> None:
    Place("hip" if function.startswith("hip") else "cuda", tmp_path).run(["gpu_failing.py", f"{function}@{n}"], 2, 2)


@pytest.mark.parametrize("fails", ["code", "Gpu", "connect", "Engine"])
@pytest.mark.parametrize("ranks_per_node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_gpu_side_that_one_rank_cannot_start(tmp_path: Path, fails: str, ranks_per_node: int) -> None:
    Place("cuda", tmp_path).run(f"gpu_scenes.py second {fails}", 2, 2, ranks_per_node)


@pytest.mark.parametrize("connections", [8, 1])
@pytest.mark.parametrize(
    "scene",
    [
        *(
            "aborted",
            "forked",
            "interrupted -",
            "interrupted close",
            "mismatch place",
            "mismatch size",
            "mismatch order",
        ),
        *("no_room", pytest.param("many", marks=pytest.mark.long)),
    ],
)
def test_scenes(tmp_path: Path, scene: str, connections: int) -> None:
    Place("cuda", tmp_path).run(f"gpu_scenes.py {scene}", 2, 2, CUDA_DEVICE_MAX_CONNECTIONS=connections)


@pytest.mark.long
def test_a_stream_that_never_comes_to_the_call(tmp_path: Path) -> None:
    Place("cuda", tmp_path).run("gpu_scenes.py hung", 2, 2, HDMA_TIMEOUT_S=1)


def test_a_started_call_whose_peer_is_gone_holds_nobody_up(tmp_path: Path) -> None:
    finished = Place("cuda", tmp_path).start("gpu_scenes.py suspended", 2, 2, timeout_s=30)
    assert finished[0].code == 0, finished[0].out


@pytest.mark.long
def test_the_started_call_is_what_is_late(tmp_path: Path) -> None:
    Place("cuda", tmp_path).run("gpu_scenes.py unfinished", 2, 2, HDMA_TIMEOUT_S=3)


@pytest.mark.parametrize("runtime", ["cuda", "hip"])
def test_arrays_of_other_libraries(tmp_path: Path, runtime: str) -> None:
    Place(runtime, tmp_path).run("gpu_arrays.py", 2, 2)


def test_more_sources_than_a_kernel_takes() -> None:
    layout = Layout.for_window(Topology(65, 1), 4, 256 << 20, 1 << 20)
    with pytest.raises(UsageError, match="at most 64"):
        Requests(layout, 0, gpu="cuda").reduced("reduce_scatter", "float32", 4, 4096, "sum", "float32")


# Only where there are GPUs.


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [16, 5])
def test_what_needs_compute_units(tmp_path: Path, blocks: int) -> None:
    print(Place("torch", tmp_path).run("gpu_profile.py", 2, 2, HDMA_REDUCE_BLOCKS=blocks))


@pytest.mark.gpu
def test_every_kernel(tmp_path: Path) -> None:
    Place("torch", tmp_path).run("gpu_kernel.py", 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [(2, 2, 0), (4, 2, 2)], ids=ids)
def test_expandable_segments(tmp_path: Path, grid: tuple[int, int, int]) -> None:
    place = Place("torch", tmp_path)
    place.run("gpu_order.py 100", *grid, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


@pytest.mark.gpu
@pytest.mark.parametrize("connections", [8, 1])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("program", ["backend_operations.py", "backend_training.py"])
def test_torch_distributed(tmp_path: Path, program: str, size: int, connections: int) -> None:
    if gpu_count() < size:
        pytest.skip(f"needs {size} GPUs: NCCL, for what is forwarded, has one rank a GPU")
    env = environment(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
        TEST_TORCH="cuda",
        CUDA_DEVICE_MAX_CONNECTIONS=connections,
    )
    done = run(
        [sys.executable, PROGRAMS / "forked.py", str(size), PROGRAMS / program, str(tmp_path)], env, timeout_s=100.0
    )
    assert done.code == 0, done.out


@pytest.mark.gpu
def test_a_timed_region_follows_what_made_its_tensors(tmp_path: Path) -> None:
    Place("torch", tmp_path).run("gpu_timed.py", 1, 1)
