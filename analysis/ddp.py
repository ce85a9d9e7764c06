"""torch DistributedDataParallel over gloo on the same work, as people use it today; the flags of `hvfreeze train`.

    mpirun -n 2 python -m analysis.ddp train --data digits --freeze static --cut 2 --run-dir DIR

Same samples in the same order, same views, same memory format, optimizer and schedule as ours. Static freezing is the
usual one: `requires_grad_(False)` before wrapping; frozen BatchNorm layers stay in training mode, nothing is cached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from analysis.parts.ddp_loop import Training, train
from analysis.parts.run_files import EpochLines, describe, run_script
from hvfreeze.comm.resources import memory_budget
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import deal, open_feeds, padded_batches
from hvfreeze.data.data_sets import open_data
from hvfreeze.errors import UsageError
from hvfreeze.inference.normalisation import normalisation_of
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.opening import rows_evaluated
from hvfreeze.training.blueprint import Blueprint

PROGRAM = "torch DistributedDataParallel over gloo"
Optimizer = torch.optim.Optimizer
Wrap = Callable[[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]
"""Returns model and optimizer with the gradients' exchange."""


def with_ddp(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return the model in DistributedDataParallel, and the optimizer as it is."""
    return DistributedDataParallel(model), optimizer


def main(arguments: Sequence[str] | None = None, *, wrap: Wrap = with_ddp, program: str = PROGRAM) -> int:
    """Train and return the exit code."""
    try:
        return run_script("ddp", lambda config: run(config.resolved(), wrap=wrap, program=program), arguments)
    finally:
        if dist.is_initialized():
            # So that no rendezvous is left to whoever tries again.
            dist.destroy_process_group()


def run(config: Config, *, wrap: Wrap, program: str) -> None:
    """Train; rank 0 leaves a run directory. Collective."""
    rank, size = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default)) for name, default in (("RANK", 0), ("SIZE", 1))
    )
    run_dir, writes = checked(config), rank == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{run_dir / 'rendezvous'}", rank=rank, world_size=size)
    training = prepare(config, rank=rank, size=size, wrap=wrap)
    if writes:
        describe(run_dir, config, program=program, size=size)
    lines = EpochLines(run_dir, training.clock, size=size, batch_size=config.optimizer.batch_size, writes=writes)
    train(training, lines, size=size)
    if writes:
        lines.conclude(cut_history=[[0, 0, config.freeze.cut or 0]])


def checked(config: Config) -> Path:
    """Return the run directory.

    Raises:
        UsageError: the flags ask for what this program does not do, or the directory holds a run.
    """
    if config.freeze.freeze not in ("none", "static") or config.cache.cache != "off":
        raise UsageError("DistributedDataParallel is run with --freeze none or static and without a cache only")
    if config.optimizer.precision != "float32" or config.optimizer.compression != "none":
        raise UsageError("DistributedDataParallel is run in float32 and without compression only")
    if config.optimizer.accumulate != 1:
        raise UsageError("DistributedDataParallel is run with --accumulate 1 only")
    given = (config.optimizer.optimizer, config.optimizer.clip_grad, config.optimizer.head_lr, config.optimizer.mixup)
    if given != ("sgd", None, None, 0.0):
        raise UsageError("DistributedDataParallel is run with plain SGD and the plain loss only")
    if config.run.run_dir is None:
        raise UsageError("--run-dir must be given")
    run_dir = Path(config.run.run_dir).resolve()
    if (run_dir / "config.yaml").exists():
        raise UsageError(
            f"--run-dir ({run_dir}) holds a run, and this program cannot continue it; choose another directory"
        )
    return run_dir


def prepare(config: Config, *, rank: int, size: int, wrap: Wrap) -> Training:
    """Build the same model and the same batches as `hvfreeze train` does."""
    torch.set_num_threads(config.run.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    splits = open_data(config.data.data, config.data.data_dir, image_size=config.data.stored_size)
    batch_size = config.optimizer.batch_size
    corpus = deal(splits, config.data, seed=config.data_seed, batch_size=batch_size, replicas=size)
    blueprint = Blueprint.of(config.model, corpus, image_size=config.data.image_size)
    chain, _ = blueprint.build_from(config.run.seed)
    frozen = chain.named_parameters(0, config.freeze.cut or 0)
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    trained = [parameter for parameter in chain.model.parameters() if parameter.requires_grad]
    settings = config.optimizer
    optimizer: Optimizer = torch.optim.SGD(
        trained, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    model, optimizer = wrap(chain.model, optimizer)
    feed, evaluation = open_feeds(
        corpus,
        config.data,
        seed=config.data_seed,
        replica=rank,
        budget_bytes=memory_budget(size),
        statistics=normalisation_of(config, splits.train, chain.model).statistics,
    )
    return Training(
        config=config,
        model=model,
        module=chain.model,
        optimizer=optimizer,
        feed=feed,
        evaluation=evaluation,
        evaluation_batches=padded_batches(
            corpus.share(rank), evaluation.labels_of, rows_evaluated(config, blueprint.image_shape)
        ),
        clock=PhaseClock(),
        trained_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
    )


if __name__ == "__main__":
    sys.exit(main())
