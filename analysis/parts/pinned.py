"""`hvfreeze` on one core a rank: python -m analysis.parts.pinned train FLAGS..., alone or under mpirun --bind-to none.

One core and not one hardware thread: two threads of a core share what it computes with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hvfreeze.__main__ import main
from hvfreeze.comm.mpi_environment import claimed_rank
from hvfreeze.errors import UsageError
from hvfreeze.wording import plural

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores(threads: Iterable[int]) -> list[int]:
    """Return the first of each core's hardware threads among these."""
    firsts: dict[str, int] = {}
    for thread in sorted(threads):
        core = str(thread)
        with suppress(OSError):
            core = Path(TOPOLOGY.format(thread)).read_text(encoding="utf-8").strip()
        firsts.setdefault(core, thread)
    return list(firsts.values())


def pin(rank: int) -> None:
    """Keep this process to the core of its rank. To be called before it has threads.

    Raises:
        UsageError: there is none left.
    """
    free = cores(os.sched_getaffinity(0))
    if rank >= len(free):
        raise UsageError(f"rank {rank} must have its own core, and there are {plural(len(free), 'core')}: --ranks")
    os.sched_setaffinity(0, {free[rank]})


def pin_or_exit(rank: int) -> None:
    """Keep this process to the core of its rank; where there is none left, say so and end it with exit code 2."""
    try:
        pin(rank)
    except UsageError as error:
        print(f"pinned: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    pin_or_exit(claimed_rank(os.environ))
    sys.exit(main())
