"""Epochs and steps of `analysis.ddp` and `analysis.parts.plain_horovod`: our batches and phases, their exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from analysis.parts.run_files import EpochLines
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, TrainFeed
from hvfreeze.data.decoding import Inputs
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.training.loop import learning_rate


@dataclass
class Training:
    """The parts of a run."""

    config: Config
    model: nn.Module
    """The model that trains; its backward pass may exchange gradients, as DistributedDataParallel's does."""
    module: nn.Module
    """The same without an exchange, for evaluation."""
    optimizer: torch.optim.Optimizer
    feed: TrainFeed
    evaluation: Inputs
    evaluation_batches: list[Batch]
    clock: PhaseClock
    trained_bytes: int
    step: int = 0
    exchanges: list[Any] = field(default_factory=list)
    """Sums that were made; see `add_up`."""


def train(training: Training, lines: EpochLines, *, size: int) -> None:
    """Train all epochs, each with its line. Collective."""
    epochs = training.config.optimizer.epochs
    training.clock.restart()
    for epoch in range(epochs):
        batches = training.feed.epoch(epoch)
        training.model.train()
        losses, correct = 0.0, 0
        for batch in batches:
            loss, hits = train_step(training, batch, total=len(batches) * epochs)
            losses, correct = losses + loss, correct + hits
        counted = torch.tensor(
            [losses, correct, len(batches) * training.config.optimizer.batch_size], dtype=torch.float64
        )
        with training.clock.within("evaluate"):
            add_up(training, counted)
            due = training.config.run.evaluates(epoch) or epoch + 1 == epochs
            test_loss, test_accuracy = evaluate(training) if due else (None, None)
        lines.add(
            {
                "cut": training.config.freeze.cut or 0,
                "train_loss": float(counted[0]) / (len(batches) * size),
                "train_accuracy": float(counted[1] / counted[2]),
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "allreduce_bytes": training.step * training.trained_bytes if size > 1 else 0,
            },
            step=training.step,
        )


def train_step(training: Training, batch: Batch, *, total: int) -> tuple[float, int]:
    """Make one step and return this rank's loss and number of hits. Collective."""
    clock, settings = training.clock, training.config.optimizer
    clock.enter("data")
    images = training.feed.images.load(batch.ids, batch.views)
    clock.enter("forward")
    logits = training.model(images)
    loss = functional.cross_entropy(logits, batch.labels)
    value = loss.item()
    # The exchange is inside backward(), where DistributedDataParallel waits for it.
    clock.enter("backward")
    training.optimizer.zero_grad()
    loss.backward()
    clock.enter("optimizer")
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate(
            training.step, base=settings.lr, schedule=settings.schedule, warmup=settings.lr_warmup, total=total
        )
    training.optimizer.step()
    training.step += 1
    clock.enter("data")
    return value, int((logits.argmax(1) == batch.labels).sum())


@torch.no_grad()
def evaluate(training: Training) -> tuple[float, float]:
    """Return mean loss and accuracy, every sample counted once. Collective."""
    module = training.module.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in training.evaluation_batches:
        logits = module(training.evaluation.load(batch.ids, batch.views))[: batch.counted]
        labels = batch.labels[: batch.counted]
        loss = functional.cross_entropy(logits.double(), labels, reduction="sum")
        hits = int((logits.argmax(1) == labels).sum())
        totals += torch.tensor([float(loss), hits, batch.counted], dtype=torch.float64)
    add_up(training, totals)
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])


def add_up(training: Training, tensor: Tensor) -> None:
    """Sum `tensor` over ranks, in place. Collective.

    The exchange is kept until the end. Otherwise gloo's thread may be the last to hold it and with it the tensor, which
    it can free with the interpreter's lock only; and the main thread has that lock while it waits for gloo's to end.
    """
    training.exchanges.append(dist.all_reduce(tensor, async_op=True))
    training.exchanges[-1].wait()
