"""A stage made ready: the chain that it works on, the samples that it sees, and its strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import work_of
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import TrainFeed, augment_of
from hvfreeze.errors import UsageError
from hvfreeze.freezing.frozen import release_model
from hvfreeze.ranks.agreement import together
from hvfreeze.strategies.strategy import Materials
from hvfreeze.training.choice import open_strategy
from hvfreeze.training.making.blueprint import Blueprint
from hvfreeze.training.stages.course import Opened
from hvfreeze.training.stages.stage import Costs, Stage, stages_of, tuning_cut

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
    """

    materials: Materials
    config: Config
    blueprint: Blueprint

    def __call__(self, stage: Stage) -> Opened:
        """Open a stage; what another stage has frozen trains again.

        Collective: every rank of the world must call this.

        Raises:
            UsageError: the stage's settings do not fit the model or the world; on all ranks.
        """
        given = self.materials
        release_model(given.chain.model)
        chain, feed = together(given.world, lambda: (self._chain(stage), self._feed(stage)), name="stage")
        corpus = replace(given.corpus, plan=feed.plan)
        materials = replace(given, chain=chain, feed=feed, corpus=corpus)
        strategy = open_strategy(materials, stage.config)
        return Opened(strategy, feed, chain.model, tuple(block.name for block in chain.blocks))

    def stages(self) -> tuple[Stage, ...]:
        """Return the run's stages.

        Raises:
            UsageError: --cut is deeper than the model.
        """
        chain, plan = self.materials.chain, self.materials.feed.plan
        deepest = len(chain.blocks) - 1
        if not self.config.freeze.auto:
            costs = Costs(views=1, frozen=0.0)
            batches = plan.batches_per_epoch
            return stages_of(
                self.config, batches_per_epoch=batches, guarded_batches=0, cut=0, deepest=deepest, costs=costs
            )
        cut = tuning_cut(chain, self.config.freeze.cut)
        if cut > deepest:
            raise UsageError(f"--cut ({cut}) must be in 0..{deepest}: the head is never frozen")
        work = work_of(chain, torch.zeros(1, *self.blueprint.image_shape))
        augment = augment_of(self.config.data, mirrored=True, flips=self.materials.corpus.train.flips)
        return stages_of(
            self.config,
            batches_per_epoch=plan.batches_per_epoch,
            guarded_batches=self._guarded_batches(),
            cut=cut,
            deepest=deepest,
            costs=Costs(views=max(1, augment.num_views), frozen=sum(work[:cut]) / sum(work)),
        )

    def _chain(self, stage: Stage) -> Chain:
        chain, head = self.materials.chain, stage.config.head
        return self.blueprint.solvable(chain, head) if head.exact else chain

    def _feed(self, stage: Stage) -> TrainFeed:
        data, feed = stage.config.data, self.materials.feed
        augment = augment_of(data, mirrored=stage.config.head.exact, flips=self.materials.corpus.train.flips)
        return feed.shown(augment, without=feed.held_out(HELD_OUT) if stage.guarded else None)

    def _guarded_batches(self) -> int:
        feed = self.materials.feed
        try:
            return feed.plan.without(feed.held_out(HELD_OUT)).batches_per_epoch
        except UsageError:
            return 0
