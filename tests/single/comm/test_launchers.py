"""How many tasks were started, by what launchers of all kinds leave in the environment."""

from __future__ import annotations

import pytest

from hvfreeze.comm.mpi_environment import claimed_rank, claimed_tasks

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "tasks", "variable", "rank"),
    [
        ({}, 1, "", 0),
        (OPEN_MPI, 2, "OMPI_COMM_WORLD_SIZE", 1),
        ({**OPEN_MPI, "WORLD_SIZE": "8", "RANK": "5"}, 2, "OMPI_COMM_WORLD_SIZE", 1),
        ({"PMIX_RANK": "2"}, 3, "PMIX_RANK", 2),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, 2, "HOROVOD_SIZE", 0),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, 4, "SLURM_STEP_NUM_TASKS", 1),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, 2, "WORLD_SIZE", 1),
        ({"LOCAL_RANK": "1"}, 2, "LOCAL_RANK", 1),
        ({"PBS_TASKNUM": "2"}, 2, "PBS_TASKNUM", 0),
        ({"LSF_PM_TASKID": "2", "LSB_DJOB_NUMPROC": "4"}, 2, "LSF_PM_TASKID", 0),
        # Independent runs: arrays of jobs, and an allocation in whose script one process runs.
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1, "", 0),
        ({"PBS_ARRAY_INDEX": "3", "LSB_JOBINDEX": "2", "PARALLEL_SEQ": "4", "WORLD_SIZE": "many"}, 1, "", 0),
    ],
)
def test_whoever_started_several_tasks_is_noticed(
    environ: dict[str, str], tasks: int, variable: str, rank: int
) -> None:
    assert claimed_tasks(environ) == (tasks, variable)
    assert claimed_rank(environ) == rank
