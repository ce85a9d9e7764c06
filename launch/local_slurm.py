"""A real Slurm on a local cluster: munged and slurmd on every node, slurmctld on the first.

    launch/local_slurm up --nodes 4
    launch/cluster run -- sbatch launch/slurm.sbatch python -m hvfreeze train --run-dir runs/a ...
    launch/cluster run -- squeue
    launch/local_slurm down

It is a cluster of launch/cluster, with the same options, whose nodes also have these daemons. Debian's packages
slurm-wlm and munge are needed; the machine's own /etc/slurm and /etc/munge are neither read nor written.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

import cluster_cli
import local_cluster
from cluster_state import Cluster, ClusterError

START_SECONDS = 30.0
DAEMONS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}

# cred_expire: a requeued job waits this long, two minutes by default. Partition low is preempted by high: its jobs get
# the SIGUSR1 that they asked for (preempt_send_user_signal), and GraceTime seconds.
CONFIG = """\
ClusterName=hvfreeze
SlurmctldHost=node0
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmUser=root
MailProg=/bin/true
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Return what this machine lacks, each with its remedy."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = {package for program, package in DAEMONS.items() if shutil.which(program, path=path) is None}
    return local_cluster.missing() + [
        f"{package} is missing; run apt-get install {package}" for package in sorted(packages)
    ]


def start_slurm(cluster: Cluster) -> Cluster:
    """Return a cluster whose commands use this Slurm, after all nodes are idle.

    Raises:
        ClusterError: a daemon did not start.
    """
    nodes = "\n".join(f"NodeName={node.name} NodeAddr={node.address} CPUs={cluster.slots}" for node in cluster.nodes)
    config = cluster.directory / "slurm.conf"
    config.write_text(CONFIG.format(nodes=nodes))
    # Nothing here uses control groups, and slurmd would look for them.
    (cluster.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    # srun --mpi=pmix makes directories named by the job alone, in the /tmp that these nodes share.
    (cluster.directory / "mpi.conf").write_text(f"PMIxCliTmpDirBase={cluster.directory}/local\n")
    key = cluster.directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    environment = {"SLURM_CONF": str(config)}
    for node in cluster.nodes:
        script = (
            "mkdir -p /run/munge /run/slurm/state /run/slurm/spool && chmod 755 /run/munge && "
            f"munged --force --key-file={key} --log-file=/run/slurm/munged.log "
            "--seed-file=/run/slurm/munge.seed --pid-file=/run/munge/munged.pid && "
            f"{'slurmctld &&' if node == cluster.nodes[0] else ''} slurmd"
        )
        done = local_cluster.call(node, ["sh", "-c", script], environment)
        if done.returncode != 0:
            logs = local_cluster.call(
                node, ["sh", "-c", "cat /run/slurm/*.log | grep -i -E 'error|fatal' | tail -n 3"], {}
            )
            raise ClusterError(f"{node.name}: {(done.stderr + logs.stdout).strip()}")
    deadline = time.monotonic() + START_SECONDS
    while True:
        said = local_cluster.call(cluster.nodes[0], ["sinfo", "-h", "-p", "low", "-N", "-o", "%N %t"], environment)
        if said.stdout.count(" idle\n") == len(cluster.nodes):
            return cluster.with_environment(environment)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the nodes are not idle after {START_SECONDS:.0f} s: {(said.stdout or said.stderr).split()}"
            )
        time.sleep(0.1)


def main(argv: Sequence[str]) -> int:
    """Run the command line of launch/cluster, on clusters that also have Slurm."""
    return cluster_cli.main(argv, program="launch/local_slurm", lacking=missing, prepare=start_slurm)
