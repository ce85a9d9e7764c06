#!/usr/bin/env bash
# launch/mpirun.sh -np 4 -H node0:1,node1:1,node2:1,node3:1 python -m hvfreeze train ...
# launch/mpirun.sh -np 4 --hostfile hosts.txt python -m hvfreeze train ...          (a line a host: node0 slots=1)
# Open MPI's mpirun with launch/settings.sh: unlike horovodrun, ssh checks host keys and only named variables travel. Inside a
# Slurm or PBS job, without hosts, it takes the nodes of the job.
# MPICH: mpiexec -n 4 -hosts node0,node1 -genvlist "$(. settings.sh; hvfreeze_settings 1; hvfreeze_variables | paste -sd,)"
# COMMAND; it also ends after $MPIEXEC_TIMEOUT seconds, binds nothing by default, and ignores OMPI_MCA_*.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/settings.sh"
. "$here/hosts.sh"

hvfreeze_arguments "$0" "$@"
where=()
if [[ -n $hosts ]]; then
    hvfreeze_check_hosts "$0"
    where=(-H "$hosts")
fi
hvfreeze_settings "$ranks_per_node"
# A container's root is asked to say so twice.
((EUID != 0)) || where+=(--allow-run-as-root)
for name in $(hvfreeze_variables); do where+=(-x "$name"); done
hvfreeze_exec mpirun -np "$np" "${where[@]}" "${command[@]}"
