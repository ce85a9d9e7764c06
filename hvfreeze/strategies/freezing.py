"""What freezes a model's blocks, or a rank's part of them, with the optimizer and the reducer that it keeps in step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hvfreeze.chain.segments import Segment
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.gradients import Join
from hvfreeze.freezing.voting.weights import Voter, coverage
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World
from hvfreeze.strategies.strategy import Materials
from hvfreeze.updates.update import open_optimizer


def open_freezer(
    materials: Materials,
    named: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerConfig,
    freeze: FreezeConfig,
    *,
    world: World,
    held: Segment | None = None,
    join: Join = list,
) -> Freezer:
    """Return the freezer of `named` parameters, which `world` exchanges and votes on; for the rest see `Freezer`.

    Raises:
        UsageError: the freeze settings do not fit the model or the number of ranks.
    """
    corpus, chain = materials.corpus, materials.chain
    head = {name for name, _ in chain.named_parameters(len(chain.blocks) - 1)}
    (head_lr,) = settings.head_rates() or [settings.lr]
    steps = settings.steps_per_epoch(corpus.plan.batches_per_epoch)
    labels = corpus.train.labels[torch.from_numpy(corpus.plan.shards[materials.replica])]
    return Freezer(
        chain,
        optimizer=open_optimizer(named, settings, head=head, head_lr=head_lr),
        reducer=Reducer(world, compression=settings.compression),
        world=world,
        settings=freeze,
        cadence=Cadence.of(freeze, steps_per_epoch=steps, num_epochs=materials.length.epochs, plan=materials.length),
        voter=Voter(samples=len(labels), coverage=coverage(labels.tolist(), len(corpus.train.classes))),
        held=held,
        join=join,
    )
