"""The ranks of a benchmark: MPI synchronizes them, and Horovod is restarted as each side needs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from analysis.benchmarks.contest import ABSENT, FUSED, UNFUSED
from hvfreeze.comm.horovod_world import HorovodWorld

FUSION_BYTES = {UNFUSED: "0", FUSED: str(128 * 2**20)}


class Ranks:
    """All ranks of this job. Barriers are MPI's own, and only between steps, when nothing else is on its way."""

    def __init__(self) -> None:
        self.world = HorovodWorld()
        import horovod.torch as hvd
        from mpi4py import MPI

        self._hvd, self._comm, self._mode = hvd, MPI.COMM_WORLD, UNFUSED
        self.rank, self.size = self.world.rank, self.world.size

    def use(self, mode: str) -> None:
        """Set Horovod up in this way on all ranks; its response cache is empty afterwards."""
        if mode != ABSENT:
            os.environ["HOROVOD_FUSION_THRESHOLD"] = FUSION_BYTES[mode]
        if mode == self._mode:
            return
        self.barrier()
        if self._mode != ABSENT:
            self._hvd.shutdown()
        if mode != ABSENT:
            self._hvd.init()
        self._mode = mode

    def barrier(self) -> None:
        """Return when every rank has called."""
        self._comm.Barrier()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, in rank order."""
        gathered: list[list[float]] = self._comm.allgather(list(values))
        return gathered

    def agree(self, value: float) -> float:
        """Return rank 0's value."""
        agreed: float = self._comm.bcast(value, root=0)
        return agreed
