"""Checks that do not hold, each in another way, for the test of standing.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from hvfreeze.comm.world import World

kept: list[object] = []


def check_that_holds(world: World) -> None:
    world.barrier(name="holds")


def check_that_others_wait_in(world: World) -> None:
    assert world.rank > 0
    world.barrier(name="waits")


def check_that_leaves_something(world: World) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    kept.append(listener)
    if world.rank == 0:
        Path("forgotten.txt").touch()
        script = "import subprocess; subprocess.Popen(['sleep', '3600'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", script], check=True)


def check_that_changes_its_process(world: World) -> None:
    os.environ["LEFT"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/left")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def check_that_finds_its_process_as_it_was(world: World) -> None:
    assert "LEFT" not in os.environ and os.getcwd() != "/" and "/left" not in sys.path
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
