"""How good a network's features are: the held-out loss of a small head on every block's features of some samples.

A network's own loss on held-out samples does not tell whether fine-tuning pays: it rises in the middle of any tuning,
and falls when the learning rate does. A head that is fitted to the features before and after does.
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
from hvfreeze.heads.features import before_last_layer, every_block, part_of
from hvfreeze.heads.kernel import fit_kernel
from hvfreeze.heads.linear import fit_linear
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, in_precision, state_kept
from hvfreeze.tasks import Task

RENEWED = 256
"""Samples of all ranks, about, whose statistics BatchNorm has while it is probed."""
FEWEST_FITTED, MOST_FITTED, FITTED = 1024, 3332, 1 / 6
"""Samples of all ranks, about, that heads are fitted to, and their share of all between these; half as many judge."""
COMPONENTS = 256
"""Principal components of the features; from so few samples more components tell no more."""
PENALTY = 0.01
"""Of the last layer under which fine-tuning with AdamW begins."""


def seen_by(samples: int) -> tuple[int, int]:
    """Return to how many of so many samples heads are fitted, and how many others judge them."""
    fitted = int(min(MOST_FITTED, max(FEWEST_FITTED, FITTED * samples)))
    return fitted, fitted // 2


class HeldOut(NamedTuple):
    """This replica's samples that tuning leaves out, and their images."""

    images: Inputs
    batches: Sequence[Batch]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Fits heads to the features of some samples, the same ones each time."""

    feed: TrainFeed
    """Without the samples that are held out."""
    images: Images
    """Of those, with `held_out`."""
    held_out: Sequence[Batch]
    seen: tuple[int, int]
    """To how many samples of all ranks heads are fitted, about, and how many held-out ones judge them."""
    task: Task
    pool: int
    tokens: str
    precision: str
    world: World
    learned_from: int | None = None
    """First block whose BatchNorm has learned its statistics from training batches; None where none has."""

    def fit_last_layer(self, chain: Chain) -> None:
        """Fit the model's own last layer, under which tuning begins, to the samples. Collective."""
        seen = self._see(chain)
        held_out = torch.zeros(int((~seen.held).sum()), dtype=torch.bool)
        labels = seen.labels[~seen.held]
        rows = RowsInMemory(seen.last[~seen.held], labels, held_out, weights=self.task.weights_of(labels))
        _, layer = before_last_layer(chain)
        fit = fit_linear(rows, task=self.task, world=self.world, penalties=(PENALTY,))
        assert fit is not None, "nobody stops it"
        take(layer, fit)

    def loss(self, chain: Chain, *, is_tuned: bool) -> float:
        """Return the held-out loss of a kernel head on every block's features. Collective.

        Running statistics of BatchNorm lag behind blocks fine-tuned at a large rate. So BatchNorm then has those of
        some samples; where nothing was fine-tuned, the pretrained ones are better. The model stays as it is.

        Raises:
            NumericsError: a feature is not finite; on all ranks.
        """
        with state_kept(chain.model):
            if is_tuned:
                self._renew_statistics(chain)
            return self._solved(self._see(chain), is_tuned=is_tuned)

    @torch.no_grad()
    def _renew_statistics(self, chain: Chain) -> None:
        """Give BatchNorm the statistics of some samples of all ranks. Collective."""
        known = [] if self.learned_from is None else chain.modules(self.learned_from)
        norms = [module for module in known if isinstance(module, _BatchNorm) and module.running_mean is not None]
        if not norms:
            return
        # BatchNorm cannot learn from one value.
        batches = [batch for batch in self._fitted(RENEWED) if batch.counted > 1]
        seen, momenta = sum(batch.counted for batch in batches), [norm.momentum for norm in norms]
        with in_evaluation(chain.model), in_precision(self.precision):
            for norm in norms if batches else ():
                norm.train()
                norm.reset_running_stats()
                # All batches count alike.
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
            # Where nobody has two samples, they stay as they are.
            if everyones[0] > 0:
                buffer.copy_(everyones[start : start + buffer.numel()] / everyones[0])
            start += buffer.numel()

    def _fitted(self, count: int) -> list[Batch]:
        """Return this replica's part of so many samples, about, that heads are fitted to."""
        return first_of(self.feed.epoch(0), max(1, count // len(self.feed.plan.shards)), rows=self.feed.rows)

    def _solved(self, seen: Seen, *, is_tuned: bool) -> float:
        weights = self.task.weights_of(seen.labels)
        rows = RowsInMemory(seen.every_block, seen.labels, seen.held, seen.samples, weights)
        fit = fit_kernel(
            rows,
            task=self.task,
            components=COMPONENTS,
            trained=is_tuned,
            world=self.world,
            memory_bytes=memory_budget(self.world.local_size),
        )
        assert fit is not None and fit.chosen is not None, "nobody stops it"
        return fit.chosen.held_out_loss

    @torch.no_grad()
    def _see(self, chain: Chain) -> Seen:
        """Return the features of some samples that heads are fitted to, and of some held-out ones."""
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
                    parts.append(part_of(read, number, x))
                for step in steps:
                    x = step(x)
                blocks.append(torch.cat(parts, 1))
                last.append(x.float())
                labels.append(batch.labels)
                samples.append(torch.from_numpy(batch.ids))
                is_held.append(torch.full((batch.counted,), is_held_out))
        return Seen(*map(torch.cat, (blocks, last, labels, is_held, samples)))


class Seen(NamedTuple):
    """Some samples of a rank."""

    every_block: Tensor
    """(N, D): every block's features."""
    last: Tensor
    """(N, K): what the model's last layer takes."""
    labels: Tensor
    held: Tensor
    """(N,) bool: whether it is held out."""
    samples: Tensor
    """(N,) int64: what they are views of, so that no head which judges one view of a sample is fitted to another."""
