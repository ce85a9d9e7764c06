"""Whether horizontal flips are shown: found out once, on a few training samples, before the recipe.

A kernel head is fitted to features that cost one forward pass: of blocks with trained weights, else of coarse pixels,
of which a network that starts at random would learn nothing else so early. Each sample is left out in turn, and judged
as it is by heads that are fitted to the others, with their flips and without. No test sample takes part. Flips help
against too few samples, so they are left out only where the loss without them is lower by more than chance. Measured
with 500 samples and 3 to 10 seeds, the loss with flips over that without is 0.95 to 1.02 on CIFAR-10 and 0.93 to 1.00
on dots to count, 1.05 to 1.15 on rotated images and 1.10 to 1.19 on photographs of signed digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import TrainFeed, announce, padded_batches
from hvfreeze.data.decoding import Images
from hvfreeze.data.shards import Ids, stratified_subset
from hvfreeze.data.views import MIRRORED
from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.heads.features import every_block
from hvfreeze.heads.kernel import fit_kernel
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.tasks import Task

SAMPLES = 500
"""Of all ranks, and as many flips: few enough for each to be left out in turn and to judge."""
FEWEST = 8
"""Samples, of which fewer tell nothing."""
CELLS = 8
"""A side, that pixels are averaged to."""
POOL, WIDEST = 2, 32_768
"""Cells a side that each block's map is averaged to, 1 where all blocks together have more features than the latter."""
Features = Callable[[Tensor], Tensor]
"""(B, C, H, W) images, as a model sees them -> (B, D)."""


@dataclass(frozen=True)
class FlipTrial:
    """What samples as they are say of heads that were fitted to the others, with these ones' flips and without."""

    loss_with: float
    loss_without: float
    accuracy_with: float
    """0 to 1."""
    accuracy_without: float
    samples: int
    """By which this was judged."""

    @property
    def taken(self) -> bool:
        """Whether flips are shown: unless the loss without them is lower by more than chance.

        Losses of n samples are known to about 1 / sqrt(n) of themselves.
        """
        return self.loss_without >= (1 - 1 / math.sqrt(self.samples)) * self.loss_with


@dataclass(frozen=True)
class Finding:
    """What samples say of horizontal flips, equal on all ranks."""

    trial: FlipTrial
    seen: str
    """What the heads were fitted to, in words."""

    @property
    def flips(self) -> str:
        """As --flips would say it."""
        return "on" if self.trial.taken else "off"

    def line(self) -> str:
        """Return it in words."""
        found = (
            f"(leave-one-out loss of {self.trial.samples} samples, by {self.seen}: {self.trial.loss_with:.3f} with, "
            f"{self.trial.loss_without:.3f} without)"
        )
        if not self.trial.taken:
            return f"horizontal flips: off {found}; use --flips on to train on them"
        return f"horizontal flips: on {found}; {WAY_OUT}"

    def describe(self) -> dict[str, Any]:
        """Return what summary.json says of it."""
        return {**asdict(self.trial), "seen": self.seen, "taken": self.trial.taken}


WAY_OUT = "use --flips off if left and right matter"


def is_open(config: Config, *, flips: bool) -> bool:
    """Tell whether the run may show flips, and --flips leaves that open.

    `flips` is the data set's word that a flipped image shows the same class.
    """
    shows = config.head.solved or config.data.augment != "none"
    return config.data.flips == "auto" and config.data.mirrors(flips) and shows


def find_out(
    chain: Chain,
    feed: TrainFeed,
    image_shape: tuple[int, ...],
    *,
    task: Task,
    trained: bool,
    place: int,
    world: World,
) -> Finding | None:
    """Return what training samples say of horizontal flips, None where there are too few. Collective.

    Neither the model nor torch's generator changes.

    Args:
        chain: the model, equal on all ranks.
        feed: all of this replica's training samples.
        image_shape: (C, H, W) of the images that the model sees.
        task: what a head answers.
        trained: whether the chain's weights were trained before.
        place: of this rank in its replica, of which the first one reads the samples.
        world: all ranks.
    """
    ids = some_samples(feed)
    if ids is None:
        return None
    images = feed.images.shown(MIRRORED, mirrors=True)
    assert isinstance(images, Images), "a text has no mirror images"

    def see() -> tuple[tuple[RowsInMemory, RowsInMemory], str]:
        features, seen = features_of(chain, torch.zeros(1, *image_shape), trained=trained)
        # Of a replica one rank reads the samples that it alone has.
        own = ids[np.isin(ids, feed.plan.owned(feed.replica))] if place == 0 else ids[:0]
        return rows_of(features, images, own, task, width=features(torch.zeros(1, *image_shape)).shape[1]), seen

    with state_kept(chain.model), in_evaluation(chain.model), torch.no_grad():
        rows, seen = raise_on_all_ranks(world, see, name="mirror")
    fit = partial(fit_kernel, task=task, world=world, memory_bytes=0)
    try:
        fits = [fit(each) for each in rows]
    except NumericsError:
        # On all ranks; training says what is wrong.
        return None
    with_flips, without = (None if found is None else found.chosen for found in fits)
    assert with_flips is not None and without is not None, "nobody stops them"
    trial = FlipTrial(
        loss_with=with_flips.held_out_loss,
        loss_without=without.held_out_loss,
        accuracy_with=with_flips.held_out_accuracy,
        accuracy_without=without.held_out_accuracy,
        samples=len(ids),
    )
    return Finding(trial, seen)


def some_samples(feed: TrainFeed) -> Ids | None:
    """Return at most `SAMPLES` training samples of all ranks, stratified; None where there are too few."""
    ids = np.unique(np.concatenate(feed.plan.shards))
    strata = feed.strata
    present = len(np.unique(strata[ids]))
    if present < 2 or len(ids) < FEWEST:
        return None
    if len(ids) > SAMPLES:
        some = slice(None, None, -(-len(ids) // SAMPLES))
        ids = ids[stratified_subset(strata[ids], SAMPLES, seed=feed.plan.seed) if present <= SAMPLES else some]
    return ids


def features_of(chain: Chain, example: Tensor, *, trained: bool) -> tuple[Features, str]:
    """Return what makes features of images such as `example`, (1, C, H, W), and what they are in words."""
    if trained:
        # A model whose maps cannot be understood is judged as one without trained weights.
        with suppress(UsageError):
            blocks = every_block(chain, pool=POOL, example=example)
            wide = blocks(example).shape[1] > WIDEST
            return (every_block(chain, pool=1, example=example) if wide else blocks), "the network's blocks"
    return coarse_pixels, f"their pixels, averaged to {CELLS} x {CELLS}"


def coarse_pixels(images: Tensor) -> Tensor:
    """Return (B, D) of images, (B, C, H, W): the means of `CELLS` x `CELLS` parts."""
    return functional.adaptive_avg_pool2d(images, (CELLS, CELLS)).flatten(1)


def rows_of(
    features: Features, images: Images, own: Ids, task: Task, *, width: int
) -> tuple[RowsInMemory, RowsInMemory]:
    """Return rows, `width` wide, of the samples `own` with their flips, and without; there may be none.

    Those that are no flips are held out: in turn, where rows are few.
    """
    batches = [batch for view in (0, 1) for batch in padded_batches(own, images.labels_of, 50, view=view)]
    announce(images, batches)
    found = [features(images.load(batch.ids, batch.views))[: batch.counted] for batch in batches]
    samples, count = torch.from_numpy(np.concatenate([own, own])), len(own)
    labels = images.labels[samples]
    columns = (
        torch.cat([torch.zeros(0, width), *found]),
        labels,
        torch.arange(2 * count) < count,
        samples,
        task.weights_of(labels),
    )
    return RowsInMemory(*columns), RowsInMemory(*(column[:count] for column in columns))
