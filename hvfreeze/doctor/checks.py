"""What a machine must have: each check is a pure function from facts to a `CheckResult`, a row of the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvfreeze.doctor.libraries import Probe

USABLE, UNUSABLE = 0, 3
REBUILD = "remove .venv/ and run `make setup`, which builds Horovod for the torch and MPI that it finds"
OLDEST_TORCH = (2, 10)
TORCH = "torch>=2.10,<2.14"
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class CheckResult:
    """One row of the table: a problem when not `ok`, a note when `ok` with a `remedy`, fine otherwise."""

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
    """Return 0 when every check is ok, 3 otherwise."""
    return USABLE if all(check.ok for check in checks) else UNUSABLE


def table(checks: Sequence[CheckResult]) -> str:
    """Return one line a check, under it what to mend, and a last line that counts them."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:<8} {check.name:<{width}}  {check.value}")
        if check.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.remedy}")
    verdicts = [check.verdict for check in checks]
    usable = "usable" if exit_code(checks) == USABLE else "NOT usable"
    lines.append(
        f"This machine is {usable}: {verdicts.count('OK')} OK, {verdicts.count('note')} to note, "
        f"{verdicts.count('PROBLEM')} to mend."
    )
    return "\n".join(lines)


def check_python(version: tuple[int, ...], *, executable: str) -> CheckResult:
    """Check that Python is 3.10 or newer."""
    value = f"{'.'.join(map(str, version))} ({executable})"
    if version < (3, 10):
        return CheckResult("Python", False, value, "hvfreeze needs Python 3.10 or newer")
    return CheckResult("Python", True, value)


def check_torch(torch: Probe) -> CheckResult:
    """Check that torch loads; tell its version and the threads that it uses by itself."""
    if torch.error:
        return CheckResult("torch", False, torch.error, f"run `make setup`, or pip install '{TORCH}'")
    version = tuple(map(int, re.findall(r"\d+", torch.facts["version"])[:2]))
    if version < OLDEST_TORCH:
        why = "files that it loads can run code or corrupt memory"
        return CheckResult("torch", False, f"{torch.facts['version']}: {why}", f"pip install '{TORCH}'")
    threads = f"{torch.facts['threads']} threads, {torch.facts['capability']} kernels"
    return CheckResult("torch", True, f"{torch.facts['version']}, {threads}")


def check_torchvision(torchvision: Probe) -> CheckResult:
    """Check that torchvision loads, with its compiled operators or with stand-ins for them."""
    if torchvision.error:
        return CheckResult(
            "torchvision", False, torchvision.error, "install the torchvision that belongs to this torch"
        )
    value = torchvision.facts["version"]
    if torchvision.facts["shim"]:
        value += ", without its compiled operators"
        remedy = "models and transforms work; for detection operators install torch and torchvision from the same index"
        return CheckResult("torchvision", True, value, remedy)
    return CheckResult("torchvision", True, value)


def check_horovod(horovod: Probe) -> CheckResult:
    """Check that Horovod loads and was built with MPI."""
    if horovod.error:
        return CheckResult("Horovod", False, horovod.error, f"one process trains without it; for several, {REBUILD}")
    if not horovod.facts["mpi_built"]:
        return CheckResult("Horovod", False, f"{horovod.facts['version']}, built without MPI", REBUILD)
    return CheckResult("Horovod", True, f"{horovod.facts['version']}, built with {horovod.facts['mpi'] or 'MPI'}")


def check_horovod_torch(horovod: Probe) -> CheckResult:
    """Check that Horovod was built against the torch that is installed."""
    name = "Horovod's torch"
    if horovod.error:
        return CheckResult(name, False, "unknown", "Horovod must load first")
    built, installed = horovod.facts["built_with_torch"], horovod.facts["torch"]
    if built != installed:
        return CheckResult(name, False, f"built with {built}, installed is {installed}", REBUILD)
    return CheckResult(name, True, built)


def check_mpirun(found: str, *, error: str, horovod: Probe) -> CheckResult:
    """Check that mpirun is there and starts ranks of the MPI that Horovod was built with."""
    if error:
        return CheckResult("mpirun", False, error, "apt-get install openmpi-bin, or load your cluster's MPI module")
    return _same_mpi("mpirun", found, value=found, horovod=horovod)


def check_mpi4py(mpi4py: Probe, *, horovod: Probe) -> CheckResult:
    """Check that mpi4py loads and talks to the MPI that Horovod was built with."""
    if mpi4py.error:
        return CheckResult(
            "mpi4py", False, mpi4py.error, "pip install mpi4py, and have an MPI library where it is found"
        )
    value = f"{mpi4py.facts['version']} on {mpi4py.facts['mpi']}"
    return _same_mpi("mpi4py", mpi4py.facts["mpi"], value=value, horovod=horovod)


def check_hdf5(h5py: Probe) -> CheckResult:
    """Check that h5py loads, which the activation cache needs."""
    if h5py.error:
        return CheckResult("h5py", False, h5py.error, "pip install h5py")
    return CheckResult("h5py", True, f"{h5py.facts['version']}, HDF5 {h5py.facts['hdf5']}")


def check_cores(cores: int, *, local_size: int, yields: bool) -> CheckResult:
    """Check that ranks on this machine do not outnumber the cores that they may use, or give way while they wait."""
    value = f"{cores} usable, {local_size} rank{'s' * (local_size > 1)} here, yielding {'on' if yields else 'off'}"
    if local_size > cores and not yields:
        remedy = "set OMPI_MCA_mpi_yield_when_idle=1, else waiting ranks keep the cores busy: steps many times slower"
        return CheckResult("cores", True, value, remedy)
    return CheckResult("cores", True, value)


def check_processor(flags: frozenset[str]) -> CheckResult:
    """Tell what the processor offers for training: vector width and bfloat16 (`flags` as in /proc/cpuinfo)."""
    wanted = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512 bfloat16", "amx_bf16": "AMX bfloat16"}
    has = [label for flag, label in wanted.items() if flag in flags]
    lacks = [f"no {label}" for flag, label in wanted.items() if flag not in flags]
    return CheckResult("processor", True, ", ".join(has + lacks))


def check_memory(available_bytes: int) -> CheckResult:
    """Check that there is enough memory for two small ranks."""
    remedy = "each rank takes about 0.5 GiB before any data: start fewer ranks"
    return _enough("memory", available_bytes, at_least=GIB, unit="available", remedy=remedy)


def check_disk(free_bytes: int) -> CheckResult:
    """Check that there is enough room for run directories and caches in the current folder."""
    remedy = "checkpoints and activation caches may not fit here: give --run-dir and --cache-dir on a larger disk"
    return _enough("disk", free_bytes, at_least=2 * GIB, unit="free in this folder", remedy=remedy)


def check_shared_memory(free_bytes: int) -> CheckResult:
    """Check that there is enough of /dev/shm for the ranks' messages and the batches of data loading workers."""
    remedy = "containers get 64 MiB unless told otherwise: start this one with --shm-size=1g"
    return _enough("shared memory", free_bytes, at_least=256 * MIB, unit="free in /dev/shm", remedy=remedy)


def check_user(user_id: int, *, allowed: bool) -> CheckResult:
    """Check whether Open MPI will refuse to start as this user."""
    if user_id == 0 and not allowed:
        remedy = "plain mpirun refuses root without OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        return CheckResult("user", True, "root", remedy)
    return CheckResult("user", True, "root, allowed to start ranks" if user_id == 0 else f"id {user_id}")


def _same_mpi(name: str, found: str, *, value: str, horovod: Probe) -> CheckResult:
    expected = horovod.facts.get("mpi", "")
    if expected and found != expected:
        remedy = f"put that MPI first on PATH and LD_LIBRARY_PATH, or {REBUILD}"
        return CheckResult(name, False, f"{value}, but Horovod was built with {expected}", remedy)
    return CheckResult(name, True, value)


def _enough(name: str, amount: int, *, at_least: int, unit: str, remedy: str) -> CheckResult:
    value = f"{amount / GIB:.1f} GiB {unit}"
    return CheckResult(name, True, value, remedy if amount < at_least else "")
