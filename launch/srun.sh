#!/usr/bin/env bash
# srun inside a Slurm job: launch/srun.sh python -m hvfreeze train ...      (HVFREEZE_LAUNCHER=srun.sh sbatch launch/slurm.sbatch ...)
# srun with launch/settings.sh starts the ranks itself, through PMIx: `srun --mpi=list` must say pmix, and MPI must be built
# with it. Where several nodes share one /tmp, PMIxCliTmpDirBase in mpi.conf must be private to each. Slurm's time limit
# is the deadline.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/settings.sh"
. "$here/hosts.sh"

: "${SLURM_JOB_ID:?launch/srun.sh runs inside a Slurm job: sbatch launch/slurm.sbatch}"
hvfreeze_arguments "$0" "$@"
hvfreeze_settings "$ranks_per_node"
# sbatch's --export names what the job sees, and srun would send ranks no more than that.
# Without kill-on-bad-exit the ranks of a dead one wait for it until the time limit.
hvfreeze_exec srun --export=ALL --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none --ntasks="$np" "${command[@]}"
