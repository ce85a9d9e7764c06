"""A checkpoint's state for another number of ranks than wrote it: training goes on, but not bit for bit.

Parameters, optimizer state and the cut are what they were. Samples are dealt out anew, so an epoch has another number
of steps and a step another number of samples. Training goes on at the same part of the epoch, rounded down to a whole
step, and with it the learning rate: some of that epoch's samples are met twice in it, others not. Running statistics
are pooled; what criteria saw of an interval is forgotten; a rank that is new has the random numbers of a new run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hvfreeze.errors import RefusedError
from hvfreeze.training.checkpoints.file import Checkpoint, packed, unpacked
from hvfreeze.training.evaluation import Totals
from hvfreeze.training.job import Job


class Redealing:
    """Deals a checkpoint's state out to the ranks of a job of another size.

    Args:
        job: the one that goes on.
        shared: the checkpoint's shared section.
        checkpoint: on rank 0.

    Raises:
        RefusedError: the checkpoint does not say how many steps an epoch had.
    """

    def __init__(self, job: Job, shared: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        self._job, self._shared, self._checkpoint = job, shared, checkpoint
        if type(shared.get("steps_per_epoch")) is not int or shared["steps_per_epoch"] < 1:
            raise RefusedError(
                "the checkpoint does not say how many steps an epoch had; resume on as many ranks as before"
            )
        self._before: int = shared["steps_per_epoch"]
        self._totals: dict[str, Totals] = {}
        self._random: list[Tensor] = []
        self._states: Iterator[dict[str, Any]] | None = None

    def restep(self, step: int) -> int:
        """Return the step of this job that is at the same part of an epoch, or is the last one before it."""
        epoch, within = divmod(step, self._before)
        now = self._job.steps_per_epoch
        return epoch * now + within * now // self._before

    def told(self) -> str:
        """Return one clause about where training goes on."""
        step = self._shared["step"]
        return f"step {step} of {self._before} an epoch became {self.restep(step)} of {self._job.steps_per_epoch}"

    def shared(self) -> dict[str, Any]:
        """Return what all ranks are to share."""
        changed: dict[str, Any] = {"step": self.restep(self._shared["step"])}
        if "exchange" in self._shared:
            # Of other ranks, on other links.
            changed["exchange"] = {}
        return {**self._shared, **changed}

    def state_of(self, rank: int) -> Tensor | None:
        """Return on rank 0 what `rank` is to have of its own, packed; ranks must be asked for in order.

        Raises:
            RefusedError: the states are another model's.
        """
        if self._checkpoint is None:
            return None
        if self._states is None:
            there, size = self._there(self._checkpoint), self._job.world.size
            self._states = self._job.strategy.redealt(there, size=size, restep=self.restep)
        try:
            state = next(self._states)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(f"the checkpoint {self._checkpoint.path} is another model's: {error}") from error
        # Sums over samples are only ever added up over ranks.
        totals = {name: dataclasses.asdict(sums) for name, sums in self._totals.items()} if rank == 0 else {}
        new = torch.Generator().manual_seed(self._job.config.run.seed + rank).get_state()
        random = self._random[rank] if rank < len(self._random) else new
        return packed({**state, "random": random, "totals": totals})

    def _there(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Yield each old rank's own state, and keep what is not the strategy's."""
        for rank in range(checkpoint.size):
            own = unpacked(checkpoint.section(1 + rank), name=str(checkpoint.path))
            self._random.append(own["random"])
            for name, sums in own["totals"].items():
                before = self._totals.get(name, Totals())
                added = {field: value + getattr(before, field) for field, value in sums.items()}
                self._totals[name] = Totals(**added)
            yield own
