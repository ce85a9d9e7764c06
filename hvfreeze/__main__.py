"""The program: `hvfreeze auto` and `train`, alone or as one rank under horovodrun or mpirun, and the other commands.

Nothing here, nor what it imports at the top, loads torch: `hvfreeze --help` should not wait for it.
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
from hvfreeze.errors import HvfreezeError, RefusedError, StallError
from hvfreeze.torch_imports import kept_for_good

if TYPE_CHECKING:
    from hvfreeze.comm.world import World
    from hvfreeze.config.tree import Config

INTERRUPTED = 130
OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)
"""Error numbers of a standard output that takes no more."""
GRACE_SECONDS = 10.0
"""How long other ranks leave rank 0 to speak first, where all are likely to have the same to say."""


def program() -> int:
    """Run the program as all that this process does, and return its exit code."""
    keep_memory()
    code = main()
    # Nothing is left to interrupt, and the end of the interpreter would tell of it by a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Pillow's, of large images: those that are too large are refused in a line.
    warnings.filterwarnings("ignore", "Image size .* exceeds limit", RuntimeWarning)
    # A daemon may have closed them. The file that is opened next would get the number, and what a library prints.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it lasts as long as the process
    # Names of classes and files may have characters that the terminal's encoding lacks. A launcher may have put a pipe
    # in the place of a file, which then cannot tell where it is.
    with suppress(OSError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if words[:1] and words[0] in RUNS and not {"-h", "--help", "--help-all"} & set(words):
            return train(words)
        watch_memory()
        return max(perform(words), flush_output())
    except HvfreezeError as error:
        return give_up(error)
    except OSError as error:
        lost = flush_output()
        # Output that is not buffered has nothing left to pass on. Errors of files have names.
        if not lost and error.errno in OUTPUT_LOST and error.filename is None:
            lost = output_lost(error)
        if not lost:
            raise
        return lost
    except KeyboardInterrupt as error:
        return interrupted(error)


def train(arguments: Sequence[str]) -> int:
    """Train as one rank of the job, and leave it together with the others; a signal counts from here on."""
    from hvfreeze.comm.mpi_environment import follow_launching_shell, noticing

    with noticing(signal.SIGUSR1) as asked:
        follow_launching_shell()
        return train_as_rank(arguments, asked)


def train_as_rank(arguments: Sequence[str], asked: Sequence[int]) -> int:
    """Train; `asked` grows by each signal that asks this rank to leave."""
    started = time.monotonic()
    with kept_for_good():
        from hvfreeze.comm.agreement import raise_on_all_ranks
        from hvfreeze.comm.horovod_world import open_world
        from hvfreeze.comm.world import end_job_on_exception

    with kept_for_good():
        world = open_world(beside="hvfreeze.training.run")
    watch_memory()
    end_job_on_exception(world)
    try:
        with kept_for_good():
            from hvfreeze.training.run import run

        from hvfreeze.config.flags import configuration

        def understood() -> Config:
            return configuration(parse(arguments))

        config = raise_on_all_ranks(world, understood, name="configuration")
        summary = run(config, world, asked=asked, started=started)
        code = print_summary(summary) if config.run.json and world.rank == 0 else 0
    except HvfreezeError as error:
        if not error.everywhere and world.size > 1:
            end_job(error, world)
        if world.rank == 0:
            say(str(error))
        code = error.exit_code
    except KeyboardInterrupt as error:
        code = interrupted(error)
        if world.size > 1:
            # The signal may have come to this rank alone, and the others wait for it.
            world.abort(code)
    world.close()
    # Lines that were lost are in the run's log; a summary that was lost has its own exit code.
    flush_output()
    return code


def interrupted(error: KeyboardInterrupt) -> int:
    """Tell who pressed Ctrl-C how to go on, and return the exit code."""
    print(f"hvfreeze: interrupted {error}".rstrip(), file=sys.stderr, flush=True)
    return INTERRUPTED


def print_summary(summary: dict[str, Any]) -> int:
    """Print summary.json's object as the last line, and return the exit code."""
    try:
        print(json.dumps(summary), flush=True)
        return 0
    except OSError as error:
        return output_lost(error)


def flush_output() -> int:
    """Pass on what was printed and return the exit code.

    A full disk or a reader that has gone would otherwise be found by the interpreter at its end, in its own words.
    """
    try:
        sys.stdout.flush()
        return 0
    except OSError as error:
        return output_lost(error)


def output_lost(error: OSError) -> int:
    """Say why standard output takes no more, print no more, and return the exit code."""
    say(f"standard output cannot be written: {error.strerror}")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return RefusedError.exit_code


def say(message: str) -> None:
    """Tell the user what went wrong."""
    print(f"hvfreeze: error: {message}", file=sys.stderr, flush=True)


def end_job(error: HvfreezeError, world: World) -> None:
    """End the whole job for an error that this rank's peers need not have seen, which may wait for this rank."""
    if isinstance(error, StallError) and world.rank > 0:
        time.sleep(GRACE_SECONDS)
    say(f"rank {world.rank}: {error}")
    world.abort(error.exit_code)


def give_up(error: HvfreezeError) -> int:
    """Say on rank 0 why there is no job, and return the exit code.

    A launcher ends all ranks when the first leaves. That must be rank 0, after it has spoken; where it has another fate
    than this rank, this rank speaks.
    """
    from hvfreeze.comm.mpi_environment import claimed_rank

    rank = claimed_rank(os.environ)
    if rank > 0:
        time.sleep(GRACE_SECONDS)
    say(f"rank {rank}: {error}" if rank > 0 else str(error))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(program())
