"""Whether the rows of a cut are kept: measured on all ranks, decided on rank 0, told to all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hvfreeze.cache.compute import RunBlocks
from hvfreeze.cache.file.names import Present
from hvfreeze.cache.plan import Plan, Situation, make_plan
from hvfreeze.prefix.measuring import Misses, Outlook, Trial, rates_of
from hvfreeze.prefix.splits import Recipe, Split
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World

PROBED_ROW_BYTES = 4096
"""Of a rank that has no rows of its own; its plan is that of the others."""


@dataclass
class Planner:
    """Plans for one split, at one cut after another.

    Attributes:
        steady: whether a row's bits at this cut do not depend on its place in a batch.
        exact: whether that was so at all cuts so far.
    """

    world: World
    split: Split
    recipe: Recipe
    outlook: Outlook
    run_blocks: RunBlocks
    misses: Misses
    steady: bool = True
    exact: bool = True
    _cut: int = 0
    _trial: Trial | None = None
    _image_seconds: float = field(default=0.0)

    def plan(self, cut: int, present: Callable[[], Present]) -> Plan:
        """Return the plan for `cut`; the second time at a cut, what training has measured since counts.

        Collective: every rank of the world must call this.

        Args:
            cut: number of frozen blocks.
            present: which of this rank's rows are cached already.

        Raises:
            CacheFault: the cache directory cannot be used on some rank; raised on all.
        """

        def measure() -> Situation:
            if cut != self._cut:
                self._try(cut)
            return self._situation(present())

        situation = together(self.world, measure, name=f"cache.measure.{self.split.name}")
        situations = self.world.allgather_object(situation, name="cache.situations")
        left = self.outlook.budget.left_bytes
        plan = make_plan(situations, limit_bytes=None if left is None else left * self.world.size)
        return self.world.broadcast_object(plan, name="cache.plan")

    def _try(self, cut: int) -> None:
        """Load a batch and run it through the prefix, where there are samples."""
        self._cut, self._trial, self._image_seconds = cut, None, 0.0
        if len(self.split.ids):
            ids = np.resize(self.split.ids, self.recipe.batch_rows)
            start = time.perf_counter()
            images = self.split.images.load(ids, np.zeros_like(ids))
            self._image_seconds = time.perf_counter() - start
            self._trial = self.outlook.trial(cut, self.run_blocks, images)
        self.steady = self._trial is None or self._trial.exact
        self.exact = self.exact and self.steady
        self.misses.restart(self._image_seconds + (self._trial.seconds if self._trial else 0.0))

    def _situation(self, present: Present) -> Situation:
        rows, trial, horizon = self.recipe.batch_rows, self._trial, self.outlook.horizon()
        stored = self.recipe.stored or (trial.dtype if trial else None)
        row_bytes = trial.row_elements * stored.itemsize if trial and stored else 0
        training, passes = self.split.name == "train", self.split.passes_per_epoch
        return Situation(
            image_seconds=self._image_seconds,
            prefix_seconds=max(0.0, self.misses.seconds_per_batch() - self._image_seconds),
            suffix_seconds=self.outlook.suffix_seconds() if training else 0.0,
            batch_rows=rows,
            rows=len(self.split.ids),
            views=self.split.num_views,
            row_bytes=row_bytes,
            rows_present=present.rows,
            rows_rewritten=present.rows_to_complete,
            epochs_left=passes * horizon.epochs_left,
            epochs_until_move=passes * horizon.epochs_until_move,
            memory_bytes=self.outlook.memory_bytes,
            rates=rates_of(self.outlook.directory, row_bytes or PROBED_ROW_BYTES, rows),
        )
