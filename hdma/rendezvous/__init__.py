"""Where ranks meet before they are connected: each gives some bytes under a key, all get everyone's.

Used at start-up only. `make` chooses: the folder HDMA_RENDEZVOUS if set, torch's store where torch or torchrun has one,
else MPI. To add a meeting place: a file with a subclass, and a line in `make`.
"""

from __future__ import annotations

import os
import sys

from hdma import env
from hdma.errors import UsageError
from hdma.launch import Launch
from hdma.rendezvous.base import Rendezvous, SingleProcess

__all__ = ["Rendezvous", "SingleProcess", "make"]

# All starts of a job have the same name: what tells them apart is what the ranks join with (board.py).
_WORLD = "world"


def make(launch: Launch, timeout_s: float) -> Rendezvous:
    """The meeting place of this job; returns once this rank has joined it.

    Raises `UsageError` where ranks cannot meet (nothing to meet by, or a rank joined twice) and hdma's `TimeoutError`
    where another rank that is needed to join is missing after `timeout_s`.
    """
    if launch.size == 1:
        return SingleProcess()
    folder = env.RENDEZVOUS.read()
    if folder is not None:
        from hdma.rendezvous.folder import Folder

        return Folder(launch, folder, _WORLD, timeout_s)
    dist = sys.modules.get("torch.distributed")
    if launch.launcher == "torch.distributed" and dist:
        from hdma.rendezvous.torch_store import TorchStore

        return TorchStore(launch, dist.distributed_c10d._get_default_store(), _WORLD, timeout_s=timeout_s)
    if launch.launcher in ("mpirun", "mpiexec"):
        from hdma.rendezvous.mpi import Mpi

        return Mpi(launch, _WORLD, timeout_s)
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        from hdma.rendezvous import torch_store

        return torch_store.from_environment(launch, _WORLD, timeout_s)
    if launch.launcher == "srun":
        from hdma.rendezvous.mpi import Mpi

        return Mpi(launch, _WORLD, timeout_s)
    raise UsageError(
        f"{launch}: the ranks have no place to meet. Set HDMA_RENDEZVOUS to a folder that all ranks share, or "
        "MASTER_ADDR and MASTER_PORT to an address of rank 0, or start the program with torchrun or mpirun"
    )
