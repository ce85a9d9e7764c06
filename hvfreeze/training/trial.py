"""Whether tuning pays: a short one is tried, and a head solved on a part of the samples before and after it.

Tuning begins under a last layer that is solved for the features as they are: under a random one the first gradients are
noise, and would spoil the blocks below. Both solutions are judged by the samples that are held out. What the network
itself says of them does not tell: its loss rises in the middle of any tuning, and falls when the rate does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.comm.resources import memory_budget
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch, TrainFeed, first_of
from hvfreeze.data.decoding import Images
from hvfreeze.heads.features import before_last_layer, every_block, laid_out, pooled
from hvfreeze.heads.kernel import choose_head
from hvfreeze.heads.linear import fit_softmax
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, in_precision, state_kept

TUNED, TRIED, MOST_TRIED = 1280, 40, 4.0
"""A trial tunes on so many samples of all ranks, about, or an epoch of fewer; but it makes at least so many steps,
because blocks learn by steps, unless they were more than so many epochs. On many samples it costs no more than on few.
At auto's own rate for SGD half as many samples and steps tell, where that is no more than an epoch."""
RENEWED = 256
"""Samples of all ranks, about, whose statistics BatchNorm has while a trial is judged."""
MANY = 15_000
"""Samples of which a long tuning may gain what a short trial cannot show."""
FEWEST_FITTED, MOST_FITTED, FITTED = 1024, 3332, 1 / 6
"""Samples of all ranks, about, that heads are solved for, and which part of all they are between these; half as many
judge them. Together no more than `kernel.MOST_COMPARED`, all that a choice looks at. Heads for few samples gain by what
blocks have learned of other samples' labels, as one for all cannot."""
LEAST_WORK = 5e7
"""Floating-point operations of a forward pass; one of fewer takes no less time, because it calls as many operators."""
DIRECTIONS = 256
"""Of the features, in which these samples are compared; from so few samples more tell no more."""
SEEN, SOLVED = 1.2, 1e8
"""What judging takes for each sample that a head is solved for or judged by: forward passes, and floating-point
operations of the forward pass in whose time the head is solved, as measured."""
PENALTY = 0.01
"""Of the last layer under which tuning begins."""
LEAST_GAIN, CHANCE = 0.04, 0.8
"""Part by which the loss of held-out samples falls where tuning pays; of n samples, at least the second over sqrt(n),
which is what chance may do: on 60 samples near tasks gained 3 %, far ones 30 %."""
MUCH_GAIN = 0.15
"""Part by which it falls in a trial where tuning goes on at once, without a solution to go back to: by a third and more
on far tasks, and not at all on near ones."""
FAR = 0.25
"""Part of a guess's loss that is left where blocks have much to learn after a trial that pays at once: then a short
tuning gains more from further steps than from a solution that takes as long."""


def seen_by(samples: int, *, in_haste: bool = False) -> tuple[int, int]:
    """Return for how many of so many samples heads are solved, and how many others judge them; half of them in haste.

    Half still tell near tasks from far ones, whose loss falls by a third and more; what a block gains a little they do
    not.
    """
    fitted = int(min(MOST_FITTED, max(FEWEST_FITTED, FITTED * samples))) // (2 if in_haste else 1)
    return fitted, fitted // 2


def judging(forward: float, *, samples: int, in_haste: bool = False) -> float:
    """Return what judging takes once, in forward passes of so many floating-point operations.

    It is done before a trial, and after it.
    """
    rows = min(samples, sum(seen_by(samples, in_haste=in_haste)))
    # Of few rows, fewer directions.
    return rows * (SEEN + SOLVED * min(1.0, rows / sum(seen_by(0))) / max(forward, LEAST_WORK))


@dataclass
class Trial:
    """Losses on held-out samples of the head that was solved before tuning was tried, and of that after it."""

    before: float | None = None
    after: float | None = None
    """Infinite where tuning came to numbers that are not finite; None where it was not tried."""
    samples: int | None = None
    """That judged; None where that is not known."""
    way: str = ""
    """To tune, in words."""
    guess: float | None = None
    """Loss of one among the classes; None where that is not known."""

    @property
    def pays(self) -> bool:
        """Whether tuning pays."""
        return self._fell_by(max(LEAST_GAIN, CHANCE / math.sqrt(self.samples) if self.samples else 0.0))

    @property
    def pays_at_once(self) -> bool:
        """Whether it pays so much that no head is solved before it."""
        return self._fell_by(MUCH_GAIN)

    @property
    def leaves_much(self) -> bool:
        """Whether blocks have much to learn after it."""
        return self.after is not None and self.guess is not None and self.after > FAR * self.guess

    def _fell_by(self, part: float) -> bool:
        return self.before is not None and self.after is not None and self.after < (1 - part) * self.before

    def line(self, steps: int, follows: str) -> str:
        """Return it in words, with what follows."""
        assert self.before is not None and self.after is not None, "nothing was tried"
        found = f"{self.after:.3f}" if math.isfinite(self.after) else "numbers that are not finite"
        return (
            f"tried: {steps} steps of tuning with {self.way} change the loss of held-out samples from "
            f"{self.before:.3f} to {found}: {follows}"
        )

    def describe(self) -> dict[str, Any]:
        """Return what summary.json says of it."""
        return {"before": self.before, "after": self.after, "samples": self.samples, "way": self.way}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What solves heads on some samples, before and after a trial; the same samples both times."""

    feed: TrainFeed
    """Without the samples that are held out."""
    images: Images
    """Of those, with `held_out`."""
    held_out: Sequence[Batch]
    seen: tuple[int, int]
    """For how many samples of all ranks heads are solved, about, and how many held-out ones judge them."""
    pool: int
    precision: str
    world: World
    learned_from: int | None = None
    """First block whose BatchNorm has learned its statistics from training batches; None where none has."""

    def begin(self, chain: Chain, *, solves_last: bool) -> float:
        """Return `loss`; if `solves_last`, make the model's own last layer a solution for these samples. Collective."""
        seen = self._see(chain)
        if solves_last:
            self._solve_last(chain, seen)
        return self._solved(chain, seen)

    def _solve_last(self, chain: Chain, seen: Seen) -> None:
        rows = RowsInMemory(seen.last[~seen.held], seen.labels[~seen.held], torch.zeros(int((~seen.held).sum())).bool())
        _, layer = before_last_layer(chain)
        fit = fit_softmax(rows, classes=layer.out_features, world=self.world, penalties=(PENALTY,))
        assert fit is not None, "nobody stops it"
        take(layer, fit)

    def loss(self, chain: Chain) -> float:
        """Return the loss on held-out samples of a head that compares samples, on every block's features. Collective.

        Running statistics of BatchNorm lag behind blocks that learn at a large rate, so that heads could be solved for
        features that no batch has: they are those of some samples meanwhile. The model stays as it is.

        Raises:
            NumericsError: a feature is not finite; on all ranks.
        """
        with state_kept(chain.model):
            self._renew_statistics(chain)
            return self._solved(chain, self._see(chain))

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
        """Return this replica's part of so many samples, about, that heads are solved for."""
        return first_of(self.feed.epoch(0), max(1, count // len(self.feed.plan.shards)), rows=self.feed.rows)

    def _solved(self, chain: Chain, seen: Seen) -> float:
        rows = RowsInMemory(seen.every_block, seen.labels, seen.held, seen.samples)
        _, layer = before_last_layer(chain)
        memory = memory_budget(self.world.local_size)
        found = choose_head(
            rows, classes=layer.out_features, directions=DIRECTIONS, world=self.world, memory_bytes=memory
        )
        assert found is not None, "nobody stops it"
        return found.trial.held_out_loss

    @torch.no_grad()
    def _see(self, chain: Chain) -> Seen:
        """Return the features of some samples that heads are solved for, and of some held-out ones."""
        fitted = self._fitted(self.seen[0])
        held = first_of(self.held_out, max(1, self.seen[1] // len(self.feed.plan.shards)), rows=self.feed.rows)
        steps, _ = before_last_layer(chain)
        images, first = self.feed.images, fitted[0]
        read = every_block(chain, pool=self.pool, example=images.load(first.ids[:1], first.views[:1]))
        blocks, last, labels, is_held, samples = [], [], [], [], []
        with in_evaluation(chain.model), in_precision(self.precision):
            for images, batch, is_held_out in [
                *((self.feed.images, batch, False) for batch in fitted),
                *((self.images, batch, True) for batch in held),
            ]:
                x, parts = images.load(batch.ids, batch.views), list[Tensor]()
                for number, block in enumerate(chain.blocks[:-1]):
                    x = block(x)
                    parts.append(pooled(laid_out(read, number, x), self.pool))
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
