#!/usr/bin/env bash
# launch/horovodrun.sh -np 4 -H node0:1,node1:1,node2:1,node3:1 python -m hvfreeze train ...
# launch/horovodrun.sh -np 4 --hostfile hosts.txt python -m hvfreeze train ...      (a line a host: node0 slots=1)
# horovodrun with launch/settings.sh, on hosts that were checked first. Without hosts: all ranks on this machine,
# inside a Slurm or PBS job on its nodes.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/settings.sh"
. "$here/hosts.sh"

hvfreeze_arguments "$0" "$@"
command -v horovodrun >/dev/null || { echo "$0: no horovodrun in PATH: run \`make setup\` and activate .venv" >&2; exit 2; }
# mpirun asks Slurm for the nodes of the job; horovodrun does not.
[[ -n $hosts ]] || hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | sed "s/\$/:$ranks_per_node/" | paste -sd,) || true
[[ -n $hosts ]] || { echo "$0: scontrol names no node of this Slurm job: name hosts with -H" >&2; exit 2; }
# horovodrun's own ssh accepts any host key; the check does the same, so that it answers for the same connection.
hvfreeze_check_hosts "$0" -o StrictHostKeyChecking=no
hvfreeze_settings "$ranks_per_node"
# Its cache remembers for an hour which hosts answered, which is wrong as soon as one dies.
hvfreeze_exec python3 "$here/guard.py" horovodrun --mpi --disable-cache -np "$np" -H "$hosts" \
    ${HVFREEZE_INTERFACES:+--network-interfaces "$HVFREEZE_INTERFACES"} "${command[@]}"
