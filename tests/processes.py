"""Real processes for tests: as ranks by themselves, under mpirun, under torchrun. Always with a time limit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# How much longer things may take here than elsewhere; the VM with RDMA devices (tests/rdma) says 20.
SLOWDOWN = float(os.environ.get("TEST_SLOWDOWN", "1"))
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_COMM_", "PMI", "SLURM_", "HDMA_")


def environment(**more: object) -> dict[str, str]:
    """This process's environment without any launcher's or hdma's variables, set for mpirun in a container."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    plain |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMP_NUM_THREADS": "1",
        "TESTED_BY": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    return plain | {name: str(value) for name, value in more.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Finished:
    """A process that has ended: `code`, `out` (stdout and stderr together)."""

    def __init__(self, code: int, out: str) -> None:
        self.code, self.out = code, out


def run(args: Sequence[str | Path], env: Mapping[str, str], timeout_s: float = 60.0) -> Finished:
    """Runs one command to its end; its whole process group is killed at the time limit, and the test fails."""
    return run_all([(args, env)], timeout_s)[0]


def run_all(commands: Iterable[tuple[Sequence[str | Path], Mapping[str, str]]], timeout_s: float) -> list[Finished]:
    """Runs commands side by side to their ends; `timeout_s` is for a machine of usual speed."""
    started = [
        subprocess.Popen(
            [str(arg) for arg in args],
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for args, env in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s * SLOWDOWN)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return [Finished(process.returncode, out) for process, out in zip(started, outputs)]


def ranks(
    size: int,
    args: Sequence[str | Path],
    env: Mapping[str, str],
    absent: Sequence[int] = (),
    timeout_s: float = 60.0,
) -> list[Finished]:
    """`size` Python processes with RANK and WORLD_SIZE, without those of `absent`."""
    present = [rank for rank in range(size) if rank not in absent]
    commands = [([sys.executable, *args], {**env, "RANK": str(r), "WORLD_SIZE": str(size)}) for r in present]
    return run_all(commands, timeout_s)


def mpirun(size: int, args: Sequence[str | Path], env: Mapping[str, str], timeout_s: float = 90.0) -> Finished:
    """Python under the mpirun that is installed beside it."""
    return run([Path(sys.executable).parent / "mpirun", "-n", str(size), sys.executable, *args], env, timeout_s)


def torchrun(size: int, args: Sequence[str | Path], env: Mapping[str, str], timeout_s: float = 90.0) -> Finished:
    """Python under torchrun, on a port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return run([*launcher, *args], env, timeout_s)
