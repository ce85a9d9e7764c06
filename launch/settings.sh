# The settings of every way to start hvfreeze, sourced by the scripts beside it. A variable that is already set wins.
# shellcheck shell=bash

# hvfreeze_nproc: cores of this machine; nproc alone would take the threads that a user asks of OpenMP for them.
hvfreeze_nproc() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# hvfreeze_settings RANKS: exports the settings for nodes that take up to RANKS ranks each, after hvfreeze_check_hosts, which
# knows the cores of other machines.
hvfreeze_settings() {
    local ranks=$1 cores=${HVFREEZE_CORES:-${hvfreeze_cores:-$(hvfreeze_nproc)}}

    # Threads beyond a rank's share of the cores only get in each other's way.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
    # A rank has a thread that computes and one that waits for others, which spins: where there are more of these than
    # cores, the waiting ones take the cores from those they wait for. Up to 100 times slower without this.
    if ((2 * ranks > cores)); then export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}; fi
    # Open MPI's own binding gives a rank one core, and on every node the same one when nodes share a machine.
    export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-none}
    # The same, and the next, as the launcher of Open MPI 5 calls them.
    export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-slot}
    # Fill the slots of a host before the next, so that neighbours in rank share a node.
    export OMPI_MCA_rmaps_base_mapping_policy=${OMPI_MCA_rmaps_base_mapping_policy:-slot}
    # What horovodrun asks for; the same transport and so the same bits under every launcher.
    export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-^openib}
    # A node that lost power says nothing: found in half a minute by these probes, in eight minutes without.
    export OMPI_MCA_oob_tcp_keepalive_time=${OMPI_MCA_oob_tcp_keepalive_time:-10}
    export OMPI_MCA_oob_tcp_keepalive_intvl=${OMPI_MCA_oob_tcp_keepalive_intvl:-5}
    export OMPI_MCA_oob_tcp_keepalive_probes=${OMPI_MCA_oob_tcp_keepalive_probes:-4}
    # A freed tensor's memory serves the next one. By default it returns to the kernel, which zeroes each page again.
    if ! compgen -e | grep -qE '^MALLOC_(MMAP|TRIM|TOP)'; then
        export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776
    fi
    # The reducer lays out its own buckets; fusion by timing would change the order of sums from run to run.
    export HOROVOD_FUSION_THRESHOLD=${HOROVOD_FUSION_THRESHOLD:-0}
    # A rank that the others have waited for so long is named and ends the job, whether it is stopped or goes astray.
    export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=${HOROVOD_STALL_SHUTDOWN_TIME_SECONDS:-600}
    # A rank that is stopped together with what watches it escapes that: mpirun ends the job after so many seconds, with code 110.
    export MPIEXEC_TIMEOUT=${MPIEXEC_TIMEOUT:-${HVFREEZE_DEADLINE:-86400}}

    # The network between the nodes, where the first one found is the wrong one (docker0, a management network).
    if [[ -n ${HVFREEZE_INTERFACES:-} ]]; then
        export OMPI_MCA_btl_tcp_if_include=$HVFREEZE_INTERFACES OMPI_MCA_oob_tcp_if_include=$HVFREEZE_INTERFACES
    fi
    # MPI's ports (FIRST-LAST), where a firewall lets only some through.
    if [[ -n ${HVFREEZE_PORTS:-} ]]; then
        export OMPI_MCA_oob_tcp_dynamic_ipv4_ports=$HVFREEZE_PORTS
        export OMPI_MCA_btl_tcp_port_min_v4=${HVFREEZE_PORTS%-*}
        export OMPI_MCA_btl_tcp_port_range_v4=$((${HVFREEZE_PORTS#*-} - ${HVFREEZE_PORTS%-*} + 1))
    fi
}

# hvfreeze_variables: names of the variables that ranks on other nodes need; HVFREEZE_KEEP="NAME NAME" adds to them.
hvfreeze_variables() {
    local name
    for name in $(compgen -e); do
        case $name in
            PATH | LD_LIBRARY_PATH | VIRTUAL_ENV | CONDA_PREFIX | PYTHON* | LANG | LC_* | TZ | TMPDIR) echo "$name" ;;
            OMP_* | MKL_* | MALLOC_* | GLIBC_TUNABLES | OMPI_MCA_* | PRTE_MCA_* | UCX_* | HOROVOD_* | HVFREEZE_* | CUDA_VISIBLE_DEVICES) echo "$name" ;;
            # Caches of weights and names of experiments. Addresses of servers, such as MLFLOW_TRACKING_URI, may hold a password.
            HF_HOME | HF_HUB_CACHE | HF_HUB_OFFLINE | TORCH_HOME | XDG_CACHE_HOME | WANDB_MODE | WANDB_PROJECT | MLFLOW_EXPERIMENT_NAME) echo "$name" ;;
            *) [[ " ${HVFREEZE_KEEP:-} " != *" $name "* ]] || echo "$name" ;;
        esac
    done
}

# hvfreeze_exec COMMAND...: runs it with these variables and what a launcher needs, and no other: horovodrun sends its whole
# environment to all nodes, tokens and passwords included.
hvfreeze_exec() {
    local name keep=()
    for name in $(hvfreeze_variables) $(compgen -e); do
        case $name in
            SLURM_JWT) ;;
            HOME | USER | LOGNAME | SHELL | TERM | SSH_AUTH_SOCK | MPIEXEC_* | SLURM_* | PBS_*) keep+=("$name=${!name}") ;;
        esac
    done
    for name in $(hvfreeze_variables); do keep+=("$name=${!name}"); done
    exec env -i "${keep[@]}" "$@"
}
