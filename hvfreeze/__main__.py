"""The program: `hvfreeze train|report|doctor|cache`, alone or as one rank under horovodrun or mpirun."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence

from hvfreeze.cli import configuration, parse
from hvfreeze.errors import HvfreezeError
from hvfreeze.world import SoloWorld, World, claimed_rank, end_job_on_exception, open_world, together

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == ["train"] and not {"-h", "--help"} & set(given):
            return train(given)
        from hvfreeze.commands import perform

        return perform(*parse(given))
    except HvfreezeError as error:
        return report(error, SoloWorld())
    except KeyboardInterrupt:
        print("hvfreeze: interrupted", file=sys.stderr)
        return INTERRUPTED


def train(arguments: Sequence[str]) -> int:
    """Train as one rank of the job, and leave it together with the others."""
    if claimed_rank(os.environ) == 0:
        # A launcher ends the job when another rank gives up first; rank 0 must still say why.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            world = open_world()
        except HvfreezeError as error:
            return report(error, SoloWorld())
        signal.signal(signal.SIGTERM, before)
    else:
        world = open_world()
    end_job_on_exception(world)
    try:
        from hvfreeze.run import run

        config = together(world, lambda: configuration(parse(arguments)[1]), name="configuration")
        summary = run(config, world)
        if config.run.json and world.rank == 0:
            print(json.dumps(summary), flush=True)
        code = 0
    except HvfreezeError as error:
        code = report(error, world)
    world.close()
    return code


def report(error: HvfreezeError, world: World) -> int:
    """Say on rank 0 what went wrong; return the exit code."""
    if world.rank == 0 and claimed_rank(os.environ) == 0:
        print(f"hvfreeze: error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
