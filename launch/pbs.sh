#!/usr/bin/env bash
# qsub launch/pbs.sh   with the training command in TRAIN:   qsub -v TRAIN="python -m hvfreeze train --run-dir runs/a ..." launch/pbs.sh
# Submit with .venv active, from the clone. qsub ends TRAIN at a comma, and quotes within TRAIN do not hold words together.
# PBS Professional and OpenPBS. Not tried: there is no PBS to be had here; what it starts is tried under Slurm and over ssh.
#PBS -N hvfreeze
#PBS -l select=4:ncpus=8:mpiprocs=1
#PBS -l walltime=24:00:00
#PBS -r y
#PBS -j oe
set -uo pipefail
cd "$PBS_O_WORKDIR"
# PBS gives the job a PATH of its own, without the .venv that was active at qsub.
export PATH=${PBS_O_PATH:-$PATH}

# One line a rank in PBS's file; mpirun of an Open MPI built without PBS support does not know it.
hosts=$(sort "$PBS_NODEFILE" | uniq -c | awk '{print $2 ":" $1}' | paste -sd,)
read -ra command <<<"$TRAIN"
launch/restart --max-restarts "${HVFREEZE_RESTARTS:-2}" --drop-dead-hosts -- launch/mpirun.sh -H "$hosts" "${command[@]}" --resume &
# qdel and preemption send SIGTERM and SIGKILL a few seconds later (kill_delay): enough to write a checkpoint on most sites.
trap 'kill -USR1 $!' TERM USR1
wait $!
code=$?
while kill -0 $! 2>/dev/null; do
    wait $!
    code=$?
done
# 75: a checkpoint was written; PBS starts a job marked -r y again with qrerun.
((code != 75)) || qrerun "$PBS_JOBID"
exit "$code"
