"""Logs every rank's observations between two votes of a training: the evidence for a replay of all voting rules.

The ranks of a job take turns in one process. Each computes the gradient of its own batch; their average moves the one
model. That is what data parallelism computes, without what it costs to start and to wait for ranks. Shards, estimates
and what freezing means are the program's own.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.sweeps.kept import commit
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import SoloWorld
from hvfreeze.data.data_sets import ImageSet, open_data
from hvfreeze.data.shards import ShardPlan, plan_shards
from hvfreeze.freezing.coherence import Coherence, gap
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.freezing.gradients import GradientSums, Observations
from hvfreeze.freezing.vote import coverage
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import work_of
from hvfreeze.runs.environment import facts_of_this_rank
from hvfreeze.runs.reading import Move

RANKS = 4
LAST = RANKS - 1
"""The rank whose data are spoilt, or few."""
BATCH, STEPS, INTERVAL, WARMUP = 40, 432, 8, 16
"""Samples of a rank and step; steps of a run; steps between votes; steps before the first."""
LR = 0.005
KNOWN, KNOWN_STEPS, KNOWN_BATCH, KNOWN_LR = (0, 1, 2, 3, 4), 300, 64, 0.05
"""Digits that the network is trained on beforehand, and for how long."""
CLASSES = 10
SIDE = 8
SHIFT = 1
"""Pixels by which images are shifted at most."""
DIGITS = 4
"""Significant digits of logged numbers, without trailing zeros."""


@dataclass(frozen=True)
class Skew:
    """How the ranks' data differ."""

    words: str
    partition: str = "iid"
    shard_sizes: str = "equal"
    spoilt: str = ""
    """The defect of the last rank's data: `labels`, `noise`, or ""."""


SKEWS = {
    "iid": Skew("alike"),
    "dirichlet1": Skew("label skew, Dirichlet(1)", partition="dirichlet:1"),
    "dirichlet0.1": Skew("label skew, Dirichlet(0.1)", partition="dirichlet:0.1"),
    "sizes": Skew("shards of sizes 3,1,1,1", shard_sizes="3,1,1,1"),
    "tenth": Skew("one rank with a tenth of the others' samples", shard_sizes="10,10,10,1"),
    "labels": Skew("one rank with wrong labels", spoilt="labels"),
    "noise": Skew("one rank with noise for images", spoilt="noise"),
}


class Interval(TypedDict):
    """The observations between two votes, for the vote at their end."""

    step: int
    losses: list[float]
    """Mean loss of each rank."""
    signals: list[float]
    """Signal-to-noise ratio of each rank's gradients."""
    norms: list[list[float]]
    """Norm of the summed gradient per block, of each rank and of averaged gradients."""
    gains: list[list[list[float]]]
    """Gain of a step per rank, sampled step and block; see `Coherence`."""
    gained: list[float]
    """Mean gain of each block and of the head, from products of the honest ranks' averages of two consecutive steps.

    These are free of the skew that makes single ranks' gradients disagree.
    """


class Log(TypedDict):
    """A run: how its data differ, what weights depend on, and what was observed."""

    skew: str
    seed: int
    samples: list[int]
    coverage: list[float]
    work: list[int]
    """Floating-point operations of each block's forward pass."""
    accuracy: float
    intervals: list[Interval]
    cuts: list[int]
    """The cut after each interval; all 0 where nothing freezes."""
    commit: str
    processor: str


def network() -> Chain:
    """Return four convolutions with BatchNorm and a linear head, 10,000 parameters, as a chain of five blocks."""

    def block(channels: int, width: int, stride: int) -> nn.Module:
        norm = nn.BatchNorm2d(width)
        # All ranks pass before the model moves: together they count as one pass does by default.
        norm.momentum = 0.1 / RANKS
        return nn.Sequential(nn.Conv2d(channels, width, 3, stride, 1, bias=False), norm, nn.ReLU())

    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * (SIDE // 4) ** 2, CLASSES))
    parts = {"conv1": block(3, 8, 1), "conv2": block(8, 16, 2), "conv3": block(16, 16, 1), "conv4": block(16, 32, 2)}
    model = nn.Sequential(OrderedDict({**parts, "head": head}))
    return Chain.from_modules(model, list(model.named_children()))


@functools.cache
def known() -> dict[str, Tensor]:
    """Return the weights of a network that knows half of the digits, without its head; always the same."""
    torch.manual_seed(0)
    chain, generator = network(), torch.Generator().manual_seed(0)
    images, digits = tensors(open_data("digits", image_size=SIDE).train)
    images, labels = images[torch.isin(digits, torch.tensor(KNOWN))], digits[torch.isin(digits, torch.tensor(KNOWN))]
    labels = torch.searchsorted(torch.tensor(KNOWN), labels)
    optimizer = sgd(chain, KNOWN_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, KNOWN_STEPS)
    for _ in range(KNOWN_STEPS):
        rows = torch.randint(0, len(images), (KNOWN_BATCH,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(chain(shifted(images[rows], generator)), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    return {name: tensor for name, tensor in chain.model.state_dict().items() if not name.startswith("head")}


def sgd(chain: Chain, lr: float) -> torch.optim.SGD:
    """Return the optimizer of all parameters, as `hvfreeze train` has it by default."""
    return torch.optim.SGD(chain.model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True)
class Shards:
    """Every rank's samples, as it sees them."""

    plan: ShardPlan
    images: Tensor
    """(N, 3, H, W), normalised."""
    labels: Tensor
    honest: tuple[int, ...]
    """The ranks whose data are what they should be."""
    orders: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Batches of samples per epoch and rank."""

    @classmethod
    def of(cls, skew: Skew, seed: int) -> Shards:
        """Return the digits of all ranks; one seed divides and spoils them alike in every run."""
        train = open_data("digits", image_size=SIDE).train
        images, labels = tensors(train)
        plan = plan_shards(
            labels.numpy(),
            train.ids,
            size=RANKS,
            batch_size=BATCH,
            seed=seed,
            partition=skew.partition,
            shard_sizes=skew.shard_sizes,
        )
        own = torch.from_numpy(plan.shards[LAST])
        generator = torch.Generator().manual_seed(seed)
        if skew.spoilt == "labels":
            labels[own] = labels[own[torch.randperm(len(own), generator=generator)]]
        if skew.spoilt == "noise":
            images[own] = torch.randn(images[own].shape, generator=generator)
        return cls(plan, images, labels, tuple(rank for rank in range(RANKS) if not (skew.spoilt and rank == LAST)))

    def batch(self, step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a rank's images, shifted at random, and labels."""
        epoch, place = divmod(step, self.plan.batches_per_epoch)
        if place == 0 or (epoch, rank) not in self.orders:
            self.orders[epoch, rank] = torch.from_numpy(self.plan.epoch_order(epoch, rank))
        ids = self.orders[epoch, rank][place]
        return shifted(self.images[ids], generator), self.labels[ids]


def tensors(split: ImageSet) -> tuple[Tensor, Tensor]:
    """Return a split's normalised images and its labels."""
    pixels = torch.from_numpy(np.stack([split.decode(row) for row in range(len(split))])).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (split.mean, split.std))
    return (pixels - mean) / std, split.labels.clone()


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image moved by up to `SHIFT` pixels each way."""
    count, _, height, width = images.shape
    padded = functional.pad(images, [SHIFT] * 4, value=float(images.min()))
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    every = torch.arange(count)
    return padded[every[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Ranks:
    """Observations of each rank, of the averages, and of the unspoilt ranks together."""

    def __init__(self, prefix: FrozenPrefix, optimizer: torch.optim.Optimizer, honest: Sequence[int]) -> None:
        self.prefix, self.optimizer, self.honest = prefix, optimizer, honest
        world = SoloWorld()
        world.size = RANKS
        self.coherent = [Coherence(prefix, optimizer, Reducer(world), every=gap(INTERVAL)) for _ in range(RANKS)]
        """Coherence of each rank."""
        self.seen = [
            Observations(GradientSums(prefix, step_norms=True), source) for source in ["local"] * RANKS + ["averaged"]
        ]
        """Observations of each rank, and of averaged gradients."""
        self.agreed: list[list[float]] = []
        """Gains of each block in the interval, by honest ranks."""
        self.held: list[Tensor] | None = None
        """The honest ranks' averages in the step before, where it was sampled."""

    def follow(self) -> None:
        """Start again at a cut."""
        for each in self.coherent:
            each.reducer.carry(self.prefix.carried())
            each.follow()
        for seen in self.seen:
            seen.forget()

    def observe(self, gradients: Sequence[Sequence[Tensor]], losses: Sequence[float]) -> None:
        """Look at a step's own gradients, by rank and parameter, with the averages in place."""
        carried = self.prefix.carried()
        for rank, each in enumerate(self.coherent):
            for slot, gradient in enumerate(gradients[rank]):
                self.seen[rank].sums.add(slot, gradient)
                each.observe(slot, gradient)
            each.compare()
            self.seen[rank].add_step(losses[rank], lambda: carried)
        self.seen[RANKS].add_step(sum(losses) / RANKS, lambda: carried)
        self._judge(gradients)
        for each in self.coherent:
            each.end_step()

    def _judge(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Hold the honest ranks' averages in a sampled step, and multiply them with those of the next."""
        averages = [torch.stack(own).mean(0) for own in zip(*(gradients[rank] for rank in self.honest))]
        if self.held is None:
            self.held = averages if self.coherent[0].steps % self.coherent[0].every == 0 else None
            return
        row = [0.0] * len(self.prefix.chain.blocks)
        rate, pairs_left = self.optimizer.param_groups[0]["lr"], iter(zip(self.held, averages, strict=True))
        for block in range(self.prefix.cut, len(row)):
            for _ in self.prefix.trained(block, block + 1):
                before, now = next(pairs_left)
                row[block] += rate * float(torch.dot(before.reshape(-1), now.reshape(-1)))
        self.agreed.append(row)
        self.held = None

    def end_interval(self, step: int) -> Interval:
        """Return what the interval has shown, and begin another."""
        for seen in self.seen:
            seen.end_interval()
        found = Interval(
            step=step,
            losses=[rounded(seen.mean_loss) for seen in self.seen[:RANKS]],
            signals=[rounded(seen.sums.signal_to_noise()) for seen in self.seen[:RANKS]],
            norms=[list(map(rounded, seen.norms[-1])) for seen in self.seen],
            gains=[[list(map(rounded, row)) for row in each.latest] for each in self.coherent],
            gained=[rounded(sum(column) / len(self.agreed)) for column in zip(*self.agreed)],
        )
        for each in self.coherent:
            each.end_interval()
            each.restart()
        for seen in self.seen:
            seen.begin_interval()
        self.agreed, self.held = [], None
        return found


def rounded(value: float) -> float:
    """Return a number as it is logged."""
    return float(f"{value:.{DIGITS}g}")


def keep_all(interval: Interval) -> int:
    """Freeze nothing."""
    return 0


def trained(skew: str, seed: int, decide: Callable[[Interval], int] = keep_all) -> Log:
    """Return the log of a run whose cut `decide` chooses at the end of every interval. The cut never decreases."""
    shards, chain = seeded(skew, seed)
    optimizer = sgd(chain, LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    prefix = FrozenPrefix(chain, optimizer)
    ranks = Ranks(prefix, optimizer, shards.honest)
    prefix.on_move(ranks.follow)
    prefix.move(Move(0, 0, 0))
    generator = torch.Generator().manual_seed(seed)
    intervals: list[Interval] = []
    cuts: list[int] = []
    chain.model.train()
    for step in range(1, STEPS + 1):
        gradients, losses = gradients_of(prefix, shards, step - 1, generator)
        ranks.observe(gradients, losses)
        optimizer.step()
        schedule.step()
        if step % INTERVAL or step == STEPS:
            continue
        intervals.append(ranks.end_interval(step))
        cuts.append(decide(intervals[-1]))
        if cuts[-1] > prefix.cut:
            prefix.move(Move(0, step, cuts[-1]))
    labels = [shards.labels[torch.from_numpy(shard)].tolist() for shard in shards.plan.shards]
    return Log(
        skew=skew,
        seed=seed,
        samples=[len(own) for own in labels],
        coverage=[round(coverage(own, CLASSES), 3) for own in labels],
        work=work_of(chain, shards.images[:1]),
        accuracy=accuracy(chain),
        intervals=intervals,
        cuts=cuts,
        commit=commit(),
        processor=facts_of_this_rank()["processor"],
    )


def seeded(skew: str, seed: int) -> tuple[Shards, Chain]:
    """Return a run's data and its network, the same for equal arguments."""
    weights = known()
    torch.manual_seed(seed)
    chain = network()
    chain.model.load_state_dict(weights, strict=False)
    return Shards.of(SKEWS[skew], seed), chain


def gradients_of(
    prefix: FrozenPrefix, shards: Shards, step: int, generator: torch.Generator
) -> tuple[list[list[Tensor]], list[float]]:
    """Return each rank's gradients of what trains, and its loss; leave the averages in place."""
    carried = [parameter for _, parameter in prefix.carried()]
    gradients, losses = [], []
    for rank in range(RANKS):
        images, labels = shards.batch(step, rank, generator)
        loss = functional.cross_entropy(prefix.chain(images), labels)
        gradients.append(list(torch.autograd.grad(loss, carried)))
        losses.append(loss.item())
    for parameter, *own in zip(carried, *gradients):
        parameter.grad = torch.stack(own).mean(0)
    return gradients, losses


def accuracy(chain: Chain) -> float:
    """Return the part of the test images that is classified right."""
    images, labels = tensors(open_data("digits", image_size=SIDE).test)
    chain.model.eval()
    with torch.inference_mode():
        return round(float((chain(images).argmax(1) == labels).double().mean()), 5)
