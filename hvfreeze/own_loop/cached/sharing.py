"""Which ranks share a cache directory, and hence the work of filling it."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from hvfreeze.errors import RefusedError
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World


def ranks_that_see(directory: Path, world: World) -> tuple[int, int]:
    """Return this rank's place among those that see the same files in `directory`, and how many these are.

    Either all ranks do, or those of each host are taken to. Collective: every rank of `world` must call this.

    Raises:
        RefusedError: rank 0 cannot write there.
    """
    name = world.broadcast_object(f".seen-{secrets.token_hex(8)}", name="loader.token")
    path = directory / name

    def leave_token() -> None:
        try:
            if world.rank == 0:
                path.touch(mode=0o600)
        except OSError as error:
            raise RefusedError(f"cache directory {directory} cannot be used ({error.strerror})") from error

    together(world, leave_token, name="loader.token")
    found = world.allgather_object((name in os.listdir(directory), socket.gethostname()), name="loader.seen")
    if world.rank == 0:
        path.unlink(missing_ok=True)
    if all(seen for seen, _ in found):
        return world.rank, world.size
    here = [rank for rank, (_, host) in enumerate(found) if host == socket.gethostname()]
    return here.index(world.rank), len(here)
