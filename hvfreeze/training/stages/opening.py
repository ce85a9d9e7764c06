"""A stage made ready: the chain that it works on, the samples that it sees, and its strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import work_of
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import TrainFeed, augment_of
from hvfreeze.data.views.augment import Augment
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen import release_model
from hvfreeze.heads.kernel.fit import MOST_ROWS, check_count
from hvfreeze.heads.kernel.module import KernelHead
from hvfreeze.heads.multilevel import head_of
from hvfreeze.ranks.agreement import together
from hvfreeze.strategies.strategy import Materials
from hvfreeze.training.choice import open_strategy
from hvfreeze.training.making.blueprint import Blueprint
from hvfreeze.training.stages.budget import Budget, NoBudget, TimeBudget
from hvfreeze.training.stages.course import Opened
from hvfreeze.training.stages.stage import Costs, Stage, stages_of, tuning_cut
from hvfreeze.training.stages.timing import Expected, time_batch, time_comparing, time_solving

HELD_OUT = 0.1
"""Part of the training samples that choose a solution's penalty, and that the guard judges by, before they are
fitted too."""


@dataclass(frozen=True, eq=False)
class Opener:
    """Opens stages of one run, one at a time.

    Attributes:
        materials: of the run; the chain is the model's own, the feed that of all samples.
        config: the run's.
        blueprint: what the chain was built from.
        trainable: the parameters that no one had frozen when the run began; the others stay as they are in all stages.
    """

    materials: Materials
    config: Config
    blueprint: Blueprint
    trainable: frozenset[nn.Parameter]

    def __call__(self, stage: Stage) -> Opened:
        """Open a stage; what another stage has frozen trains again.

        Collective: every rank of the world must call this.

        Raises:
            UsageError: the stage's settings do not fit the model or the world; on all ranks.
        """
        given = self.materials
        release_model(given.chain.model, self.trainable)
        chain, feed = together(given.world, lambda: (self._chain(stage), self._feed(stage)), name="stage")
        corpus = replace(given.corpus, plan=feed.plan)
        length = Length(stage.config.optimizer.epochs)
        materials = replace(given, chain=chain, feed=feed, corpus=corpus, length=length)
        strategy = open_strategy(materials, stage.config)
        return Opened(strategy, feed, chain.model, tuple(block.name for block in chain.blocks), length)

    def stages(self) -> tuple[Stage, ...]:
        """Return the run's stages, with the steps that --epochs gives them, or as yet one epoch's under a time budget.

        Raises:
            UsageError: --cut is deeper than the model, or there are too few samples to solve a head.
        """
        config, chain = self._affordable(), self.materials.chain
        if config.head.solved or config.freeze.auto:
            self._check_held_out()
        deepest, timed = len(chain.blocks) - 1, config.run.budget_seconds() is not None
        cut, costs = 0, Costs(views=1, frozen=0.0)
        if config.freeze.auto:
            cut = tuning_cut(chain, config.freeze.cut)
            if cut > deepest:
                raise UsageError(f"--cut ({cut}) must be in 0..{deepest}: the head is never frozen")
            work = work_of(chain, torch.zeros(1, *self.blueprint.image_shape))
            augment = self._augment(config)
            costs = Costs(views=max(1, augment.num_views), frozen=sum(work[:cut]) / sum(work))
        return stages_of(
            config,
            batches_per_epoch=self.materials.feed.plan.batches_per_epoch,
            guarded_batches=self._guarded_batches() if config.freeze.auto else 0,
            cut=cut,
            deepest=deepest,
            costs=None if timed else costs,
        )

    def budget(self, stages: Sequence[Stage], *, evaluated: int, started: float) -> Budget:
        """Return what chooses the steps of the stages.

        Collective: every rank of the world must call this.

        Args:
            stages: what `stages` returned.
            evaluated: batches of this rank's share of the evaluation samples.
            started: `time.monotonic()` when this process began to work on the run.
        """
        seconds, given = self.config.run.budget_seconds(), self.materials
        if seconds is None:
            return NoBudget()
        trained = next((stage for stage in stages if not stage.solves), stages[0])
        cut = 0 if trained.solves else trained.config.freeze.cut or 0
        precision = self.config.optimizer.precision
        timing = time_batch(given.chain, self._feed(trained), cut=cut, precision=precision, world=given.world)
        solve = self._expect_solution(stages[0], timing.forward) if stages[0].solves else 0.0
        expected = Expected(
            solve=max(given.world.allgather_object(solve, name="budget.solve")),
            step=timing.step * self.config.optimizer.accumulate,
            evaluation=timing.forward * evaluated,
            source=f"a timed forward batch ({1e3 * timing.forward:.0f} ms) and step ({1e3 * timing.step:.0f} ms)",
        )
        return TimeBudget(
            seconds=seconds,
            world=given.world,
            started=started,
            expected=expected,
            evaluate_every=self.config.run.evaluate_every,
        )

    def _affordable(self) -> Config:
        """Return the run's settings; with --freeze auto, a head that cannot compare so many rows takes fewer, or none.

        Mirror images go first: with them a linear head is behind one that compares rows without them.
        """
        config = self.config
        if config.head.head_fit != "kernel" or self._rows(config) <= MOST_ROWS:
            return config
        if not config.freeze.auto:
            # Before hours of features, not after them.
            check_count(self._rows(config))
        alone = replace(config, head=replace(config.head, mirror="off"))
        if self._rows(alone) <= MOST_ROWS:
            return alone
        return replace(config, head=replace(config.head, head_fit="exact"))

    def _rows(self, config: Config) -> int:
        """Return how many views of samples a head is fitted to, on all ranks."""
        return sum(map(len, self.materials.feed.plan.shards)) * max(1, self._augment(config).num_views)

    def _expect_solution(self, stage: Stage, forward: float) -> float:
        batches, head = self._feed(stage).every_view(), head_of(self._chain(stage))
        rows, classes = sum(batch.counted for batch in batches), self.blueprint.classes
        time_head = time_comparing if isinstance(head, KernelHead) else time_solving
        size = self.materials.world.size
        return forward * len(batches) + time_head(rows=rows, width=head.in_features, classes=classes, size=size)

    def _chain(self, stage: Stage) -> Chain:
        chain, head = self.materials.chain, stage.config.head
        return self.blueprint.solvable(chain, head) if head.solved else chain

    def _feed(self, stage: Stage) -> TrainFeed:
        feed = self.materials.feed
        return feed.shown(self._augment(stage.config), without=feed.held_out(HELD_OUT) if stage.guarded else None)

    def _augment(self, config: Config) -> Augment:
        mirrors = config.head.mirrors and self.materials.corpus.train.flips
        return augment_of(config.data, solved=config.head.solved, mirrors=mirrors)

    def _check_held_out(self) -> None:
        feed = self.materials.feed
        try:
            feed.held_out(HELD_OUT)
        except UsageError as error:
            count = sum(len(shard) for shard in feed.plan.shards)
            raise UsageError(
                f"head-fit (exact, as with --freeze auto) needs more than {count} training samples: a tenth of them, "
                "but never a class's only one, is held out to choose the penalty by, and here that is none; give two "
                "or more of each class, or pass --head-fit sgd and another --freeze"
            ) from error

    def _guarded_batches(self) -> int:
        feed = self.materials.feed
        try:
            return feed.plan.without(feed.held_out(HELD_OUT)).batches_per_epoch
        except UsageError:
            return 0
