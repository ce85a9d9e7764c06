"""Decide whether to train on horizontal flips, once before the recipe, by leave-one-out on a few training samples.

The trial fits a kernel head to features of one forward pass: those of pretrained blocks, else coarse pixels for a
network with random weights. Each sample is left out in turn and predicted by heads fitted to the others, with their
flips and without. Test samples are not used. Flips help if samples are few, so they are disabled only if the loss
without them is lower by more than chance. Measured with 500 samples and 3 to 10 seeds, the ratio of the losses with and
without flips is 0.95 to 1.02 on CIFAR-10, 0.93 to 1.00 on dot counting, 1.05 to 1.15 on rotated images and 1.10 to 1.19
on photographs of signed digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
from hvfreeze.heads.solution import PenaltyTrial
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.tasks import Task

SAMPLES = 500
"""Number of samples over all ranks, few enough for leave-one-out with their flips."""
FEWEST = 8
"""Minimum number of samples for a trial."""
CELLS = 8
"""Cells per side that pixels are averaged to."""
POOL, WIDEST = 2, 32_768
"""Cells per side that each block's map is averaged to, or 1 if that gives more features than the second number."""
Features = Callable[[Tensor], Tensor]
"""Function from model inputs, (B, C, H, W), to features, (B, D)."""


@dataclass(frozen=True)
class FlipTrial:
    """The leave-one-out results of heads fitted with flips and without."""

    loss_with: float
    loss_without: float
    accuracy_with: float
    """Accuracy of heads fitted with flips, 0-1."""
    accuracy_without: float
    samples: int
    """Number of samples of the trial."""

    @property
    def taken(self) -> bool:
        """Whether to train on flips: unless the loss without them is lower by more than chance.

        The relative standard error of a loss of n samples is about 1 / sqrt(n).
        """
        return self.loss_without >= (1 - 1 / math.sqrt(self.samples)) * self.loss_with


@dataclass(frozen=True)
class Finding:
    """The decision on horizontal flips, equal on all ranks."""

    trial: FlipTrial
    seen: str
    """Description of the features."""

    @property
    def flips(self) -> str:
        """Decision as a value of --flips."""
        return "on" if self.trial.taken else "off"

    def line(self) -> str:
        """Return the log line."""
        found = (
            f"(leave-one-out loss of {self.trial.samples} samples, by {self.seen}: {self.trial.loss_with:.3f} with, "
            f"{self.trial.loss_without:.3f} without)"
        )
        if not self.trial.taken:
            return f"horizontal flips: off {found}; use --flips on to train on them"
        return f"horizontal flips: on {found}; {WAY_OUT}"

    def describe(self) -> dict[str, Any]:
        """Return the entry in summary.json."""
        return {**asdict(self.trial), "seen": self.seen, "taken": self.trial.taken}


WAY_OUT = "use --flips off if left and right matter"


def is_open(config: Config, *, flips: bool) -> bool:
    """Return True if the run may train on flips and --flips does not decide it.

    `flips` is the dataset's attribute: whether a flipped image keeps its label.
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
    """Decide on horizontal flips by a trial on training samples; None if there are too few. Collective.

    The model and torch's generator are unchanged.

    Args:
        chain: the model, equal on all ranks.
        feed: all training samples of this replica.
        image_shape: (C, H, W) of the model's input.
        task: task of the head.
        trained: whether the chain has pretrained weights.
        place: this rank's index in its replica; the first rank reads the samples.
        world: all ranks.
    """
    ids = some_samples(feed)
    if ids is None:
        return None
    images = feed.images.shown(MIRRORED, mirrors=True)
    assert isinstance(images, Images), "text has no flips"

    def see() -> tuple[tuple[RowsInMemory, RowsInMemory], str]:
        features, seen = features_of(chain, torch.zeros(1, *image_shape), trained=trained)
        return rows_of(
            features, images, own_samples(feed, ids, place), task, width=features(torch.zeros(1, *image_shape)).shape[1]
        ), seen

    with state_kept(chain.model), in_evaluation(chain.model), torch.no_grad():
        rows, seen = raise_on_all_ranks(world, see, name="mirror")
    found = leave_one_out(rows, task=task, world=world)
    if found is None:
        return None
    with_flips, without = found
    trial = FlipTrial(
        loss_with=with_flips.held_out_loss,
        loss_without=without.held_out_loss,
        accuracy_with=with_flips.held_out_accuracy,
        accuracy_without=without.held_out_accuracy,
        samples=len(ids),
    )
    return Finding(trial, seen)


def some_samples(feed: TrainFeed) -> Ids | None:
    """Return at most `SAMPLES` stratified training samples of all ranks; None if there are too few."""
    ids = np.unique(np.concatenate(feed.plan.shards))
    strata = feed.strata
    present = len(np.unique(strata[ids]))
    if present < 2 or len(ids) < FEWEST:
        return None
    if len(ids) > SAMPLES:
        some = slice(None, None, -(-len(ids) // SAMPLES))
        ids = ids[stratified_subset(strata[ids], SAMPLES, seed=feed.plan.seed) if present <= SAMPLES else some]
    return ids


def own_samples(feed: TrainFeed, ids: Ids, place: int) -> Ids:
    """Return the samples of `ids` that this rank reads: the first rank of a replica reads those of its replica."""
    return ids[np.isin(ids, feed.plan.owned(feed.replica))] if place == 0 else ids[:0]


def leave_one_out(forms: Sequence[RowsInMemory], *, task: Task, world: World) -> list[PenaltyTrial] | None:
    """Return the results of a kernel head for each form of the rows; None if a feature is NaN or Inf. Collective."""
    found = []
    for rows in forms:
        try:
            fit = fit_kernel(rows, task=task, world=world, memory_bytes=0)
        except NumericsError:
            # On all ranks; training reports the reason.
            return None
        assert fit is not None and fit.chosen is not None, "a fit without `watch` runs to its end"
        found.append(fit.chosen)
    return found


def features_of(chain: Chain, example: Tensor, *, trained: bool) -> tuple[Features, str]:
    """Return the function from images like `example`, (1, C, H, W), to features, and its description."""
    if trained:
        # A model whose maps have an ambiguous layout is treated like one with random weights.
        with suppress(UsageError):
            blocks = every_block(chain, pool=POOL, example=example)
            wide = blocks(example).shape[1] > WIDEST
            return (every_block(chain, pool=1, example=example) if wide else blocks), "the network's blocks"
    return coarse_pixels, f"pixels averaged to {CELLS} x {CELLS}"


def coarse_pixels(images: Tensor) -> Tensor:
    """Average images, (B, C, H, W), to `CELLS` x `CELLS` cells and flatten them to (B, D)."""
    return functional.adaptive_avg_pool2d(images, (CELLS, CELLS)).flatten(1)


def rows_of(
    features: Features, images: Images, own: Ids, task: Task, *, width: int
) -> tuple[RowsInMemory, RowsInMemory]:
    """Return rows of the samples `own`, `width` wide, with flips and without; there may be no rows.

    Original images are held out, in turn if rows are few.
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
        task.weights_of(labels, samples),
    )
    return RowsInMemory(*columns), RowsInMemory(*(column[:count] for column in columns))
