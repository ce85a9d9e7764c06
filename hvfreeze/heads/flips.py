"""Whether horizontal flips are shown: found out once, on a few training samples, before the recipe.

A kernel head is fitted to features that cost one forward pass: of blocks with trained weights, else of coarse pixels,
of which a network that starts at random would learn nothing else so early. Each sample is left out in turn, and judged
as it is by heads that are fitted to the others, with their flips and without. No test sample takes part. Flips help
against too few samples, so they are left out only where they cost right answers by more than chance.
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
from hvfreeze.heads.tasks import Classes
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, state_kept

SAMPLES = 500
"""Of all ranks, and as many flips: few enough for each to be left out in turn and to judge."""
FEWEST = 8
"""Samples, of which fewer tell nothing."""
CELLS = 8
"""A side, that pixels are averaged to."""
POOL, WIDEST = 2, 32_768
"""Cells a side that each block's map is averaged to, 1 where all blocks together have more features than the latter."""
SURE = 2.0
"""Standard errors of a part of the samples that are more than chance."""

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
    def has_lower_loss(self) -> bool:
        """Whether the loss without flips is not lower by more than chance.

        Losses of n samples are known to about 1 / sqrt(n) of themselves.
        """
        return self.loss_without >= (1 - 1 / math.sqrt(self.samples)) * self.loss_with


@dataclass(frozen=True)
class Finding:
    """What samples say of horizontal flips, equal on all ranks."""

    trial: FlipTrial
    seen: str
    """What the heads were fitted to, in words."""
    guessed: float
    """Part of the samples that the most frequent class has."""

    @property
    def taken(self) -> bool:
        """Whether flips are shown: unless they cost right answers, and the loss too is higher for them."""
        cost = self.trial.accuracy_without - self.trial.accuracy_with
        mean = (self.trial.accuracy_with + self.trial.accuracy_without) / 2
        return self.trial.has_lower_loss or cost <= self._chance(mean)

    @property
    def mirror(self) -> str:
        """As --mirror would say it."""
        return "on" if self.taken else "off"

    @property
    def tells(self) -> bool:
        """Whether some head does better than to guess."""
        best = max(self.trial.accuracy_with, self.trial.accuracy_without)
        return best > self.guessed + self._chance(self.guessed)

    def line(self) -> str:
        """Return it in words."""
        ours, theirs = 100 * self.trial.accuracy_with, 100 * self.trial.accuracy_without
        found = (
            f"(leave-one-out accuracy on {self.trial.samples} samples, by {self.seen}: {ours:.1f} % with, "
            f"{theirs:.1f} % without)"
        )
        if not self.taken:
            return f"horizontal flips: off {found}; use --mirror on to train on them"
        if not self.tells:
            return f"horizontal flips: on {found}, no better than a guess; {WAY_OUT}"
        return f"horizontal flips: on {found}; {WAY_OUT}"

    def describe(self) -> dict[str, Any]:
        """Return what summary.json says of it."""
        return {**asdict(self.trial), "seen": self.seen, "taken": self.taken}

    def _chance(self, part: float) -> float:
        return SURE * math.sqrt(part * (1 - part) / self.trial.samples)


WAY_OUT = "use --mirror off if left and right matter"


def is_open(config: Config, *, flips: bool) -> bool:
    """Tell whether the run may show flips, and --mirror leaves that open.

    `flips` is the data set's word that a flipped image shows the same class.
    """
    shows = config.head.solved or config.data.augment != "none"
    return config.data.mirror == "auto" and config.data.mirrors(flips) and shows


def find_out(
    chain: Chain, feed: TrainFeed, image_shape: tuple[int, ...], *, trained: bool, place: int, world: World
) -> Finding | None:
    """Return what training samples say of horizontal flips, None where there are too few. Collective.

    Neither the model nor torch's generator changes.

    Args:
        chain: the model, equal on all ranks.
        feed: all of this replica's training samples.
        image_shape: (C, H, W) of the images that the model sees.
        trained: whether the chain's weights were trained before.
        place: of this rank in its replica, of which the first one reads the samples.
        world: all ranks.
    """
    ids = np.unique(np.concatenate(feed.plan.shards))
    labels = feed.labels.numpy()
    classes = len(np.unique(labels[ids]))
    if classes < 2 or len(ids) < FEWEST:
        return None
    if len(ids) > SAMPLES:
        some = slice(None, None, -(-len(ids) // SAMPLES))
        ids = ids[stratified_subset(labels[ids], SAMPLES, seed=feed.plan.seed) if classes <= SAMPLES else some]
    images = feed.images.shown(MIRRORED, mirrors=True)
    assert isinstance(images, Images), "a text has no mirror images"

    def see() -> tuple[tuple[RowsInMemory, RowsInMemory], str]:
        features, seen = features_of(chain, torch.zeros(1, *image_shape), trained=trained)
        # Of a replica one rank reads the samples that it alone has.
        own = ids[np.isin(ids, feed.plan.owned(feed.replica))] if place == 0 else ids[:0]
        return rows_of(features, images, own, width=features(torch.zeros(1, *image_shape)).shape[1]), seen

    with state_kept(chain.model), in_evaluation(chain.model), torch.no_grad():
        rows, seen = raise_on_all_ranks(world, see, name="mirror")
    fit = partial(fit_kernel, task=Classes(int(labels.max()) + 1), world=world, memory_bytes=0)
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
    return Finding(trial, seen, float(np.bincount(labels[ids]).max() / len(ids)))


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


def rows_of(features: Features, images: Images, own: Ids, *, width: int) -> tuple[RowsInMemory, RowsInMemory]:
    """Return rows, `width` wide, of the samples `own` with their flips, and without; there may be none.

    Those that are no flips are held out: in turn, where rows are few.
    """
    batches = [batch for view in (0, 1) for batch in padded_batches(own, images.labels_of, 50, view=view)]
    announce(images, batches)
    found = [features(images.load(batch.ids, batch.views))[: batch.counted] for batch in batches]
    samples, count = torch.from_numpy(np.concatenate([own, own])), len(own)
    columns = torch.cat([torch.zeros(0, width), *found]), images.labels[samples], torch.arange(2 * count) < count
    plain = (column[:count] for column in (*columns, samples))
    return RowsInMemory(*columns, samples), RowsInMemory(*plain)
