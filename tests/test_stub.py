"""The stub GPU driver does what hdma relies on: memory shared by processes, flags, events, held streams, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import stub_gpu
from processes import Finished, environment, ranks

PROGRAM = Path(__file__).parent / "programs" / "stub_use.py"
RUNTIMES = ("cuda", "hip")
Use = Callable[..., list[Finished]]


@pytest.fixture(scope="module")
def stub() -> Path:
    return stub_gpu.build()


@pytest.fixture
def use(stub: Path) -> Use:
    """Runs functions of programs/stub_use.py in as many processes as asked for."""

    def run_it(what: str, runtime: str = "cuda", size: int = 1, **more: object) -> list[Finished]:
        own = {name: more.pop(name) for name in list(more) if name.isupper()}
        env = environment(**stub_gpu.variables(stub, runtime, **more), **own)
        return ranks(size, [PROGRAM, *what.split()], env, timeout_s=30)

    return run_it


def check(finished: list[Finished]) -> None:
    assert all(one.code == 0 for one in finished), "\n".join(one.out for one in finished)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_two_processes(use: Use, tmp_path: Path, runtime: str) -> None:
    check(use("exchange", runtime, size=2, SHARED=tmp_path, delay_us=300, log=tmp_path / "log"))
    copies = stub_gpu.calls(tmp_path / "log", "copy")
    assert stub_gpu.tally(copies, "kind")["peer"] == 20 and stub_gpu.tally(copies, "kind")["local"] == 0
    kernels = stub_gpu.calls(tmp_path / "log", "kernel", name="hdma_reduce_float32_float32")
    assert [(kernel["grid"], kernel["block"]) for kernel in kernels] == [("16,1,1", "512,1,1")] * 2


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_process(use: Use, runtime: str) -> None:
    check(use("memory events kernels forked errors", runtime, memory_nbytes=1 << 20))


@pytest.mark.parametrize("connections", [1, 3])
def test_held_streams(use: Use, connections: int) -> None:
    check(use("held", CUDA_DEVICE_MAX_CONNECTIONS=connections))


def test_batches_have_no_order(use: Use) -> None:
    check(use("batches"))


def test_ends_while_held(use: Use) -> None:
    check(use("ends_while_held"))


def test_no_gpu(use: Use) -> None:
    check(use("no_gpu", no_gpu=1))
    check(use("no_gpu", "hip", no_gpu=1))


def test_visible_devices(use: Use) -> None:
    check(use("visible", gpus=4, CUDA_VISIBLE_DEVICES="2,0"))
    check(use("visible", "hip", gpus=4, HIP_VISIBLE_DEVICES="2,0"))


def test_wanted_failures(use: Use) -> None:
    check(use("failing", fail="cuStreamQuery:217,cuMemGetInfo_v2:2@3"))
