"""The world of a script that somebody wrote for Horovod: started here, or running already when we are called."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor

from hvfreeze.errors import HvfreezeError
from hvfreeze.ranks.horovod_world import HorovodWorld, open_world
from hvfreeze.ranks.machine.mpi_environment import seconds_in, start_mpi
from hvfreeze.ranks.machine.stall_watch import STALL_SECONDS, StallWatch
from hvfreeze.ranks.world import World

HOROVOD = "horovod.torch"
GRACE_SECONDS = 3.0
"""How long other ranks leave rank 0 to speak first, where all are likely to have the same to say."""


@dataclass
class _Transfer:
    """A sum over ranks that waits for those before it, is on its way, or has arrived."""

    tensor: Tensor
    name: str
    started: Any = None
    arrived: bool = False


class RunningWorld(HorovodWorld):
    """One rank of a job in which the script has called `hvd.init()` itself.

    Horovod then fuses what waits at the same moment, and fused sums depend on timing. So sums start one after another:
    Horovod carries them out one by one in any case.
    """

    def __init__(self, hvd: Any) -> None:
        os.environ.setdefault(STALL_SECONDS, "600")
        self.mpi = start_mpi()
        # It asks nobody: the script may end MPI at any time.
        self.watch = StallWatch(seconds_in(STALL_SECONDS), self.abort)
        self._hvd, self._set, self._sets = hvd, hvd.global_process_set, {}
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.ranks = tuple(range(self.size))
        self._line: deque[_Transfer] = deque()
        self.hosts = self.allgather_object(socket.gethostname(), name="hosts")

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
        """Start to sum `tensor` over ranks, in place, when what was started before has arrived."""
        transfer = _Transfer(tensor, name)
        self._line.append(transfer)
        if self._line[0].started is not None and self._hvd.poll(self._line[0].started[0]):
            self._take_in()
        self._start_first()
        return transfer

    def poll(self, handle: Any) -> bool:
        """Return False: what is started early, when something has arrived, would start in another order elsewhere."""
        return False

    def wait(self, handle: Any) -> Any:
        """Return when the operation has ended, with its result; raise as in `HorovodWorld`."""
        if not isinstance(handle, _Transfer):
            return super().wait(handle)
        while not handle.arrived:
            self._start_first()
            self._take_in()
        self._start_first()
        return handle.tensor

    def close(self) -> None:
        """Leave Horovod together, as the script's own `hvd.shutdown()` would."""
        self.barrier(name="close")
        self._hvd.shutdown()

    def _start_first(self) -> None:
        if self._line and self._line[0].started is None:
            first = self._line[0]
            first.started = super().start_allreduce_(first.tensor, name=first.name)

    def _take_in(self) -> None:
        super().wait(self._line[0].started)
        self._line.popleft().arrived = True


def script_world() -> World:
    """Return the script's world, and start what it needs: Horovod too where the script has imported it.

    Collective: every rank of the job must call this.

    Raises:
        UsageError: a launcher started several tasks that cannot talk to each other.
    """
    hvd: Any = sys.modules.get(HOROVOD)
    if hvd is not None and hvd.is_initialized() and hvd.size() > 1:
        return RunningWorld(hvd)
    world = open_world()
    if isinstance(world, HorovodWorld):
        # Before Horovod's own end, which was registered earlier: no thread may call MPI after it.
        atexit.register(world.watch.disconnect)
    elif hvd is not None and not hvd.is_initialized():
        hvd.init()
    return world


def report_errors(world: World) -> None:
    """Make an uncaught error on any rank end the whole job: an expected one with its message, others with a traceback.

    Expected are hvfreeze's own; the exit code is theirs. In an interactive session nothing changes.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, HvfreezeError):
            _leave(world, error)
        elif world.size == 1:
            before(kind, error, where)
        else:
            lines = "".join(traceback.format_exception(kind, error, where))
            print(f"hvfreeze: rank {world.rank} of {world.size} failed\n{lines}", file=sys.stderr, end="", flush=True)
            world.abort(1)

    if not hasattr(sys, "ps1"):
        sys.excepthook = hook


def _leave(world: World, error: HvfreezeError) -> None:
    """Say what is wrong, once where all ranks know it, and end the job with the error's exit code."""
    alone = world.size > 1 and not error.everywhere
    if alone and world.rank > 0:
        time.sleep(GRACE_SECONDS)
    if alone or world.rank == 0:
        who = f"rank {world.rank}: " if alone else ""
        print(f"hvfreeze: error: {who}{error}", file=sys.stderr, flush=True)
    if not alone:
        world.close()
    world.abort(error.exit_code)
