"""Who am I: rank and size, from the innermost launcher that started this process.

Launchers nest (`srun torchrun`, `mpirun` in a batch script), and the variables of the outer ones are inherited. So the
sources are asked from the inside out: torch.distributed where the program has initialised it, torchrun, RANK and
WORLD_SIZE, Open MPI, MPICH, srun. Only RANK and WORLD_SIZE beside an MPI launcher can contradict, and then it is said.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hdma.errors import UsageError

# SLURM numbers its own steps (batch script, interactive shell of salloc, external) from here: no step of srun's.
_FIRST_SLURM_OWN_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launch:
    """`job_id` is the same on all ranks of a job and differs between jobs, where the launcher gives such a thing."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str
    job_id: str | None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.launcher})"


def find(environ: Mapping[str, str] = os.environ) -> Launch:
    """This process's place in its job. Raises `UsageError` where the environment is half set or contradicts itself."""
    if environ is os.environ and (joined := _torch_distributed()):
        return joined
    explicit, mpi = _explicit(environ), _mpi(environ)
    if explicit and explicit.launcher == "torchrun":
        return explicit
    if explicit and mpi and (explicit.rank, explicit.size) != (mpi.rank, mpi.size):
        raise UsageError(
            f"RANK and WORLD_SIZE say rank {explicit.rank} of {explicit.size}, but {mpi.launcher} started this process "
            f"as rank {mpi.rank} of {mpi.size}. Unset RANK and WORLD_SIZE, or start the program without {mpi.launcher}"
        )
    launch = mpi or explicit or _slurm(environ)
    if launch is None and "PMIX_RANK" in environ:
        raise UsageError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set, so this process is one of several, but nothing says of how "
            "many. Start the program with mpirun or torchrun, or set RANK and WORLD_SIZE"
        )
    return launch or Launch(0, 1, 0, 1, "single process", None)


def _torch_distributed() -> Launch | None:
    dist = sys.modules.get("torch.distributed")
    if not dist or not dist.is_available() or not dist.is_initialized():
        return None
    return Launch(dist.get_rank(), dist.get_world_size(), None, None, "torch.distributed", None)


def _explicit(environ: Mapping[str, str]) -> Launch | None:
    elastic = "TORCHELASTIC_RUN_ID" in environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    launch = _read(environ, "torchrun" if elastic else "RANK and WORLD_SIZE", *names)
    if launch is None or not elastic:
        return launch
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return _with_job(launch, "-".join(environ.get(part, "") for part in parts))


def _mpi(environ: Mapping[str, str]) -> Launch | None:
    world = "OMPI_COMM_WORLD_"
    launch = _read(environ, "mpirun", *(world + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    if launch:
        return _with_job(launch, environ.get("PMIX_NAMESPACE"))
    return _read(environ, "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    # The shell of salloc and a batch script see SLURM_NTASKS, and often SLURM_PROCID, of a job whose tasks are not
    # started yet: only a process in a step of srun's is one of them.
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= _FIRST_SLURM_OWN_STEP:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    launch = _read(environ, "srun", "SLURM_PROCID", size, "SLURM_LOCALID", None)
    parts = (environ.get("SLURM_JOB_ID", ""), step, environ.get("SLURM_RESTART_COUNT", "0"))
    return _with_job(launch, "-".join(parts)) if launch else None


def _with_job(launch: Launch, job_id: str | None) -> Launch:
    return Launch(launch.rank, launch.size, launch.local_rank, launch.local_size, launch.launcher, job_id)


def _read(
    environ: Mapping[str, str], launcher: str, rank: str, size: str, local_rank: str, local_size: str | None
) -> Launch | None:
    """A Launch of the variables with these names; None where neither of the first two is set."""
    values: dict[str, int | None] = {}
    for name in (rank, size, local_rank, local_size):
        text = environ.get(name, "") if name else ""
        if text and not text.isdecimal():
            raise UsageError(f"{name}={text!r} is not a whole number; {launcher} sets it, or unset it")
        values[name or ""] = int(text) if text else None
    r, n = values[rank], values[size]
    if r is None and n is None:
        return None
    if r is None or n is None:
        there, missing = (rank, size) if n is None else (size, rank)
        raise UsageError(
            f"{there}={environ[there]} is set but {missing} is not, so this process cannot know its place among the "
            f"ranks. Set both ({launcher} does), or unset {there}"
        )
    if not 0 <= r < n:
        raise UsageError(f"{rank}={r} with {size}={n}: ranks go from 0 to {size} - 1. Correct one of them")
    return Launch(r, n, values[local_rank], values[local_size or ""], launcher, None)
