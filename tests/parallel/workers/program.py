"""Every rank runs the program in its process, with the world that is already open and stays open."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest.mock import patch

from hvfreeze.__main__ import main
from hvfreeze.comm import horovod_world
from hvfreeze.comm.world import World


def run(world: World, *, commands: list[list[str]], variables: dict[str, str], folder: str) -> dict[str, Any]:
    os.chdir(folder)
    os.environ.update(variables)
    opened = patch.object(horovod_world, "open_world", lambda beside="": world)
    stays = patch.object(world, "close", lambda: world.barrier(name="program"))
    stdout, stderr = io.StringIO(), io.StringIO()
    with opened, stays, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(commands[world.rank])
    return {"code": code, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}
