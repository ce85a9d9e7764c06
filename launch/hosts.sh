# Hosts and arguments of horovodrun.sh and mpirun.sh: read, checked before anything starts.
# shellcheck shell=bash

# What a host may be called, with its slots: ssh takes a name that begins with - for an option, such as one that runs a
# command. launch/restarts.py and `hvfreeze doctor` have the same rule.
hvfreeze_host='[A-Za-z0-9][A-Za-z0-9._-]*(:[1-9][0-9]{0,5})?'

# hvfreeze_arguments SCRIPT ARGUMENTS...: sets np, hosts (NAME:SLOTS,..., each name once; "" for those of the Slurm job),
# ranks_per_node and command.
hvfreeze_arguments() {
    local script=$1 hostfile='' given='' usage
    usage="usage: $script -np N [-H HOST:SLOTS,... | --hostfile FILE] COMMAND..."
    shift
    np='' hosts=''
    while (($# > 0)); do
        case $1 in
            -np | -n) np=${2:-} ;;
            -H | --host | --hosts) hosts=${2:-} given=$1 ;;
            -hostfile | --hostfile) hostfile=${2:-} given="$1 ${2:-}" ;;
            -*) echo "$script: $1 is an unknown option (set Open MPI's options by variables OMPI_MCA_*); $usage" >&2; exit 2 ;;
            *) break ;;
        esac
        shift $(($# > 1 ? 2 : 1))
    done
    command=("$@")
    [[ ${np:-1} =~ ^[1-9][0-9]*$ && ${#command[@]} -gt 0 ]] || { echo "$usage" >&2; exit 2; }
    [[ -n $given || -n ${SLURM_NNODES:-} ]] || hostfile=${PBS_NODEFILE:-}
    if [[ -n $hostfile ]]; then
        [[ -r $hostfile ]] || { echo "$script: hostfile $hostfile cannot be read" >&2; exit 2; }
        hosts=$(sed -E 's/#.*//; s/^\s+//; s/\s+$//; /^$/d; s/\s+slots\s*=\s*/:/; s/^[^:]+$/&:1/' "$hostfile" | paste -sd,)
    fi
    [[ -z $given || -n $hosts ]] || { echo "$script: $given names no host; name one, or leave it out; $usage" >&2; exit 2; }
    if [[ -z $hosts && -n ${SLURM_NNODES:-} ]]; then
        np=${np:-${SLURM_NTASKS:-$SLURM_NNODES}}
        ranks_per_node=$(((np + SLURM_NNODES - 1) / SLURM_NNODES))
        return
    fi
    [[ -n $hosts ]] || hosts=localhost:${np:-1}
    [[ $hosts =~ ^$hvfreeze_host(,$hvfreeze_host)*$ ]] || { echo "$script: hosts $hosts must be HOST:SLOTS,...; $usage" >&2; exit 2; }
    local part name slots total=0 most=0 names=()
    local -A slots_of=()
    for part in ${hosts//,/ }; do
        name=${part%%:*} slots=1
        [[ $part != *:* ]] || slots=${part##*:}
        [[ -n ${slots_of[$name]:-} ]] || names+=("$name")
        # A file such as PBS's names a host once for each of its ranks.
        slots_of[$name]=$((${slots_of[$name]:-0} + slots))
        ((total += slots, most = ${slots_of[$name]} > most ? ${slots_of[$name]} : most))
    done
    hosts=''
    for name in "${names[@]}"; do hosts+=${hosts:+,}$name:${slots_of[$name]}; done
    np=${np:-$total}
    ((np <= total)) || { echo "$script: -np $np, but the hosts have $total slots: $hosts" >&2; exit 2; }
    # shellcheck disable=SC2034
    ranks_per_node=$((most < np ? most : np))
}

# hvfreeze_probe COMMAND...: runs on a node; one line for what a rank would lack there.
hvfreeze_probe() {
    local directory
    cd "$start" 2>/dev/null || { echo "has no directory $start (use a shared file system, or the same path on all nodes)"; return; }
    for directory in "${TMPDIR:-/tmp}" "${HVFREEZE_CACHE_DIR:-}"; do
        while [[ -n $directory && ! -e $directory ]]; do directory=$(dirname "$directory"); done
        [[ -z $directory ]] || (umask 077; f=$(mktemp "$directory/.hvfreeze.XXXXXX") && head -c 1048576 /dev/zero >"$f"; code=$?; rm -f "$f"; exit $code) 2>/dev/null ||
            { echo "cannot write 1 MiB to $directory ($(df -h --output=avail "$directory" 2>/dev/null | tail -n 1 | tr -d ' ') free); free some space, or set TMPDIR or --cache-dir"; return; }
    done
    command -v "$1" >/dev/null || { echo "has no $1 in PATH=$PATH (run \`make setup\` there, or share the environment)"; return; }
    [[ "$2 $3" != "-m hvfreeze" ]] || "$1" -c 'import importlib.util as u, sys
lacking = [n for n in ("hvfreeze", "torch", "horovod", "mpi4py") if u.find_spec(n) is None]
print("has no Python package " + ", ".join(lacking) + " for " + sys.executable + " (run `make setup` there)" if lacking else "", end="")'
}

# hvfreeze_check_hosts SCRIPT SSH_OPTION...: every host answers and can run `command`, or one line a host says what to mend.
# Exit code 2: to be mended by hand; 1: a host does not answer, which may pass. Sets hvfreeze_cores to those of the host that
# has fewest.
hvfreeze_check_hosts() {
    local script=$1 directory name host message cores code=0 remote=''
    shift
    directory=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$directory'" EXIT
    trap 'exit 143' TERM
    for name in PATH PYTHONPATH LD_LIBRARY_PATH TMPDIR; do [[ -z ${!name:-} ]] || remote+="export $name=${!name@Q}; "; done
    for ((i = 1; i < ${#command[@]}; i++)); do
        [[ ${command[i - 1]} != --cache-dir ]] || remote+="HVFREEZE_CACHE_DIR=${command[i]@Q}; "
    done
    # The mark tells the answer from what a login script prints.
    remote+="start=${PWD@Q}; $(declare -f hvfreeze_nproc hvfreeze_probe); echo \"hvfreeze cores: \$(hvfreeze_nproc)\"; echo \"hvfreeze: \$(hvfreeze_probe ${command[*]@Q})\""
    for host in ${hosts//,/ }; do
        host=${host%%:*}
        case $host in
            localhost | 127.0.0.1 | "$(hostname)") bash -s <<<"$remote" >"$directory/$host" 2>&1 & ;;
            *) ssh -o BatchMode=yes -o ConnectTimeout=5 "$@" "$host" bash -s <<<"$remote" >"$directory/$host" 2>&1 & ;;
        esac
    done
    wait
    for host in ${hosts//,/ }; do
        host=${host%%:*}
        message=$(<"$directory/$host")
        if [[ $message =~ "hvfreeze cores: "([0-9]+) ]]; then
            cores=${BASH_REMATCH[1]}
            hvfreeze_cores=$((cores < ${hvfreeze_cores:-cores} ? cores : ${hvfreeze_cores:-cores}))
        fi
        case $message in
            *"hvfreeze: "*) message=${message##*hvfreeze: } ;;
            *"not resolve"*) message='this name has no address: correct -H or the hostfile' ;;
            *"Permission denied"*) message="ssh rejects the key: run \`ssh-copy-id $host\` until \`ssh $host true\` works without a password" ;;
            *"Host key verification failed"*) message="the host key is unknown to ssh: verify it, then run \`ssh-keyscan $host >> ~/.ssh/known_hosts\`" ;;
            *"timed out"* | *refused* | *"No route"* | *unreachable* | *"closed by"* | *"reset by"* | *"booting up"*) message="does not answer ssh (${message##*: }): check that it is up and sshd is running" ;;
            *) message="ssh says: ${message##*$'\n'}" ;;
        esac
        [[ -n $message ]] || continue
        echo "$script: $host: $message" >&2
        if [[ $message != "does not answer"* ]]; then code=2; elif ((code == 0)); then code=1; fi
    done
    ((code == 0)) || exit "$code"
    rm -rf "$directory"
    trap - EXIT TERM
}
