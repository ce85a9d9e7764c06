"""What a batch costs here and now, by the clock, tried before the first stage; and what a run is expected to cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.chain.blocks import Chain
from hvfreeze.data.batches import Batch, TrainFeed
from hvfreeze.heads.kernel.fit import PENALTIES
from hvfreeze.heads.kernel.module import MOST_DIRECTIONS, gaussian
from hvfreeze.heads.rows import CHUNK_ROWS
from hvfreeze.ranks.world import World

TIMES = 2
"""Tries of everything, the first of which brings libraries and memory up to speed."""
USUAL_PASSES = 40
"""Over all rows, until a head is solved."""
APPROXIMATION = 12
"""What the approximation of the second derivative takes, in passes."""
PROJECTIONS = 3
"""Products of the features with as many vectors as there are directions: two find the directions, one projects."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a batch of this run's size, on the slowest rank; images are loaded in all of them."""

    forward: float
    """Through all blocks, without gradient."""
    step: float
    """Of a training step behind a cut, but for the exchange of gradients and the update."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Seconds that the parts of a run are expected to take."""

    solve: float
    step: float
    evaluation: float
    source: str
    """What the numbers were read from."""


def time_batch(chain: Chain, feed: TrainFeed, *, cut: int, precision: str, world: World) -> Timing:
    """Return what a batch costs; the model, its running statistics and torch's generator are left as they were.

    Collective: every rank of `world` must call this.
    """
    batch, blocks = feed.epoch(0)[0], len(chain.blocks)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")

    def forward() -> None:
        chain.model.eval()
        with torch.no_grad(), autocast():
            chain.run(images_of(feed, batch), 0, blocks)

    def step() -> None:
        # BatchNorm cannot train on one value: where there is but one, the strategy will say so.
        chain.model.train(len(batch.labels) > 1)
        with autocast():
            with torch.no_grad():
                prefix = chain.run(images_of(feed, batch), 0, cut)
            logits = chain.run(prefix, cut, blocks)
        functional.cross_entropy(logits.float(), batch.labels).backward()

    with untouched(chain.model):
        mine = (least_seconds(forward), least_seconds(step))
    forwards, steps = zip(*world.allgather_object(mine, name="budget.timing"), strict=True)
    return Timing(max(forwards), max(steps))


def time_solving(*, rows: int, width: int, classes: int, size: int) -> float:
    """Return the seconds that solving a linear head takes on `rows` rows of this rank, but for the exchange."""
    count = max(1, min(rows, CHUNK_ROWS))
    features, weight = torch.ones(count, width), torch.ones(classes, width)

    def products() -> None:
        logits = weight @ features.t()
        _ = logits.exp_() @ features

    return (USUAL_PASSES + APPROXIMATION) * least_seconds(products) * rows / count


def time_comparing(*, rows: int, width: int, classes: int, size: int) -> float:
    """Return the seconds that a `KernelHead` takes on `rows` rows of each of `size` ranks, but for the exchange."""
    count, directions = max(1, min(rows, CHUNK_ROWS)), min(width, MOST_DIRECTIONS)
    features, matrix = torch.ones(count, width), torch.ones(width, directions)
    centres, vectors = torch.ones(rows * size, directions), torch.ones(rows * size, len(PENALTIES) * classes)
    lines = torch.ones(count, rows * size)
    projected = least_seconds(partial(torch.matmul, features, matrix))
    compared = least_seconds(partial(gaussian, centres[:count], centres))
    multiplied = least_seconds(partial(torch.matmul, lines, vectors))
    return (PROJECTIONS * projected + compared + USUAL_PASSES * multiplied) * rows / count


def images_of(feed: TrainFeed, batch: Batch) -> Tensor:
    """Return a batch's images, (B, C, H, W)."""
    return feed.images.load(batch.ids, batch.views)


def least_seconds(work: Callable[[], object]) -> float:
    """Return the least time that `work` took."""
    taken = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give a model its modes, buffers and gradients back, and torch's generator its state, whatever happens inside."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, mode in modes.items():
            module.training = mode
        for parameter in model.parameters():
            parameter.grad = None
