"""A custom script, in plain Horovod or with one line for our optimizer; the flags of `hvfreeze train`.

    mpirun -n 2 python -m analysis.parts.own_script train --model digits_network --freeze coherence --run-dir DIR

`--freeze none` is Horovod's own optimizer, everything else ours with that criterion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvfreeze
from analysis.parts.own_tasks import CodeNetwork, DigitsNetwork, code, digits
from analysis.parts.run_files import EpochLines, describe, run_script
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.runs.clock import PhaseClock

PROGRAM = "a Horovod script"
HERE = "analysis.parts.own_script:"
"""How the names of its models begin, in a run's flags."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The model and the data of a script."""

    network: Callable[[], nn.Module]
    data: Callable[[], tuple[TensorDataset, TensorDataset]]


TASKS = {
    "digits_network": Task(network=DigitsNetwork, data=digits),
    "code_network": Task(network=CodeNetwork, data=code),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return the exit code. Collective."""
    hvd.init()
    return run_script("own_script", train, arguments)


def train(config: Config) -> None:
    """Train and test; rank 0 leaves a run directory. Collective.

    Raises:
        UsageError: the model is none of `TASKS`, or there is no run directory.
    """
    settings, name = config.optimizer, config.model.model.removeprefix(HERE)
    if name not in TASKS or config.run.run_dir is None:
        raise UsageError(f"--model ({name}) must be {' or '.join(TASKS)}, and --run-dir be given")
    torch.set_num_threads(config.run.threads or 1)
    torch.manual_seed(config.run.seed)
    run_dir, writes = Path(config.run.run_dir), hvd.rank() == 0
    if writes:
        run_dir.mkdir(parents=True, exist_ok=True)
        describe(run_dir, config, program=PROGRAM, size=hvd.size())

    train_set, test_set = TASKS[name].data()
    sampler: Any = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=config.run.seed)
    loader = DataLoader(train_set, batch_size=settings.batch_size, sampler=sampler, drop_last=True)
    steps, model = len(loader), TASKS[name].network()
    optimizer = wrapped(optimizer_of(config, model), model, config, steps=steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    clock = PhaseClock()
    lines = EpochLines(run_dir, clock, size=hvd.size(), batch_size=settings.batch_size, writes=writes)
    sent = 0
    for epoch in range(settings.epochs):
        model.train()
        sampler.set_epoch(epoch)
        losses = hits = 0.0
        for inputs, labels in loader:
            clock.enter("forward")
            optimizer.zero_grad()
            logits = model(inputs)
            loss = functional.cross_entropy(logits, labels)
            clock.enter("backward")
            loss.backward()
            sent += sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
            clock.enter("optimizer")
            optimizer.step()
            clock.enter("data")
            losses, hits = losses + loss.item(), hits + float((logits.argmax(1) == labels).float().mean())
        with clock.within("evaluate"):
            test_loss, test_accuracy = tested(model, test_set)
        lines.add(
            {
                "cut": cut_of(optimizer),
                "train_loss": losses / steps,
                "train_accuracy": hits / steps,
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "allreduce_bytes": sent if hvd.size() > 1 else 0,
            },
            step=(epoch + 1) * steps,
        )
    if writes:
        history = optimizer.freezer.cut_history if config.freeze.freeze != "none" else [(0, 0, 0)]
        lines.conclude(cut_history=history)


def optimizer_of(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a plain script has."""
    settings = config.optimizer
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=settings.lr)
    return torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)


def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config, *, steps: int) -> Any:
    """Return the distributed optimizer: Horovod's own where nothing is frozen, else ours."""
    named = list(model.named_parameters())
    if config.freeze.freeze == "none":
        return hvd.DistributedOptimizer(optimizer, named_parameters=named)
    chosen = (
        {} if config.freeze.freeze == "coherence" else {"settings": hvfreeze.FreezeConfig(freeze=config.freeze.freeze)}
    )
    return hvfreeze.DistributedOptimizer(
        optimizer,
        named_parameters=named,
        model=model,
        steps_per_epoch=steps,
        num_epochs=config.optimizer.epochs,
        **chosen,
    )


def cut_of(optimizer: Any) -> int:
    """Return how many blocks are frozen."""
    freezer = getattr(optimizer, "freezer", None)
    return 0 if freezer is None else int(freezer.cut)


@torch.no_grad()
def tested(model: nn.Module, test_set: TensorDataset) -> tuple[float, float]:
    """Return loss and accuracy; every rank tests all."""
    model.eval()
    inputs, labels = test_set.tensors
    logits = torch.cat([model(part) for part in inputs.split(100)])
    return float(functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


if __name__ == "__main__":
    sys.exit(main())
