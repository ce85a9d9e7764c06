"""A Freezer for a training loop of one's own, built in one call."""

from __future__ import annotations

import torch
from torch import nn

from hvfreeze.chain.watched.calls import Inputs
from hvfreeze.chain.watched.choosing import in_blocks
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World


def freeze_by_vote(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    steps_per_epoch: int,
    num_epochs: int,
    settings: FreezeConfig = FreezeConfig(freeze="gradient-norm"),  # noqa: B008  (frozen)
    blocks: str | None = None,
    example: Inputs | None = None,
) -> Freezer:
    """Return a Freezer for `model` with votes twice an epoch from the end of the first on; `reducer` is part of it.

    For more choice, build `Chain`, `Reducer` and `Freezer` yourself.

    Args:
        model: any module.
        optimizer: any torch optimizer over its parameters.
        world: the ranks that vote.
        steps_per_epoch: optimizer steps of each rank.
        num_epochs: how long training lasts.
        settings: criterion, guards, weights and quorum.
        blocks: where the model may be cut, see `in_blocks`.
        example: a batch of the model's inputs; needed where it is neither a torchvision classifier nor an
            nn.Sequential, unless `blocks` names its blocks.

    Raises:
        UsageError: the settings do not fit the model or the world, or the model is not divided so.
    """
    return Freezer(
        in_blocks(model, blocks=blocks, example=example),
        optimizer=optimizer,
        reducer=Reducer(world),
        world=world,
        settings=settings,
        cadence=Cadence.of(settings, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs),
    )
