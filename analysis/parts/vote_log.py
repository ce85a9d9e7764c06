"""What every rank knows at every vote of a training: the evidence on which all rules of voting are held.

The ranks of a job take turns in one process. Each computes the gradient of its own batch; their average moves the one
model. That is what data parallelism computes, without what it costs to start and to wait for ranks. Shards, estimates
and what freezing means are the program's own.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.sweeps.kept import commit
from hvfreeze.comm.reducer import Reducer
from hvfreeze.data.data_sets import ImageSet, open_data
from hvfreeze.data.shards import ShardPlan, plan_shards
from hvfreeze.freezing.coherence import Coherence, Gains, gap, share_gained
from hvfreeze.freezing.criteria import Evidence, rates_of_change
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
THOUSANDTHS, MILLIONTHS, MOST = 1_000, 1_000_000, 99_999
"""Numbers are logged as whole thousandths, at most so many; those of which small differences decide as millionths."""


@dataclass(frozen=True)
class Skew:
    """How the ranks' data differ."""

    words: str
    partition: str = "iid"
    shard_sizes: str = "equal"
    spoilt: str = ""
    """What is wrong with the last rank's data: `labels`, `noise`, or nothing."""


SKEWS = {
    "iid": Skew("alike"),
    "dirichlet1": Skew("label skew, Dirichlet(1)", partition="dirichlet:1"),
    "dirichlet0.1": Skew("label skew, Dirichlet(0.1)", partition="dirichlet:0.1"),
    "sizes": Skew("shards of sizes 3,1,1,1", shard_sizes="3,1,1,1"),
    "tenth": Skew("one rank with a tenth of the others' samples", shard_sizes="10,10,10,1"),
    "labels": Skew("one rank with wrong labels", spoilt="labels"),
    "noise": Skew("one rank with noise for images", spoilt="noise"),
}


class Vote(TypedDict):
    """One vote's evidence, None where unknown; the last of `RANKS` + 1 rows is of averages.

    Numbers are thousandths; `signals` and `etas` are millionths.
    """

    step: int
    losses: list[int]
    """Of each rank, the mean of the interval."""
    signals: list[int]
    """Of each rank, the signal-to-noise ratio of its gradients in the interval."""
    etas: list[list[int | None]]
    """Of each row and block, the rate of change of the gradient's norm."""
    learned: list[list[int]]
    """Of each row and block, its gain now over that at its best."""
    bounds: list[list[int | None]]
    """Of each row and pair of cuts c < k, in the order of `pairs`: what blocks c..k-1 gain at most for their time, as
    part of what all blocks from c on gain for theirs."""
    gained: list[float]
    """Of each block, the head too: its mean gain in the interval, by products of the honest ranks' averages of two
    steps in a row. These know of no skew, which makes ranks' own gradients contradict each other."""


class Log(TypedDict):
    """A run: how its data differ, what weights depend on, and its votes."""

    skew: str
    seed: int
    samples: list[int]
    coverage: list[float]
    work: list[int]
    """Floating-point operations of each block's forward pass."""
    accuracy: float
    votes: list[Vote]
    cuts: list[int]
    """The cut after each vote; all 0 where nothing freezes."""
    commit: str
    processor: str


def pairs(num_blocks: int) -> list[tuple[int, int]]:
    """Return all pairs of cuts c < k."""
    return [(c, k) for c in range(num_blocks - 1) for k in range(c + 1, num_blocks)]


def network() -> Chain:
    """Return four convolutions with BatchNorm and a linear head, 10 000 parameters, as a chain of five blocks."""

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
    """Of each epoch and rank, the samples of its batches."""

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


@dataclass
class Ranks:
    """What each rank has observed, what the averages show, and what honest ranks agree on."""

    prefix: FrozenPrefix
    optimizer: torch.optim.Optimizer
    honest: Sequence[int]
    coherent: list[Coherence] = field(init=False)
    """Of each rank, and of the mean of their estimates."""
    seen: list[Observations] = field(init=False)
    """Of each rank, and of averaged gradients."""
    agreed: list[list[float]] = field(default_factory=list)
    """Gains of each block in the interval, by honest ranks."""
    held: list[Tensor] | None = None
    """The honest ranks' averages in the step before, where it was sampled."""

    def __post_init__(self) -> None:
        # What Coherence asks of a reducer; the averages are in place when it looks.
        reducer = SimpleNamespace(
            world=SimpleNamespace(size=RANKS), compression="none", carried=[], average_of=lambda gradient: gradient
        )
        self.coherent = [
            Coherence(self.prefix, self.optimizer, cast(Reducer, reducer), every=gap(INTERVAL))
            for _ in range(RANKS + 1)
        ]
        self.seen = [
            Observations(GradientSums(self.prefix, step_norms=True), source)
            for source in ["local"] * RANKS + ["averaged"]
        ]

    def follow(self) -> None:
        """Begin anew at a cut."""
        carried = self.prefix.carried()
        for each, seen in zip(self.coherent, self.seen, strict=True):
            each.reducer.carried = carried
            each.follow()
            seen.forget()

    def observe(self, gradients: Sequence[Sequence[Tensor]], losses: Sequence[float]) -> None:
        """Look at a step's own gradients, by rank and parameter, with the averages in place."""
        carried = self.prefix.carried()
        for rank in range(RANKS):
            for slot, gradient in enumerate(gradients[rank]):
                self.seen[rank].sums.add(slot, gradient)
                self.coherent[rank].observe(slot, gradient)
            self.coherent[rank].compare()
            self.seen[rank].add_step(losses[rank], lambda: carried)
        self.seen[RANKS].add_step(sum(losses) / RANKS, lambda: carried)
        self._judge(gradients)
        for each in self.coherent[:RANKS]:
            each.end_step()
        rows = [each.latest for each in self.coherent[:RANKS]]
        self.coherent[RANKS].latest = [[sum(column) / RANKS for column in zip(*row)] for row in zip(*rows)]

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

    def end_interval(self) -> None:
        """Keep what the interval has found."""
        for each, seen in zip(self.coherent, self.seen, strict=True):
            each.end_interval()
            seen.end_interval()

    def begin_interval(self) -> None:
        """Begin an empty interval."""
        for each, seen in zip(self.coherent, self.seen, strict=True):
            each.restart()
            seen.begin_interval()
        self.agreed, self.held = [], None

    def vote(self, step: int, work: Sequence[float]) -> Vote:
        """Return what is known at the end of an interval."""
        known = [self._evidence(row, work) for row in range(RANKS + 1)]
        return Vote(
            step=step,
            losses=[thousandths(seen.mean_loss) for seen in self.seen[:RANKS]],
            signals=[round(MILLIONTHS * seen.sums.signal_to_noise()) for seen in self.seen[:RANKS]],
            etas=[
                [None if eta is None else round(MILLIONTHS * eta) for eta in rates_of_change(evidence)[:-1]]
                for evidence in known
            ],
            learned=[[thousandths(part) for part in learned(evidence)] for evidence in known],
            bounds=[
                [None if math.isinf(bound) else thousandths(bound) for bound in bounds(evidence)] for evidence in known
            ],
            gained=[float(f"{sum(column) / len(self.agreed):.3g}") for column in zip(*self.agreed)],
        )

    def _evidence(self, row: int, work: Sequence[float]) -> Evidence:
        count = len(self.prefix.chain.blocks)
        previous, current = self.seen[row].last_two
        return Evidence(
            cut=self.prefix.cut,
            num_blocks=count,
            has_parameters=(True,) * count,
            previous_norms=previous,
            norms=current,
            epoch=0.0,
            num_epochs=1,
            warmup_epochs=0.0,
            eta_max=0.0,
            gains=self.coherent[row].gains,
            peaks=tuple(self.coherent[row].peaks),
            work=tuple(work),
        )


def thousandths(value: float) -> int:
    """Return a number as it is logged."""
    return max(-MOST, min(MOST, round(THOUSANDTHS * value))) if math.isfinite(value) else MOST


def learned(evidence: Evidence) -> list[float]:
    """Return of each block but the head its gain over that at its best; 1 where nothing is known."""
    if not evidence.gains:
        return [1.0] * evidence.deepest
    now = [sum(column) / len(evidence.gains) for column in zip(*evidence.gains, strict=True)]
    return [now[b] / evidence.peaks[b] if evidence.peaks[b] > 0 else 1.0 for b in range(evidence.deepest)]


def bounds(evidence: Evidence) -> list[float]:
    """Return `Vote.bounds` of a rank's evidence, infinity where nothing is known."""
    found = []
    for c, k in pairs(evidence.num_blocks):
        if not evidence.gains or c < evidence.cut:
            found.append(math.inf)
            continue
        trained: Gains = tuple((0.0,) * c + row[c:] for row in evidence.gains)
        _, most = share_gained(trained, range(c, k))
        found.append(most / (sum(evidence.work[c:k]) / sum(evidence.work[c:])))
    return found


def keep_all(vote: Vote) -> int:
    """Freeze nothing."""
    return 0


def trained(skew: str, seed: int, decide: Callable[[Vote], int] = keep_all) -> Log:
    """Return what is logged of a run whose cut `decide` chooses from every vote's evidence; it never falls."""
    shards, chain = seeded(skew, seed)
    optimizer = sgd(chain, LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    prefix = FrozenPrefix(chain, optimizer)
    ranks = Ranks(prefix, optimizer, shards.honest)
    prefix.on_move(ranks.follow)
    prefix.move(Move(0, 0, 0))
    work = work_of(chain, shards.images[:1])
    generator = torch.Generator().manual_seed(seed)
    votes: list[Vote] = []
    cuts: list[int] = []
    chain.model.train()
    for step in range(1, STEPS + 1):
        gradients, losses = gradients_of(prefix, shards, step - 1, generator)
        ranks.observe(gradients, losses)
        optimizer.step()
        schedule.step()
        if step % INTERVAL:
            continue
        ranks.end_interval()
        if WARMUP <= step < STEPS:
            votes.append(ranks.vote(step, work))
            cuts.append(max(prefix.cut, decide(votes[-1])))
        ranks.begin_interval()
        if cuts and cuts[-1] > prefix.cut:
            prefix.move(Move(0, step, cuts[-1]))
    labels = [shards.labels[torch.from_numpy(shard)].tolist() for shard in shards.plan.shards]
    return Log(
        skew=skew,
        seed=seed,
        samples=[len(own) for own in labels],
        coverage=[round(coverage(own, CLASSES), 3) for own in labels],
        work=work,
        accuracy=accuracy(chain),
        votes=votes,
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
