"""Who am I, from every launcher's variables, nested ones too; half-set and contradictory environments are refused."""

import pytest
from processes import environment, mpirun, torchrun

from hdma import errors
from hdma.launch import find

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "5",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}


def place(environ):
    found = find(environ)
    return found.rank, found.size, found.local_rank, found.local_size, found.launcher


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, "single process")),
        (TORCHRUN, (3, 4, 1, 2, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 2, None, None, "RANK and WORLD_SIZE")),
        (OPENMPI, (1, 2, 1, 2, "mpirun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, (1, 2, 0, 1, "mpiexec")),
        (SRUN, (2, 3, 0, None, "srun")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "2"}, (2, 4, 0, None, "srun")),
        # Nested: srun or mpirun starts one torchrun a node, whose workers inherit the outer variables.
        ({**SRUN, **TORCHRUN}, (3, 4, 1, 2, "torchrun")),
        ({**OPENMPI, **TORCHRUN}, (3, 4, 1, 2, "torchrun")),
        ({**SRUN, **OPENMPI}, (1, 2, 1, 2, "mpirun")),
        # RANK and WORLD_SIZE copied from Open MPI's own agree.
        ({**OPENMPI, "RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2, "mpirun")),
        # The shell of salloc, its interactive step, and a batch script: no task of the job has started.
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, (0, 1, 0, 1, "single process")),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)}, (0, 1, 0, 1, "single process")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, (0, 1, 0, 1, "single process")),
    ],
)
def test_found(environ, expected):
    assert place(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks go from 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "ranks go from 0"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "not a whole number"),
        ({**OPENMPI, "RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE say rank 0 of 2, but mpirun"),
        ({"PMIX_RANK": "0"}, "nothing says of how many"),
    ],
)
def test_refused(environ, message):
    with pytest.raises(errors.UsageError, match=message):
        find(environ)


def test_job_id():
    """The same for all ranks of a job, another after a restart and for another job."""
    assert find({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}).job_id == find(TORCHRUN).job_id
    assert find({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).job_id != find(TORCHRUN).job_id
    assert find({**TORCHRUN, "MASTER_PORT": "6"}).job_id != find(TORCHRUN).job_id
    assert find(OPENMPI).job_id == "prterun-host-1@1"
    assert find({**SRUN, "SLURM_RESTART_COUNT": "2"}).job_id == "77-1-2"
    assert find({}).job_id is None


@pytest.mark.parametrize(("start", "launcher"), [(mpirun, "mpirun"), (torchrun, "torchrun")])
def test_real_launchers(tmp_path, start, launcher):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom hdma.launch import find\nme = find()\n"
        "place = (me.rank, me.size, me.local_rank, me.local_size, me.launcher)\n"
        "Path(sys.argv[1], str(me.rank)).write_text(repr((place, me.job_id)))\n"
    )
    done = start(2, [program, tmp_path], environment())
    assert done.code == 0, done.out
    found = [eval((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [place for place, _ in found] == [(rank, 2, rank, 2, launcher) for rank in range(2)]
    assert found[0][1] == found[1][1] and found[0][1]
