"""Every rank calls the checks of some workers, in one job: `checks.py DIRECTORY PART...`.

A worker is a module beside this one, and its functions `check_*` are its checks. A part of the job is all of them, as
`grid`; or one, as `staged.stops`; or all with a word for the worker to go by, as `contract:subnets`. A worker may have

- `start([word])`, which opens the world where this worker is the first of the job;
- `setting(world, root[, word])`, which returns what its checks are called with instead of the world; the directory
  `root` is for this part alone.

A check that fails is named, and its job ends with an error: after the checks that follow, if all ranks come to the end
of the one that fails, else at once.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hvfreeze.comm.horovod_world import open_world
from hvfreeze.comm.world import World, end_job_on_exception
from hvfreeze.data import batches
from hvfreeze.freezing.criteria import CRITERIA
from hvfreeze.heads import rows
from hvfreeze.model import model_sources
from hvfreeze.training import stage_build
from tests.parallel.mpirun import report

PATIENCE_SECONDS = 20.0
"""How long a rank whose check has failed waits for the others, which may wait for it."""


class Part:
    """Some checks of a worker, and what they are called with."""

    def __init__(self, name: str) -> None:
        called, *self.words = name.split(":")
        module, *only = called.split(".")
        self.name, self.worker = name, importlib.import_module(f"tests.parallel.workers.{module}")
        inside = vars(self.worker)
        own = [key for key in inside if key.startswith("check_") and inside[key].__module__ == self.worker.__name__]
        self.checks = [inside[key] for key in ([f"check_{check}" for check in only] or own)]

    def start(self) -> World | None:
        """Return the world that the worker opens, None where it leaves that to others."""
        return self.worker.start(*self.words) if hasattr(self.worker, "start") else None

    def setting(self, world: World, root: Path) -> Any:
        """Return what the checks are called with."""
        if not hasattr(self.worker, "setting"):
            return world
        folder = root / self.name.replace(":", "-")
        folder.mkdir(exist_ok=True)
        return self.worker.setting(world, folder, *self.words)


@contextmanager
def taken_back() -> Iterator[None]:
    """Take back at the end what settings change in the modules that they share."""
    shared = [(stage_build, "build_model"), (model_sources, "_construct")]
    shared += [(batches, "PIXELS_AT_ONCE"), (rows, "CHUNK_ROWS")]
    before = [getattr(module, name) for module, name in shared]
    try:
        with patch.dict(CRITERIA):
            yield
    finally:
        for (module, name), value in zip(shared, before, strict=True):
            setattr(module, name, value)


def holds(check: Callable[[Any], None], given: Any, *, called: str, world: World, ended: Path) -> bool:
    """Call a check; where it fails on this rank, say so, and end the job unless all ranks come to its end."""
    if world.rank == 0:
        print(called, flush=True)  # the last of them is what a job that hangs waits in
    try:
        check(given)
    except Exception:
        print(f"rank {world.rank}: {called} fails\n{traceback.format_exc()}", file=sys.stderr, end="", flush=True)
        failed = True
    else:
        failed = False
    (ended / f"{called} {world.rank}").touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while failed and not all((ended / f"{called} {rank}").exists() for rank in range(world.size)):
        if time.monotonic() > deadline:
            print(f"rank {world.rank}: other ranks cannot go on after {called}", file=sys.stderr, flush=True)
            world.abort(1)
        time.sleep(0.1)
    return not failed


def main(root: Path, names: Sequence[str]) -> None:
    parts = [Part(name) for name in names]
    started = parts[0].start()
    world = started or open_world()
    end_job_on_exception(world)
    torch.set_num_threads(1)
    ended = root / "ended"
    ended.mkdir(exist_ok=True)
    made, failed = [], []
    for part in parts:
        with taken_back():
            given = part.setting(world, root)
            for check in part.checks:
                made.append(f"{part.name} {check.__name__}")
                if not holds(check, given, called=made[-1], world=world, ended=ended):
                    failed.append(made[-1])
    if not failed:
        report(world.rank, checks=made)
    if not started:
        world.close()
    if failed:
        sys.exit(f"rank {world.rank}: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
