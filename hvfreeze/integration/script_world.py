"""The world of a Horovod script, started here or already running, and log lines for its user."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.cycle_time import advise_longer_cycle, lengthen_cycle_on_full_cores
from hvfreeze.comm.horovod_world import HorovodWorld, open_world
from hvfreeze.comm.mpi_environment import claimed_rank, start_mpi
from hvfreeze.comm.stall_watch import StallWatch, stall_limit
from hvfreeze.comm.world import SoloWorld, World, end_job
from hvfreeze.errors import HvfreezeError, UsageError

HOROVOD = "horovod.torch"
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
GRACE_SECONDS = 3.0
"""Seconds that other ranks wait for rank 0's message, if all are likely to print the same."""


@dataclass
class _Transfer:
    """An allreduce that waits for earlier ones, is running, or is complete."""

    tensor: Tensor
    name: str
    started: Any = None
    arrived: bool = False


class RunningWorld(HorovodWorld):
    """One rank of a job in which the script has called `hvd.init()` itself, or of one of its process sets.

    Horovod then fuses messages that wait at the same time, and fused sums depend on timing. So allreduces start one
    after another, over all optimizers of the script; Horovod executes them one at a time anyway.
    """

    def __init__(self, hvd: Any, process_set: Any = None, *, beside: HorovodWorld | None = None) -> None:
        """Start among all ranks, or those of a process set; `beside` is another world of this process, if any."""
        if beside is None:
            self.mpi = start_mpi()
            # It sends no message to other ranks: the script may finalize MPI at any time.
            self.watch = StallWatch(stall_limit(), self.abort)
        else:
            self.mpi, self.watch = beside.mpi, beside.watch
        self._line: deque[_Transfer] = beside._line if isinstance(beside, RunningWorld) else deque()
        self._hvd, self._set, self._sets = hvd, process_set or hvd.global_process_set, {}
        self.ranks = tuple(range(hvd.size()) if process_set is None else process_set.ranks)
        self.rank, self.size = self.ranks.index(hvd.rank()), len(self.ranks)
        self.hosts = self.allgather_object(socket.gethostname(), name="hosts")
        here = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
        """Start to sum `tensor` over ranks in place, when earlier allreduces are complete."""
        transfer = _Transfer(tensor, name)
        self._line.append(transfer)
        if self._line[0].started is not None and self._hvd.poll(self._line[0].started[0]):
            self._take_in()
        self._start_first()
        return transfer

    def poll(self, handle: Any) -> bool:
        """Return False: an early start after one has completed would change the order on other ranks."""
        return False

    def wait(self, handle: Any) -> Any:
        """Wait for the operation and return its result; raises like `HorovodWorld`."""
        if not isinstance(handle, _Transfer):
            return super().wait(handle)
        while not handle.arrived:
            self._start_first()
            self._take_in()
        self._start_first()
        return handle.tensor

    def close(self) -> None:
        """Leave Horovod together with all ranks, like the script's own `hvd.shutdown()`; a process set stays open."""
        self.barrier(name="close")
        if self.size == self._hvd.size():
            self._hvd.shutdown()

    def _start_first(self) -> None:
        if self._line and self._line[0].started is None:
            first = self._line[0]
            first.started = super().start_allreduce_(first.tensor, name=first.name)

    def _take_in(self) -> None:
        first = self._line.popleft()  # even if it fails: later allreduces must not wait for it
        super().wait(first.started)
        first.arrived = True


_opened: dict[tuple[int, ...], HorovodWorld] = {}
"""The script's worlds: of a process set by (its id, its ranks), of the whole job by ()."""


def script_world(process_set: Any = None, *, rests: bool = True) -> World:
    """Return the script's world, and start Horovod if the script has imported it but not started it.

    Collective: every rank of the job, or of the process set, must call this.

    Args:
        process_set: an added process set of Horovod; None is all ranks. A rank outside of it is a single process.
        rests: whether to lengthen Horovod's cycle time if torch's threads use all cores of the nodes and Horovod is
            started here. Then it cannot be restarted, as `World.among` needs. If Horovod is already running, log what
            to set instead. Pass False if the number of threads changes.

    Raises:
        UsageError: a launcher started several tasks that MPI does not connect, or the process set is unknown.
    """
    if process_set is not None and process_set.process_set_id is None:
        raise UsageError(f"process_set ({process_set}) is unknown to Horovod; call hvd.add_process_set() first")
    hvd: Any = sys.modules.get(HOROVOD)
    if hvd is not None and hvd.is_initialized() and hvd.size() > 1:
        return _running_world(hvd, None if process_set is hvd.global_process_set else process_set, rests)
    try:
        world = open_world()
    except HvfreezeError:
        report_errors(SoloWorld())
        if claimed_rank(os.environ) > 0:
            time.sleep(GRACE_SECONDS)  # a launcher ends all tasks with the first, which then has spoken
        raise
    if isinstance(world, HorovodWorld):
        if rests:
            for line in lengthen_cycle_on_full_cores(world, torch.get_num_threads()):
                log(world, line)
        _opened[()] = world
        # Before Horovod's own end, which was registered earlier: no thread may call MPI after it.
        atexit.register(world.watch.disconnect)
    elif hvd is not None and not hvd.is_initialized():
        hvd.init()
    return world


def _running_world(hvd: Any, process_set: Any, rests: bool) -> World:
    if process_set is not None and (not process_set.included() or len(process_set.ranks) == 1):
        return SoloWorld()
    key = () if process_set is None else (process_set.process_set_id, *process_set.ranks)
    if key not in _opened:
        world = _opened[key] = RunningWorld(hvd, process_set, beside=next(iter(_opened.values()), None))
        if process_set is None and rests:
            for line in advise_longer_cycle(world, torch.get_num_threads()):
                log(world, line)
    return _opened[key]


def report_errors(world: World) -> None:
    """Make an uncaught error on any rank end the whole job: hvfreeze's own with a message, others with a traceback.

    The exit code is that of hvfreeze's error. In an interactive session nothing changes.
    """
    before = sys.excepthook
    known = before.args[0] if isinstance(before, partial) and before.func is _report else None
    is_same = known is world or (known is not None and known.size == world.size == 1)
    if not hasattr(sys, "ps1") and not is_same:
        sys.excepthook = partial(_report, world, before)


def _report(
    world: World, before: Hook, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if isinstance(error, HvfreezeError):
        _leave(world, error)
    elif world.size == 1:
        before(kind, error, where)
    else:
        end_job(world, error)


def _leave(world: World, error: HvfreezeError) -> None:
    """Print an error, once if all ranks have it, and end the job with its exit code."""
    alone = world.size > 1 and not error.everywhere
    if alone and world.rank > 0:
        time.sleep(GRACE_SECONDS)
    if alone or world.rank == 0:
        who = f"rank {world.rank}: " if alone else ""
        print(f"hvfreeze: error: {who}{error}", file=sys.stderr, flush=True)
    if not alone:
        world.close()
    world.abort(error.exit_code)


logger = logging.getLogger("hvfreeze")


def log(world: World, message: str, *arguments: object, level: int = logging.INFO) -> None:
    """Log a line by the logger `hvfreeze`, on rank 0. Not a collective.

    If the script has configured logging, its handlers and levels apply. If not, logging itself would drop lines below
    WARNING, so lines from INFO (or the logger's own level) on go to standard error through a separate handler.
    """
    if world.rank > 0:
        return
    if logger.hasHandlers():
        logger.log(level, message, *arguments)
    elif level >= (logger.level or logging.INFO):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvfreeze: %(message)s"))
        handler.handle(logger.makeRecord(logger.name, level, __file__, 0, message, arguments, None))
