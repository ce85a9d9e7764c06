"""The MPI environment of a rank: its launcher, signals that ask it to leave, and the start of MPI and Horovod."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

TCP_MESSAGE_BYTES = 8 * 2**20
"""Largest eager MPI message, in bytes; two ranks exchange ResNet's largest gradient in 4.7 MB halves."""
CYCLE_TIME = "HOROVOD_CYCLE_TIME"
ALLREDUCE_RULES = Path(__file__).with_name("openmpi-allreduce.conf")
SHELLS = ("sh", "dash", "bash", "ash", "busybox")


MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "HOROVOD_SIZE")
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "HOROVOD_RANK")
SIZES = ("SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE", "WORLD_SIZE")
"""Variables with the number of tasks of launchers that may not start MPI: srun, jsrun, flux run, torchrun, accelerate,
..."""
RANKS = (
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
)
NUMBERS = ("PBS_TASKNUM", "LSF_PM_TASKID")
"""Variables of launchers that count tasks from 1: pbsdsh, where the job script is task 1, and blaunch."""


def claimed_tasks(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of tasks that a launcher says it started, 1 without one, and the variable with that number.

    If MPI's own launcher has started several tasks, no other variable counts. A task number n implies n tasks before
    it.
    """
    for names in ((MPI_SIZES, MPI_RANKS, ()), (SIZES, RANKS, NUMBERS)):
        found = [(_number(environ, name) + more, name) for more, some in zip((0, 1, 0), names) for name in some]
        tasks, name = max(found, key=lambda claim: claim[0])
        if tasks > 1:
            return tasks, name
    return 1, ""


def claimed_rank(environ: Mapping[str, str]) -> int:
    """Return this task's number from its launcher, 0 without one."""
    return next((int(environ[name]) for name in (*MPI_RANKS, *RANKS) if environ.get(name, "").isdigit()), 0)


def _number(environ: Mapping[str, str], name: str) -> int:
    return int(environ[name]) if environ.get(name, "").isdigit() else 0


def yield_when_crowded() -> None:
    """Make MPI yield the core while it waits, if waiting and computing threads outnumber the cores."""
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    if 2 * local > len(os.sched_getaffinity(0)):
        os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"


def tune_open_mpi() -> None:
    """Set variables for a faster exchange in Open MPI, unless the user has set them; other MPIs ignore them."""
    # In Open MPI 4, ranks of a node read each other's memory directly. If the kernel forbids that, Open MPI prints many
    # warnings, so disable it. Copies through shared memory take two to three times as long.
    if not may_read_memory():
        os.environ.setdefault("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
    # Over TCP, larger messages wait for the receiver's acknowledgement, which queues behind the data that the receiver
    # sends itself. Two neighbours in a ring then send one after the other, and the exchange takes nearly twice as long.
    for limit in ("eager_limit", "max_send_size"):
        os.environ.setdefault(f"OMPI_MCA_btl_tcp_{limit}", str(TCP_MESSAGE_BYTES))
    if "OMPI_MCA_coll_tuned_use_dynamic_rules" not in os.environ:
        os.environ["OMPI_MCA_coll_tuned_use_dynamic_rules"] = "1"
        os.environ["OMPI_MCA_coll_tuned_dynamic_rules_filename"] = str(ALLREDUCE_RULES)


class _Span(ctypes.Structure):
    """Linux's struct iovec."""

    _fields_: ClassVar = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def may_read_memory() -> bool:
    """Return True if the kernel lets processes read each other's memory; containers often forbid it."""
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    spans = [ctypes.byref(_Span(ctypes.addressof(buffer), 1)) for buffer in (target, source)]
    return read is not None and read(os.getpid(), spans[0], 1, spans[1], 1, 0) == 1


def start_mpi() -> Any:
    """Return mpi4py's MPI, initialised for calls from any thread; raises ImportError if it cannot be loaded.

    This process's threads continue while the other ranks start: `from mpi4py import MPI` would block them. But no
    thread may allocate memory meanwhile. As it starts, Open MPI can overwrite the beginning of `munmap` and similar
    functions (with `-mca btl ^openib`, as horovodrun has it), and a thread inside of one would crash.
    """
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    if not MPI.Is_initialized():
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    return MPI


def leave_mpi(mpi: Any) -> None:
    """Leave MPI together with all ranks; other threads continue meanwhile."""
    if not mpi.Is_finalized():
        ctypes.CDLL(mpi.__file__).MPI_Finalize()


@contextmanager
def interrupt_ends_job() -> Iterator[None]:
    """End the whole job on an interrupt, which may have reached only this rank, once MPI has started.

    If only this rank left, it would wait in MPI for the others at exit, and they for it.
    """
    try:
        yield
    except KeyboardInterrupt:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            print("hvfreeze: interrupted", file=sys.stderr, flush=True)
            mpi.COMM_WORLD.Abort(128 + signal.SIGINT)
        raise


@contextmanager
def noticing(number: int) -> Iterator[list[int]]:
    """Collect signals `number` in the yielded list, so that they do not kill this process before it can checkpoint."""
    came: list[int] = []
    with handling(number, lambda *_: came.append(number)):
        yield came


@contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` on signals `number`; do nothing outside of the main thread, where Python forbids handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def follow_launching_shell() -> None:
    """Send this process SIGUSR1 when the shell that waits for this rank's launcher ends.

    mpirun passes SIGUSR1 on to its ranks. horovodrun becomes `/bin/sh -c 'mpirun ...'`: a signal to its process id ends
    only the shell, and the job would continue without a process that can end it.
    """
    launcher = os.getppid()
    shell = waiting_shell(launcher)
    if shell is not None:
        with suppress(OSError, AttributeError):  # AttributeError: a Python built for older kernels
            descriptor = os.pidfd_open(shell)
            threading.Thread(target=leave_after, args=(descriptor, launcher), name="launcher", daemon=True).start()


def waiting_shell(launcher: int) -> int | None:
    """Return the parent of `launcher` if it is a shell that runs mpirun and waits for it, else None."""
    with suppress(OSError, ValueError, IndexError):
        shell = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
        words = Path(f"/proc/{shell}/cmdline").read_text(errors="replace").split("\0")
        # A background job outlives its shell on purpose.
        waits = words[1] == "-c" and words[2].startswith("mpirun ") and "&" not in words[2]
        return shell if waits and os.path.basename(words[0]) in SHELLS else None
    return None


def leave_after(descriptor: int, launcher: int) -> None:
    """Wait for the end of the process behind a pidfd, and call `leave` if the launcher is still running."""
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.close(descriptor)
    if os.getppid() == launcher:
        os.kill(os.getpid(), signal.SIGUSR1)
