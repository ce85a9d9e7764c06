"""The command line: `hvfreeze auto` and `train`, as a single process or a rank of horovodrun or mpirun, and all others.

This module and its imports do not load torch, so that `hvfreeze --help` is fast.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hvfreeze.allocator import keep_memory, watch_memory
from hvfreeze.cli import RUNS, parse, perform
from hvfreeze.errors import HvfreezeError, Preempted, RefusedError, StallError
from hvfreeze.imports import kept_for_good

if TYPE_CHECKING:
    from hvfreeze.comm.world import World
    from hvfreeze.config.tree import Config

INTERRUPTED = 130
OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)
"""Error numbers of a standard output that accepts no more."""
GRACE_SECONDS = 10.0
"""Seconds that other ranks wait for rank 0 to report an error that all are likely to have."""


def program() -> int:
    """Run the command line as a process, and return its exit code."""
    keep_memory()
    leave_cores(sys.argv[1:])
    code = main()
    # Nothing is left to interrupt, and the interpreter's end would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def leave_cores(words: Sequence[str]) -> None:
    """Set torch's threads to sleep while they wait, except in runs; call this before torch is loaded.

    Otherwise they spin on the cores on which other threads decode images, and `hvfreeze predict` on photographs of 12
    megapixels takes a quarter longer.
    """
    if not RUNS.keys() & set(words[:1]):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Pillow's warning on large images; images above the limit are refused in a line.
    warnings.filterwarnings("ignore", "Image size .* exceeds limit", RuntimeWarning)
    # A daemon may have closed them. The next opened file would get the number, and a library's output.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open until the process ends
    # Names of classes and files may have characters that the terminal's encoding lacks. A launcher may have replaced a
    # file by a pipe, which has no position.
    with suppress(OSError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if words[:1] and words[0] in RUNS and not {"-h", "--help", "--help-all"} & set(words):
            return train(words)
        watch_memory()
        return max(perform_or_refuse(words), flush_output())
    except HvfreezeError as error:
        return give_up(error)
    except OSError as error:
        lost = flush_output()
        # Unbuffered output has nothing to flush. Errors of files have names.
        if not lost and error.errno in OUTPUT_LOST and error.filename is None:
            lost = output_lost(error)
        if not lost:
            raise
        return lost
    except KeyboardInterrupt as error:
        return interrupted(error)


def perform_or_refuse(words: Sequence[str]) -> int:
    """Perform a command of one process, and return its exit code.

    Raises:
        RefusedError: a file or folder belongs to another user.
    """
    try:
        return perform(words)
    except PermissionError as error:
        if error.filename is None:
            raise
        raise RefusedError(
            f"{error.filename} cannot be used ({error.strerror}); ask its owner, or name another path"
        ) from error


def train(arguments: Sequence[str]) -> int:
    """Train as one rank of the job and leave together with the others; signals count from here."""
    from hvfreeze.comm.mpi_environment import follow_launching_shell, noticing

    with noticing(signal.SIGUSR1) as asked:
        follow_launching_shell()
        return train_as_rank(arguments, asked)


def train_as_rank(arguments: Sequence[str], asked: Sequence[int]) -> int:
    """Train; append each signal that asks this rank to leave to `asked`."""
    started = time.monotonic()
    from hvfreeze.comm.mpi_environment import claimed_tasks
    from hvfreeze.config.flags import configuration

    def understood() -> Config:
        return configuration(parse(arguments))

    if claimed_tasks(os.environ)[0] == 1:
        # A usage error is reported before torch is imported, which takes seconds. Several ranks report it once, below.
        understood()
    with kept_for_good():
        from hvfreeze.comm.agreement import raise_on_all_ranks
        from hvfreeze.comm.horovod_world import open_world
        from hvfreeze.comm.world import end_job_on_exception

    world = open_world(beside="hvfreeze.training.run")
    watch_memory()
    end_job_on_exception(world)
    try:
        with kept_for_good():
            from hvfreeze.training.run import run

        config = raise_on_all_ranks(world, understood, name="configuration")
        summary = run(config, world, asked=asked, started=started)
        code = print_summary(summary) if config.run.json and world.rank == 0 else 0
    except HvfreezeError as error:
        if not error.everywhere and world.size > 1:
            end_job(error, world)
        if world.rank == 0:
            say(str(error), is_error=not isinstance(error, Preempted))
        code = error.exit_code
    except KeyboardInterrupt as error:
        code = interrupted(error)
        if world.size > 1:
            # Only this rank may have received the signal, and the others wait for it.
            world.abort(code)
    world.close()
    # Lost lines are in the run's log; a lost summary has its own exit code.
    flush_output()
    return code


def interrupted(error: KeyboardInterrupt) -> int:
    """Print the command that continues an interrupted run, and return the exit code."""
    print(f"hvfreeze: interrupted {error}".rstrip(), file=sys.stderr, flush=True)
    return INTERRUPTED


def print_summary(summary: dict[str, Any]) -> int:
    """Print the content of summary.json as the last line, and return the exit code."""
    try:
        print(json.dumps(summary), flush=True)
        return 0
    except OSError as error:
        return output_lost(error)


def flush_output() -> int:
    """Flush the output and return the exit code.

    Without this, the interpreter would report a full disk or a closed pipe at its end, with a traceback.
    """
    try:
        sys.stdout.flush()
        return 0
    except OSError as error:
        return output_lost(error)


def output_lost(error: OSError) -> int:
    """Report why standard output failed, stop printing, and return the exit code."""
    say(f"standard output cannot be written: {error.strerror}")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return RefusedError.exit_code


def say(message: str, *, is_error: bool = True) -> None:
    """Print a message on standard error."""
    print(f"hvfreeze: {'error: ' if is_error else ''}{message}", file=sys.stderr, flush=True)


def end_job(error: HvfreezeError, world: World) -> None:
    """End the whole job after an error of this rank, for which other ranks may be waiting."""
    if isinstance(error, StallError) and world.rank > 0:
        time.sleep(GRACE_SECONDS)
    say(f"rank {world.rank}: {error}")
    world.abort(error.exit_code)


def give_up(error: HvfreezeError) -> int:
    """Report on rank 0 why the job cannot start, and return the exit code.

    A launcher ends all ranks when the first one leaves. That must be rank 0, after its report; if rank 0 has no error,
    this rank reports.
    """
    from hvfreeze.comm.mpi_environment import claimed_rank

    rank = claimed_rank(os.environ)
    if rank > 0:
        time.sleep(GRACE_SECONDS)
    say(f"rank {rank}: {error}" if rank > 0 else str(error))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(program())
