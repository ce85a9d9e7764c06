"""`hvfreeze doctor`: is this machine fit to train, and if not, what to mend.

`local_checks` finds the facts and has them checked, `run_doctor` prints what came of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from hvfreeze.doctor.checks import (
    CheckResult,
    check_cores,
    check_disk,
    check_hdf5,
    check_horovod,
    check_horovod_torch,
    check_memory,
    check_mpi4py,
    check_mpirun,
    check_processor,
    check_python,
    check_shared_memory,
    check_torch,
    check_torchvision,
    check_user,
    exit_code,
    table,
)
from hvfreeze.doctor.libraries import mpi_name, probe, run_and_read


def run_doctor() -> int:
    """Print a table of all local checks; return 0 when this machine is usable (notes do not count), 3 otherwise."""
    checks = local_checks()
    print(table(checks))
    return exit_code(checks)


def local_checks() -> list[CheckResult]:
    """Return all checks of this machine, in the order of the table; it takes seconds to load every library."""
    horovod = probe("horovod")
    mpirun_text, mpirun_error = run_and_read(["mpirun", "--version"])
    disk = shutil.disk_usage(Path.cwd())
    return [
        check_python(sys.version_info[:3], executable=sys.executable),
        check_torch(probe("torch")),
        check_torchvision(probe("torchvision")),
        check_horovod(horovod),
        check_horovod_torch(horovod),
        check_mpirun(mpi_name(mpirun_text), error=mpirun_error, horovod=horovod),
        check_mpi4py(probe("mpi4py"), horovod=horovod),
        check_hdf5(probe("h5py")),
        check_cores(
            len(os.sched_getaffinity(0)),
            local_size=int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")),
            yields=os.environ.get("OMPI_MCA_mpi_yield_when_idle", "0") not in ("", "0"),
        ),
        check_processor(_processor_flags()),
        check_memory(_available_memory_bytes()),
        check_disk(disk.free),
        check_shared_memory(_shared_memory_bytes()),
        check_user(os.geteuid(), allowed=os.environ.get("OMPI_ALLOW_RUN_AS_ROOT") == "1"),
    ]


def _processor_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _shared_memory_bytes() -> int:
    return shutil.disk_usage("/dev/shm").free
