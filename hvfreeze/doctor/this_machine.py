"""`hvfreeze doctor`: checks whether this machine can train, and prints remedies."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvfreeze.doctor.libraries import Probe, mpi_name, probe, run_and_read
from hvfreeze.memory import available_bytes
from hvfreeze.wording import plural

REBUILD = "remove .venv/ and run `make setup`, which builds Horovod for the torch and MPI that it finds"
OLDEST_TORCH = (2, 10)
UNTRIED_TORCH = (2, 14)
TORCH = "torch>=2.10,<2.14"
GIB = 2**30


@dataclass(frozen=True)
class CheckResult:
    """One row of the table: a problem if not `ok`, a note if `ok` with a `remedy`, else fine."""

    name: str
    ok: bool
    value: str
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """`OK`, `note` or `PROBLEM`."""
        if not self.ok:
            return "PROBLEM"
        return "note" if self.remedy else "OK"


def exit_code(checks: Iterable[CheckResult]) -> int:
    """Return 0 if every check is ok, else 3."""
    return 0 if all(check.ok for check in checks) else 3


def table(checks: Sequence[CheckResult], *, about: str = "This machine is") -> str:
    """Return a line per check with its remedy below it, and a last line that begins with `about` and counts."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:<8} {check.name:<{width}}  {check.value}")
        if check.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.remedy}")
    verdicts = [check.verdict for check in checks]
    fine, notes, problems = (verdicts.count(verdict) for verdict in ("OK", "note", "PROBLEM"))
    usable = "NOT usable" if problems else "usable"
    counted = f"{fine} OK, {plural(notes, 'note')}, {plural(problems, 'problem')}"
    return "\n".join([*lines, f"{about} {usable}: {counted}."])


def check_python(version: tuple[int, ...], *, executable: str) -> CheckResult:
    """Check that Python is 3.10 or newer."""
    value = f"{'.'.join(map(str, version))} ({executable})"
    if version < (3, 10):
        return CheckResult("Python", False, value, "hvfreeze needs Python 3.10 or newer")
    return CheckResult("Python", True, value)


def check_torch(torch: Probe) -> CheckResult:
    """Check that torch can be loaded; report its version and its default number of threads."""
    if torch.error:
        return CheckResult("torch", False, torch.error, f"run `make setup`, or pip install '{TORCH}'")
    version = tuple(map(int, re.findall(r"\d+", torch.facts["version"])[:2]))
    if not OLDEST_TORCH <= version < UNTRIED_TORCH:
        old = "loading a model file with it can run code or corrupt memory"
        why = old if version < OLDEST_TORCH else "it needs C++20, but Horovod is built with C++17"
        return CheckResult("torch", False, f"{torch.facts['version']}: {why}", f"pip install '{TORCH}'")
    threads = f"{plural(int(torch.facts['threads']), 'thread')}, {torch.facts['capability']} kernels"
    return CheckResult("torch", True, f"{torch.facts['version']}, {threads}")


def check_torchvision(torchvision: Probe) -> CheckResult:
    """Check that torchvision can be loaded, with its compiled operators or with stand-ins for them."""
    if torchvision.error:
        remedy = "install the torchvision that belongs to this torch"
        return CheckResult("torchvision", False, torchvision.error, remedy)
    value = torchvision.facts["version"]
    if torchvision.facts["shim"]:
        value += ", without its compiled operators"
        remedy = (
            "models and transforms of `hvfreeze train` work, but `import torchvision` in your own script fails; "
            "install torch and torchvision from the same index"
        )
        return CheckResult("torchvision", True, value, remedy)
    return CheckResult("torchvision", True, value)


def check_horovod(horovod: Probe) -> CheckResult:
    """Check that Horovod can be loaded and was built with MPI."""
    if horovod.error:
        return CheckResult(
            "Horovod", False, horovod.error, f"a single process can train without it; for several, {REBUILD}"
        )
    if not horovod.facts["mpi_built"]:
        return CheckResult("Horovod", False, f"{horovod.facts['version']}, built without MPI", REBUILD)
    return CheckResult("Horovod", True, f"{horovod.facts['version']}, built with {horovod.facts['mpi'] or 'MPI'}")


def check_horovod_torch(horovod: Probe) -> CheckResult:
    """Check that Horovod was built against the installed torch."""
    name = "Horovod's torch"
    if horovod.error:
        return CheckResult(name, False, "unknown", "Horovod must be importable first")
    built, installed = horovod.facts["built_with_torch"], horovod.facts["torch"]
    if built != installed:
        return CheckResult(name, False, f"built with {built}, but {installed} is installed", REBUILD)
    return CheckResult(name, True, built)


def check_mpirun(found: str, *, error: str, horovod: Probe) -> CheckResult:
    """Check that mpirun exists and belongs to the MPI that Horovod was built with."""
    if error:
        return CheckResult("mpirun", False, error, "run apt-get install openmpi-bin, or load your cluster's MPI module")
    return _same_mpi("mpirun", found, value=found, horovod=horovod)


def check_mpi4py(mpi4py: Probe, *, horovod: Probe) -> CheckResult:
    """Check that mpi4py can be loaded and uses the MPI that Horovod was built with."""
    if mpi4py.error:
        remedy = "run pip install mpi4py with an MPI library on the library path"
        return CheckResult("mpi4py", False, mpi4py.error, remedy)
    value = f"{mpi4py.facts['version']} on {mpi4py.facts['mpi']}"
    return _same_mpi("mpi4py", mpi4py.facts["mpi"], value=value, horovod=horovod)


def check_hdf5(h5py: Probe) -> CheckResult:
    """Check that h5py can be loaded, which the activation cache needs."""
    if h5py.error:
        return CheckResult("h5py", False, h5py.error, "run pip install h5py")
    return CheckResult("h5py", True, f"{h5py.facts['version']}, HDF5 {h5py.facts['hdf5']}")


def check_cores(cores: int, *, local_size: int, yields: bool) -> CheckResult:
    """Check that ranks on this machine do not outnumber the available cores, or yield while they wait."""
    value = (
        f"{cores} usable, {local_size} rank{'s' * (local_size > 1)} on this machine, waiting ranks "
        f"{'yield' if yields else 'do not yield'}"
    )
    if local_size > cores and not yields:
        remedy = (
            "set OMPI_MCA_mpi_yield_when_idle=1; without it waiting ranks occupy cores, and steps are many times slower"
        )
        return CheckResult("cores", True, value, remedy)
    return CheckResult("cores", True, value)


def check_processor(flags: frozenset[str]) -> CheckResult:
    """Report the processor's features for training: vector width and bfloat16 (`flags` as in /proc/cpuinfo)."""
    wanted = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512 bfloat16", "amx_bf16": "AMX bfloat16"}
    has = [label for flag, label in wanted.items() if flag in flags]
    lacks = [f"no {label}" for flag, label in wanted.items() if flag not in flags]
    return CheckResult("processor", True, ", ".join(has + lacks))


ROOM = {
    "memory": (GIB, "available", "each rank needs about 0.5 GiB plus its data; start fewer ranks"),
    "disk": (
        2 * GIB,
        "free in this folder",
        "checkpoints and activation caches may not fit; put --run-dir and --cache-dir on a larger disk",
    ),
    "shared memory": (
        GIB // 4,
        "free in /dev/shm",
        "containers get 64 MiB by default; start this one with --shm-size=1g",
    ),
}
"""Bytes that two small ranks need, with messages and batches of loader workers in shared memory; unit; remedy."""


def check_room(name: str, amount_bytes: int) -> CheckResult:
    """Check that there is enough of `memory`, `disk` or `shared memory`."""
    at_least, unit, remedy = ROOM[name]
    return CheckResult(name, True, f"{amount_bytes / GIB:.1f} GiB {unit}", remedy if amount_bytes < at_least else "")


RUN_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Variables that Open MPI requires, both at once."""


def check_user(user_id: int, *, allowed: bool) -> CheckResult:
    """Check whether Open MPI would refuse to start as this user."""
    if user_id == 0 and not allowed:
        remedy = f"mpirun refuses to run as root without {' and '.join(f'{name}=1' for name in RUN_AS_ROOT)}"
        return CheckResult("user", True, "root", remedy)
    return CheckResult("user", True, "root, allowed to start ranks" if user_id == 0 else f"id {user_id}")


def check_home(home: str) -> CheckResult:
    """Check that there is a folder for files kept between runs; `home` is "~" if the user's is unknown."""
    if home == "~":
        remedy = (
            "set HOME to a writable folder, or set each folder: --data-dir, $TORCH_HOME for --weights DEFAULT, "
            "directory= of CachedLoader"
        )
        return CheckResult("home directory", True, "none", remedy)
    return CheckResult("home directory", True, home, "" if os.access(home, os.W_OK) else "this user cannot write there")


def _same_mpi(name: str, found: str, *, value: str, horovod: Probe) -> CheckResult:
    expected = horovod.facts.get("mpi", "")
    if expected and found != expected:
        remedy = f"put that MPI first in PATH and LD_LIBRARY_PATH, or {REBUILD}"
        return CheckResult(name, False, f"{value}, but Horovod was built with {expected}", remedy)
    return CheckResult(name, True, value)


def run_doctor() -> int:
    """Print a table of all local checks; return 0 if this machine can train (notes do not count), else 3."""
    checks = local_checks()
    print(table(checks))
    return exit_code(checks)


def local_checks() -> list[CheckResult]:
    """Return all checks of this machine, in the order of the table; takes seconds."""
    # After Horovod, mpi4py would load Horovod's MPI.
    found = probe("torch", "torchvision", "horovod") | probe("mpi4py", "h5py")
    horovod = found["horovod"]
    mpirun_text, mpirun_error = run_and_read(["mpirun", "--version"])
    return [
        check_python(sys.version_info[:3], executable=sys.executable),
        check_torch(found["torch"]),
        check_torchvision(found["torchvision"]),
        check_horovod(horovod),
        check_horovod_torch(horovod),
        check_mpirun(mpi_name(mpirun_text), error=mpirun_error, horovod=horovod),
        check_mpi4py(found["mpi4py"], horovod=horovod),
        check_hdf5(found["h5py"]),
        check_cores(
            len(os.sched_getaffinity(0)),
            local_size=int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")),
            yields=os.environ.get("OMPI_MCA_mpi_yield_when_idle", "0") not in ("", "0"),
        ),
        check_processor(_processor_flags()),
        check_room("memory", available_bytes()),
        check_room("disk", shutil.disk_usage(Path.cwd()).free),
        check_room("shared memory", shutil.disk_usage("/dev/shm").free),
        check_user(os.geteuid(), allowed=all(os.environ.get(name) == "1" for name in RUN_AS_ROOT)),
        check_home(os.path.expanduser("~")),
    ]


def _processor_flags() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
