"""A rank's surroundings: what its launcher says, signals that ask it to leave, and how MPI and Horovod are started."""

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
"""A message up to this size is sent without asking; two ranks exchange ResNet's largest gradient in 4.7 MB halves."""
CYCLE_TIME = "HOROVOD_CYCLE_TIME"
ALLREDUCE_RULES = Path(__file__).with_name("openmpi-allreduce.conf")
SHELLS = ("sh", "dash", "bash", "ash", "busybox")


MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "HOROVOD_SIZE")
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "HOROVOD_RANK")
SIZES = ("SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE", "WORLD_SIZE")
"""Tasks by launchers that may start them without MPI: srun, jsrun, flux run; torchrun, accelerate and many others."""
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
"""Tasks are counted from 1: pbsdsh, whose job script is the first, and blaunch."""


def claimed_tasks(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many tasks a launcher says that it started, 1 where there is none, and the variable that says so.

    Where MPI's own launcher has started several, no other counts. A rank's number tells of as many tasks before it.
    """
    for names in ((MPI_SIZES, MPI_RANKS, ()), (SIZES, RANKS, NUMBERS)):
        found = [(_number(environ, name) + more, name) for more, some in zip((0, 1, 0), names) for name in some]
        tasks, name = max(found, key=lambda claim: claim[0])
        if tasks > 1:
            return tasks, name
    return 1, ""


def claimed_size(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that a launcher says it started, 1 where there is none."""
    return claimed_tasks(environ)[0]


def claimed_rank(environ: Mapping[str, str]) -> int:
    """Return this task's number as its launcher gives it, 0 where there is none."""
    return next((int(environ[name]) for name in (*MPI_RANKS, *RANKS) if environ.get(name, "").isdigit()), 0)


def _number(environ: Mapping[str, str], name: str) -> int:
    return int(environ[name]) if environ.get(name, "").isdigit() else 0


def yield_when_crowded() -> None:
    """Make MPI give up the core while it waits, where waiting and computing threads outnumber the cores."""
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    if 2 * local > len(os.sched_getaffinity(0)):
        os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"


def tune_open_mpi() -> None:
    """Set what makes Open MPI exchange gradients faster, where the user has not set it; other MPIs ignore it."""
    # Open MPI 4 lets the ranks of a node read from each other directly, and where the kernel forbids that says so again
    # and again. Copies through shared memory take twice to three times as long.
    if not may_read_memory():
        os.environ.setdefault("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
    # Over TCP, larger messages wait for the receiver's consent, which queues behind the data that the receiver sends
    # itself: two neighbours in a ring then send one after the other, and the exchange takes nearly twice the time.
    for limit in ("eager_limit", "max_send_size"):
        os.environ.setdefault(f"OMPI_MCA_btl_tcp_{limit}", str(TCP_MESSAGE_BYTES))
    if "OMPI_MCA_coll_tuned_use_dynamic_rules" not in os.environ:
        os.environ["OMPI_MCA_coll_tuned_use_dynamic_rules"] = "1"
        os.environ["OMPI_MCA_coll_tuned_dynamic_rules_filename"] = str(ALLREDUCE_RULES)


class _Span(ctypes.Structure):
    """Linux's struct iovec."""

    _fields_: ClassVar = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def may_read_memory() -> bool:
    """Tell whether the kernel lets processes read from each other's memory; containers often forbid it to all."""
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    spans = [ctypes.byref(_Span(ctypes.addressof(buffer), 1)) for buffer in (target, source)]
    return read is not None and read(os.getpid(), spans[0], 1, spans[1], 1, 0) == 1


def start_mpi() -> Any:
    """Return mpi4py's MPI, initialised for calls from any thread; raises ImportError where it cannot be loaded.

    Waiting for the other ranks to start, this process's threads go on: `from mpi4py import MPI` would hold them up. But
    none of them may use memory meanwhile: as it starts, Open MPI can write jumps over the beginning of `munmap` and the
    like (with `-mca btl ^openib`, as horovodrun has it), and a thread that is inside comes back into the middle of one.
    """
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    if not MPI.Is_initialized():
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    return MPI


def leave_mpi(mpi: Any) -> None:
    """Leave MPI together with all ranks; threads go on meanwhile."""
    if not mpi.Is_finalized():
        ctypes.CDLL(mpi.__file__).MPI_Finalize()


@contextmanager
def interrupt_ends_job() -> Iterator[None]:
    """End the whole job by an interrupt, which may have come to this rank alone, once MPI has begun.

    Leaving alone, at its exit this rank would wait in MPI for the others, and they for this rank.
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
    """Collect signals `number` instead of dying of them: outside the loop there is nothing to stop, or little left."""
    came: list[int] = []
    with handling(number, lambda *_: came.append(number)):
        yield came


@contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` for signals `number`, but in a thread that is not the main one, which may not ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def follow_launching_shell() -> None:
    """Send this process SIGUSR1 when a shell ends that does nothing but wait for this rank's launcher.

    mpirun passes SIGUSR1 on to its ranks. horovodrun becomes `/bin/sh -c 'mpirun ...'`: a signal to its process id ends
    the shell alone, and the job would run on without anybody who could end it.
    """
    launcher = os.getppid()
    shell = waiting_shell(launcher)
    if shell is not None:
        with suppress(OSError, AttributeError):  # AttributeError: a Python built for older kernels
            descriptor = os.pidfd_open(shell)
            threading.Thread(target=leave_after, args=(descriptor, launcher), name="launcher", daemon=True).start()


def waiting_shell(launcher: int) -> int | None:
    """Return the parent of `launcher` where it is a shell that runs mpirun and waits for it, else None."""
    with suppress(OSError, ValueError, IndexError):
        shell = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
        words = Path(f"/proc/{shell}/cmdline").read_text(errors="replace").split("\0")
        # What is started in the background outlives its shell on purpose.
        waits = words[1] == "-c" and words[2].startswith("mpirun ") and "&" not in words[2]
        return shell if waits and os.path.basename(words[0]) in SHELLS else None
    return None


def leave_after(descriptor: int, launcher: int) -> None:
    """Wait for the end of the process behind a pidfd, and leave if the launcher has not ended with it."""
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.close(descriptor)
    if os.getppid() == launcher:
        os.kill(os.getpid(), signal.SIGUSR1)
