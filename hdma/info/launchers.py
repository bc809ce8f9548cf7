"""Checks of the mpirun on PATH: would it refuse, and is it that of the MPI which mpi4py loads?"""

from __future__ import annotations

import os
from typing import Any

from hdma.info.checks import Check

_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_MAPPING, _BINDING = "PRTE_MCA_rmaps_default_mapping_policy", "PRTE_MCA_hwloc_default_binding_policy"
# The ranks that README's commands and most tests ask for.
_USUAL_RANKS = 4


def checks(mpirun: dict[str, str] | None, library: dict[str, str] | None, cores: int) -> list[Check]:
    if mpirun is None:
        evidence = "none on PATH; torchrun, srun or RANK and WORLD_SIZE start ranks as well"
        found = [Check("mpirun", "ok", evidence)]
    elif mpirun["mpi"] == "Open MPI":
        found = _open_mpi(mpirun, cores)
    else:
        found = [
            Check("mpirun", "ok", f"{mpirun['path']} is {mpirun['mpi'] or 'of an unknown MPI'} {mpirun['version']}")
        ]
    return found + _library(mpirun, library)


def _open_mpi(mpirun: dict[str, str], cores: int) -> list[Check]:
    about = f"{mpirun['path']} (Open MPI {mpirun['version']})"
    found = []
    missing = [name for name in _ROOT if os.environ.get(name) != "1"]
    if os.geteuid() == 0 and missing:
        remedy = f"export {' '.join(f'{name}=1' for name in missing)}, or mpirun --allow-run-as-root, or another user"
        found.append(Check("mpirun", "warn", f"{about} refuses to run as root", remedy))
    # SLURM and hostfiles say how many slots there are; otherwise each core is one.
    if "oversubscribe" not in os.environ.get(_MAPPING, "").lower() and cores < _USUAL_RANKS:
        remedy = f"mpirun --map-by :oversubscribe --bind-to none, or export {_MAPPING}=:oversubscribe {_BINDING}=none"
        evidence = f"{about} refuses more than {cores} ranks: 'not enough slots', of which each core is one"
        found.append(Check("mpirun", "warn", evidence, remedy))
    return found or [Check("mpirun", "ok", f"{about} would start {_USUAL_RANKS} ranks here")]


def _library(mpirun: dict[str, str] | None, library: dict[str, Any] | None) -> list[Check]:
    if library is None:
        if mpirun is None:
            return []
        remedy = "install hdma[mpi], or set HDMA_RENDEZVOUS to a folder that all ranks share"
        return [Check("mpi4py", "warn", "not installed: ranks that mpirun starts have no place to meet", remedy)]
    if library["error"]:
        remedy = "install hdma[mpi], or set MPI4PY_LIBMPI to the libmpi.so of your mpirun"
        return [Check("mpi4py", "warn", f"cannot load an MPI: {library['error']}", remedy)]
    about = f"loads {library['mpi']} {library['version']}"
    if mpirun and mpirun["mpi"] and mpirun["mpi"] != library["mpi"]:
        remedy = "set MPI4PY_LIBMPI to the libmpi.so of that mpirun, or put the other's mpirun first in PATH"
        return [Check("mpi4py", "warn", f"{about}, but {mpirun['path']} is {mpirun['mpi']}", remedy)]
    return [Check("mpi4py", "ok", about)]
