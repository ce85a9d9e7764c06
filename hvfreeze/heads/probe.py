"""Probe a network's features: the held-out loss of a small head on the features of all blocks.

The network's own held-out loss does not show whether fine-tuning helps: it rises in the middle of training and falls
with the learning rate. A head fitted to the features before and after does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.resources import memory_budget
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch, TrainFeed, first_of
from hvfreeze.data.decoding import Images, Inputs
from hvfreeze.heads.features import before_last_layer, every_block
from hvfreeze.heads.kernel import fit_kernel
from hvfreeze.heads.linear import fit_linear
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, in_precision, state_kept
from hvfreeze.tasks import Task

RENEWED = 256
"""Approximate number of samples, over all ranks, for BatchNorm's statistics during a probe."""
FEWEST_FITTED, MOST_FITTED, FITTED = 1024, 3332, 1 / 6
"""Minimum and maximum number of samples, over all ranks, that heads are fitted to, and their share of all samples in
between. Half as many samples evaluate."""
COMPONENTS = 256
"""Number of principal components of the features; more do not help with so few samples."""
PENALTY = 0.01
"""Ridge penalty of the last layer at the start of fine-tuning with AdamW."""


def seen_by(samples: int) -> tuple[int, int]:
    """Return the number of samples that heads are fitted to, and the number of evaluating samples."""
    fitted = int(min(MOST_FITTED, max(FEWEST_FITTED, FITTED * samples)))
    return fitted, fitted // 2


class HeldOut(NamedTuple):
    """This replica's held-out samples and their images."""

    images: Inputs
    batches: Sequence[Batch]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A probe that fits heads to the features of a fixed subset of samples."""

    feed: TrainFeed
    """Training samples without the held-out ones."""
    images: Images
    """Images of the training and the held-out samples."""
    held_out: Sequence[Batch]
    seen: tuple[int, int]
    """Approximate number of samples, over all ranks, that heads are fitted to, and that evaluate them."""
    task: Task
    pool: int
    tokens: str
    precision: str
    world: World
    learned_from: int | None = None
    """First block whose BatchNorm statistics come from training batches; None if there is none."""

    def fit_last_layer(self, chain: Chain) -> None:
        """Fit the model's own last layer to the samples, before fine-tuning. Collective."""
        seen = self._see(chain)
        held_out = torch.zeros(int((~seen.held).sum()), dtype=torch.bool)
        labels, samples = seen.labels[~seen.held], seen.samples[~seen.held]
        weights = self.task.weights_of(labels, samples)
        rows = RowsInMemory(seen.last[~seen.held], labels, held_out, samples, weights)
        _, layer = before_last_layer(chain)
        fit = fit_linear(rows, task=self.task, world=self.world, penalties=(PENALTY,))
        assert fit is not None, "a fit without `stop` runs to its end"
        take(layer, fit)

    def loss(self, chain: Chain, *, is_fine_tuned: bool) -> float:
        """Return the held-out loss of a kernel head on the features of all blocks. Collective.

        BatchNorm's running statistics lag behind blocks that are fine-tuned at a large rate, so the probe recomputes
        them after fine-tuning; before it, the pretrained ones are better. The model is unchanged.

        Raises:
            NumericsError: a feature is NaN or Inf; on all ranks.
        """
        with state_kept(chain.model):
            if is_fine_tuned:
                self._renew_statistics(chain)
            return self._solved(self._see(chain), is_fine_tuned=is_fine_tuned)

    @torch.no_grad()
    def _renew_statistics(self, chain: Chain) -> None:
        """Set BatchNorm's statistics to those of a subset of all ranks' samples. Collective."""
        known = [] if self.learned_from is None else chain.modules(self.learned_from)
        norms = [module for module in known if isinstance(module, _BatchNorm) and module.running_mean is not None]
        if not norms:
            return
        # BatchNorm needs more than one value.
        batches = [batch for batch in self._fitted(RENEWED) if batch.counted > 1]
        seen = sum(batch.counted for batch in batches)
        with in_evaluation(chain.model), in_precision(self.precision):
            # Those of frozen blocks stay in evaluation mode.
            norms = [norm for norm in norms if norm.train().training]
            momenta = [norm.momentum for norm in norms]
            for norm in norms if batches else ():
                norm.reset_running_stats()
                # All batches have equal weights.
                norm.momentum = None
            try:
                for batch in batches:
                    images = self.feed.images.load(batch.ids, batch.views)[: batch.counted]
                    chain.run(images, 0, len(chain.blocks) - 1)
            finally:
                for norm, momentum in zip(norms, momenta, strict=True):
                    norm.momentum = momentum
        buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
        flat = torch.cat([torch.tensor([1.0]), *(buffer.float() for buffer in buffers)]) * seen
        everyones = self.world.allreduce_sum(flat, name="trial.statistics")
        start = 1
        for buffer in buffers:
            # If no rank has two samples, the statistics are unchanged.
            if everyones[0] > 0:
                buffer.copy_(everyones[start : start + buffer.numel()] / everyones[0])
            start += buffer.numel()

    def _fitted(self, count: int) -> list[Batch]:
        """Return this replica's share of the `count` samples, approximately, that heads are fitted to."""
        return first_of(self.feed.epoch(0), max(1, count // len(self.feed.plan.shards)), rows=self.feed.rows)

    def _solved(self, seen: Seen, *, is_fine_tuned: bool) -> float:
        weights = self.task.weights_of(seen.labels, seen.samples)
        rows = RowsInMemory(seen.every_block, seen.labels, seen.held, seen.samples, weights)
        fit = fit_kernel(
            rows,
            task=self.task,
            components=COMPONENTS,
            trained=is_fine_tuned,
            world=self.world,
            memory_bytes=memory_budget(self.world.local_size),
        )
        assert fit is not None and fit.chosen is not None, "a fit without `stop` runs to its end"
        return fit.chosen.held_out_loss

    @torch.no_grad()
    def _see(self, chain: Chain) -> Seen:
        """Return the features of a subset of training samples and of held-out samples."""
        fitted = self._fitted(self.seen[0])
        held = first_of(self.held_out, max(1, self.seen[1] // len(self.feed.plan.shards)), rows=self.feed.rows)
        steps, _ = before_last_layer(chain)
        images, first = self.feed.images, fitted[0]
        example = images.load(first.ids[:1], first.views[:1])
        read = every_block(chain, pool=self.pool, example=example, tokens=self.tokens)
        blocks, last, labels, is_held, samples = [], [], [], [], []
        with in_evaluation(chain.model), in_precision(self.precision):
            for images, batch, is_held_out in [
                *((self.feed.images, batch, False) for batch in fitted),
                *((self.images, batch, True) for batch in held),
            ]:
                x, parts = images.load(batch.ids, batch.views), list[Tensor]()
                for number, block in enumerate(chain.blocks[:-1]):
                    x = block(x)
                    parts.append(read.part(number, x))
                for step in steps:
                    x = step(x)
                blocks.append(torch.cat(parts, 1))
                last.append(x.float())
                labels.append(batch.labels)
                samples.append(torch.from_numpy(batch.ids))
                is_held.append(torch.full((batch.counted,), is_held_out))
        return Seen(*map(torch.cat, (blocks, last, labels, is_held, samples)))


class Seen(NamedTuple):
    """The features and labels of a subset of a rank's samples."""

    every_block: Tensor
    """Features of all blocks, (N, D)."""
    last: Tensor
    """Input of the model's last layer, (N, K)."""
    labels: Tensor
    held: Tensor
    """Mask of held-out samples, (N,) bool."""
    samples: Tensor
    """Sample id of each row, (N,) int64, so that its augmented views are evaluated together."""
