"""One rank of a standing job: `rank.py SOCKET START`. It calls one check after another, as tests ask for them.

A worker is a module in workers/; its functions `check_*` are its checks. `contract:subnets` is a worker with a word for
it to go by. A worker may have `setting(world, root[, word])`, which returns what
a check is called with instead of the world; `root` is a directory for this check alone.

START names what opens the world: a worker and a word for its `start(word)`. Where there is none the program's way does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hvfreeze.imports import kept_for_good

with kept_for_good():
    import torch

    from hvfreeze.comm.horovod_world import open_world
    from hvfreeze.comm.world import World, end_job_on_exception
    from hvfreeze.freezing.criteria import CRITERIA

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def library_restored() -> Iterator[None]:
    """Restore what workers put into the library's modules and classes in the place of what was there."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hvfreeze"]
    classes = {thing for module in modules for thing in vars(module).values() if isinstance(thing, type)}
    owners = [*modules, *(each for each in classes if each.__module__.startswith("hvfreeze."))]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        with patch.dict(CRITERIA):
            yield
    finally:
        for owner, things in before:
            now = vars(owner)
            for name in [name for name, thing in things.items() if now.get(name) is not thing]:
                setattr(owner, name, things[name])


@contextlib.contextmanager
def process_restored(folder: Path) -> Iterator[None]:
    """Let a check work in `folder`, and restore what it may change in its process."""
    threads, kind, hook, path = torch.get_num_threads(), torch.get_default_dtype(), sys.excepthook, list(sys.path)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    here, tempfile.tempdir = os.getcwd(), str(folder)
    os.chdir(folder)
    running = {}
    try:
        with patch.dict(os.environ), warnings.catch_warnings():
            yield
            # What Horovod was started with last tells the next check, as it tells a run.
            running = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    finally:
        os.environ.update(running)
        os.chdir(here)
        tempfile.tempdir, sys.excepthook, sys.path[:] = None, hook, path
        torch.set_num_threads(threads)
        torch.set_default_dtype(kind)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def listening() -> set[str]:
    """Return the ports that this process listens on."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(f"port {int(words[1].rpartition(':')[2], 16)}")
    return found


def call(world: World, request: dict[str, Any]) -> dict[str, Any]:
    """Call a check; return its value or its traceback, and what it leaves open."""
    before = listening()
    module, *words = request["part"].split(":")
    worker = importlib.import_module(f"tests.parallel.workers.{module}")
    answer: dict[str, Any] = {}
    try:
        with process_restored(Path(request["folder"])), library_restored():
            root = Path(request["root"])
            given = worker.setting(world, root, *words) if hasattr(worker, "setting") else world
            answer["value"] = vars(worker)[request["check"]](given, **request["arguments"])
    except Exception:
        answer = {"error": traceback.format_exc()}
    if left := listening() - before:
        gc.collect()
        left &= listening()
    return answer | {"left": sorted(left)}


def start(name: str) -> World:
    """Open the world as START says."""
    module, *words = name.split(":")
    worker = importlib.import_module(f"tests.parallel.workers.{module}") if module else None
    world: World = worker.start(*words) if hasattr(worker, "start") else open_world()
    return world


def main(address: str, how: str) -> None:
    """Serve checks until the test process hangs up."""
    torch.set_num_threads(1)
    world = start(how)
    end_job_on_exception(world)
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    with link, link.makefile("rw") as lines:

        def say(**content: Any) -> None:
            lines.write(json.dumps(content) + "\n")
            lines.flush()

        say(rank=world.rank, pid=os.getpid())
        for line in lines:
            say(**call(world, json.loads(line)))
            sys.stdout.flush()
    # Threads and Horovod would have to be closed one by one; nothing that was tested is left to see.
    threading.excepthook = lambda *_: None
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
