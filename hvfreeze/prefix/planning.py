"""Whether the rows of a cut are kept: measured on all ranks, decided on rank 0, told to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvfreeze.cache.planning.plan import Plan, make_plan, reads_again
from hvfreeze.cache.planning.rates import Rates
from hvfreeze.cache.planning.situation import Situation
from hvfreeze.cache.store.shares import Shares
from hvfreeze.data.draws import Ids
from hvfreeze.prefix.measuring import Misses, Outlook, Trial, rates_of
from hvfreeze.prefix.splits import RowSource
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World

PROBED_ROW_BYTES = 4096
"""Of a rank that has no rows of its own; its plan is that of the others."""
FREE_OF_CHARGE = Rates(
    read_cold=0.0, read_warm=0.0, read_cpu=0.0, write=0.0, write_cpu=0.0, hash=0.0, free_bytes=1 << 62, filesystem=""
)
"""Of a directory that is not measured because no row would be read."""


@dataclass
class Planner:
    """Plans for one split, at one cut after another.

    Attributes:
        steady: whether a row's bits at this cut do not depend on its place in a batch.
        exact: whether that was so at all cuts so far.
    """

    world: World
    source: RowSource
    outlook: Outlook
    misses: Misses
    steady: bool = True
    exact: bool = True
    _cut: int = 0
    _trial: Trial | None = None
    _image_seconds: float = field(default=0.0)
    _seconds_at: dict[int, float] = field(default_factory=dict)

    def plan(self, cut: int, look: Callable[[Sequence[tuple[Ids, Ids]]], Shares], *, asked: bool) -> Plan:
        """Return the plan for `cut`; the second time at a cut, what training has measured since counts.

        Collective: every rank of the world must call this.

        Args:
            cut: number of frozen blocks.
            look: epochs, each as (sample ids, views) -> how much of each is there.
            asked: rows are kept whether that pays or not.

        Raises:
            CacheFault: the cache directory cannot be used on some rank; raised on all.
        """
        name = self.source.split.name
        epoch = self.outlook.horizon().epoch
        shares = together(self.world, lambda: look(self.source.split.coming(epoch)), name=f"cache.look.{name}")
        # Measuring a directory takes most of a second, which a run that would read nothing is spared.
        outlines = self.world.allgather_object(self._outline(shares), name="cache.outlines")
        worth = asked or reads_again(outlines)

        def measure() -> Situation:
            self._enter(cut)
            if self._trial is None and (worth or any(shares.sources)):
                self._try()
            return self._situation(shares, measured=worth)

        situation = together(self.world, measure, name=f"cache.measure.{name}")
        situations = self.world.allgather_object(situation, name="cache.situations")
        left = self.outlook.budget.left_bytes
        limit = None if left is None else left * self.world.size
        plan = make_plan(situations, limit_bytes=limit, asked=asked)
        return self.world.broadcast_object(plan, name="cache.plan")

    def _enter(self, cut: int) -> None:
        """Begin to count at another cut."""
        if cut != self._cut:
            self._seconds_at[self._cut] = self.misses.seconds_per_batch()
            self._cut, self._trial, self._image_seconds = cut, None, 0.0
            self.steady = True
            self.misses.restart(cut)

    def _try(self) -> None:
        """Load a batch and run it through the prefix, where there are samples."""
        if len(self.source.split.ids):
            ids = np.resize(self.source.split.ids, self.source.recipe.batch_rows)
            start = time.perf_counter()
            images = self.source.split.images.load(ids, np.zeros_like(ids))
            self._image_seconds = time.perf_counter() - start
            self._trial = self.outlook.trial(self._cut, self.source.run_blocks, images)
            self.misses.measured = self._image_seconds + self._trial.seconds
        self.steady = self._trial is None or self._trial.exact
        self.exact = self.exact and self.steady

    def _outline(self, shares: Shares) -> Situation:
        """Return what is known before anything is measured."""
        passes, horizon = self.source.split.passes_per_epoch, self.outlook.horizon()
        training = self.source.split.name == "train"
        left, until_move, passed = (horizon.trained if training else horizon.evaluated)(passes=passes)
        return Situation(
            image_seconds=0.0,
            prefix_seconds=0.0,
            suffix_seconds=0.0,
            batch_rows=self.source.recipe.batch_rows,
            rows=len(self.source.split.ids),
            views=self.source.split.num_views,
            row_bytes=0,
            epochs_left=left,
            epochs_until_move=until_move,
            passed=passed,
            present=shares.present,
            sources=shares.sources,
            rows_rewritten=shares.rows_to_complete,
            all_at_once=self.source.shared,
            memory_bytes=self.outlook.memory_bytes,
            rates=FREE_OF_CHARGE,
        )

    def _situation(self, shares: Shares, *, measured: bool) -> Situation:
        trial = self._trial
        stored = self.source.recipe.stored or (trial.dtype if trial else None)
        row_bytes = trial.row_elements * stored.itemsize if trial and stored else 0
        probed = (self.outlook.directory, row_bytes or PROBED_ROW_BYTES, self.source.recipe.batch_rows)
        found = replace(
            self._outline(shares),
            image_seconds=self._image_seconds,
            prefix_seconds=max(0.0, self.misses.seconds_per_batch() - self._image_seconds),
            suffix_seconds=self.outlook.suffix_seconds() if self.source.split.name == "train" else 0.0,
            row_bytes=row_bytes,
            rates=rates_of(*probed) if measured else FREE_OF_CHARGE,
        )
        spares = self._seconds_at.get(shares.source_cut, 0.0) - found.read_seconds
        return replace(found, source_spares=max(0.0, min(spares, found.compute_seconds)))
