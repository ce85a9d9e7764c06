"""How a run uses the activation cache: what its rows are, when they are kept, and what that saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.compute import Activations, NullActivations
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.names import refusals
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.config.sections import CacheConfig
from hvfreeze.data.batches import Batch
from hvfreeze.prefix.account import Account, summary_of
from hvfreeze.prefix.planning import Planner
from hvfreeze.prefix.splits import RowSource
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World

NOTHING_KEPT: dict[str, Any] = {
    "mode": "off",
    "exact": True,
    "bytes": 0,
    "rows_written": 0,
    "rows_read": 0,
    "rows_read_predicted": 0.0,
    "seconds_saved_predicted": 0.0,
    "seconds_saved": 0.0,
    "stays": [],
}
"""summary.json's `cache` of a run without one."""


class NoCache:
    """`--cache off`: the prefix is computed in every epoch."""

    def __init__(self, activations: NullActivations) -> None:
        self.activations: Activations = activations

    def move(self, cuts: Sequence[int]) -> None:
        """Follow the cut to the last of `cuts`. Collective in `Caching`."""
        self.activations.begin_cut(cuts[-1])

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Do nothing. Collective in `Caching`."""

    @property
    def keeps(self) -> bool:
        """Return False."""
        return False

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`. Collective in `Caching`."""
        return dict(NOTHING_KEPT)


@dataclass
class Caching:
    """`--cache on` or `auto`: rows are kept at a cut, and later epochs read them."""

    settings: CacheConfig
    world: World
    source: RowSource
    activations: PrefixActivations
    planner: Planner
    account: Account
    say: Callable[[str], None]
    _cut: int = 0
    _mark: Fingerprint | None = None
    _declined: bool = False
    _told: set[str] = field(default_factory=set)

    def move(self, cuts: Sequence[int]) -> None:
        """Follow the cut to the last of `cuts`; rows of the cut before serve until there are new ones.

        Collective: every rank of the world must call this in the same step.

        Raises:
            CacheFault: something is wrong with the cache, and --cache-failure is `stop`; on all ranks.
        """
        self.account.settle(self.activations.cut)
        self._agree_on_failure()
        self._cut, self._declined = cuts[-1], False
        if self._cut == 0 or self.activations.failed is not None:
            self.activations.begin_cut(self._cut)
            return
        self._mark = self.source.fingerprint(cuts)
        self._consider()

    @property
    def keeps(self) -> bool:
        """Whether rows of the current cut are kept. Not a collective."""
        return self._cut > 0 and not self._declined and self.activations.failed is None

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Announce an epoch's batches, and fill in what a partly filled cache lacks where that saves forwards.

        A cut whose rows are not kept is looked at again: it may have stayed for longer than was to be expected.
        Collective: every rank of the world must call this.
        """
        self._agree_on_failure()
        if self._declined and self.activations.failed is None:
            self._consider(again=True)
        self.activations.announce([(batch.ids, batch.views) for batch in batches])
        self.activations.sweep()

    def _consider(self, *, again: bool = False) -> None:
        """Plan, and begin to keep the rows of this cut where that pays or was asked for. Collective."""
        mark, universe, cut = self._mark, self.source.split.universe(), self._cut
        assert mark is not None
        try:
            asked = self.settings.cache == "on"
            plan = self.planner.plan(self._cut, lambda epochs: self.activations.shares(mark, cut, epochs), asked=asked)
        except CacheFault as fault:
            if self.settings.cache_failure == "stop":
                raise
            self.activations.disable(str(fault), told=self.world.rank > 0)
            self.activations.begin_cut(self._cut)
            return
        use = plan.use or self.settings.cache == "on"
        self._declined = not use
        if again and not use:
            return
        if self.source.split.name == "train":
            when = ", looked at again" if again else ""
            decided = f"cache {self.settings.cache} at cut {self._cut}{when}: {plan.reason}"
            self.say(f"{decided}; log.txt has the table\n{plan.table()}" if len(plan.rows) > 1 else decided)
        self.account.settle(self.activations.cut)
        self.account.begin(self._cut, plan, kept=use)

        def begin() -> None:
            steady = self.planner.steady
            self.activations.begin_cut(self._cut, mark=mark, universe=universe, store=use, steady=steady)

        together(self.world, begin, name=f"cache.begin.{self.source.split.name}")
        self._agree_on_failure()
        if use and self.activations.failed is None:
            self._tell_refusals(mark)
        if use and self.activations.failed is None and self.source.shared:
            self._fill()
        elif not again:
            # What is left of the epoch under way, should the cut have moved in its middle.
            self.activations.sweep()

    def _fill(self) -> None:
        """Compute rows before training goes on, of which each rank stores a share and all read all. Collective."""
        self.activations.sweep(everything=True)
        self.activations.publish()
        self.world.barrier(name=f"cache.{self.source.split.name}")
        self.activations.refresh()
        # Each file is hashed once by all ranks together: reading is everybody's, and hashing takes as long.
        mine = self.activations.verify_share(self.world.rank, self.world.size)
        theirs = self.world.allgather_object(mine, name=f"cache.verified.{self.source.split.name}")
        self.activations.accept({name: digest for verified in theirs for name, digest in verified.items()})
        self._agree_on_failure()

    def _tell_refusals(self, mark: Fingerprint) -> None:
        """Say which files of this cut are not used, and why; each once."""
        if self.world.rank == 0 and self.activations.stored_bytes == 0:
            for line in refusals(self.activations.directory, mark):
                if line not in self._told:
                    self._told.add(line)
                    self.say(line)

    def report(self) -> dict[str, Any]:
        """Return summary.json's `cache`, summed over ranks; seconds are a rank's mean.

        Collective: every rank of the world must call this.
        """
        self.account.settle(self.activations.cut)
        counters, exact = self.activations.counters, self.planner.exact and self.activations.exact
        mine = (exact, self.activations.stored_bytes, counters.rows_written, self.account.of_stays())
        every_exact, every_bytes, every_written, done = zip(*self.world.allgather_object(mine, name="cache.report"))
        return {
            "mode": self.settings.cache,
            "exact": all(every_exact),
            "bytes": sum(every_bytes),
            "rows_written": sum(every_written),
            **summary_of(self.account.stays, done),
        }

    def _agree_on_failure(self) -> None:
        reasons = self.world.allgather_object(self.activations.failed, name=f"cache.failed.{self.source.split.name}")
        for rank, reason in enumerate(reasons):
            if reason is not None and self.activations.failed is None:
                self.activations.disable(f"rank {rank}: {reason}", told=True)
