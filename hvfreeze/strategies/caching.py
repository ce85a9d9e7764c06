"""What plans for the activation cache must know of a run, for every strategy that keeps a prefix's output."""

from __future__ import annotations

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.sections import CacheConfig
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.prefix.measuring import Horizon, Outlook, open_budget, suffix_seconds
from hvfreeze.ranks.machine.share import memory_budget
from hvfreeze.strategies.strategy import Materials


def open_outlook(
    materials: Materials, settings: CacheConfig, optimizer: OptimizerConfig, freezer: Freezer, *, size: int
) -> Outlook:
    """Return what plans for the cache must know of the run; training and evaluation pay from its one budget.

    --cache-limit is shared by `size` ranks.
    """
    world, place, per_epoch = materials.world, materials.place(settings), materials.corpus.plan.batches_per_epoch

    def batches_trained(steps: int) -> float:
        return steps * per_epoch / optimizer.steps_per_epoch(per_epoch)

    def horizon() -> Horizon:
        epoch = freezer.step // freezer.cadence.steps_per_epoch
        return Horizon(freezer.epochs_left, freezer.epochs_until_move(), epoch)

    return Outlook(
        horizon=horizon,
        suffix_seconds=lambda: suffix_seconds(materials.clock, batches=batches_trained(freezer.step)),
        budget=open_budget(settings, place, size=size),
        directory=place,
        memory_bytes=memory_budget(world.local_size),
    )
