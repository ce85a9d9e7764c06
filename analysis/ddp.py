"""torch DistributedDataParallel over gloo on the same work, as people use it today; the flags of `hvfreeze train`.

    mpirun -n 2 python -m analysis.ddp train --data digits --freeze static --cut 2 --run-dir DIR

Same samples in the same order, same views, same memory format, optimizer and schedule as ours. Static freezing is the
usual one: `requires_grad_(False)` before wrapping; frozen BatchNorm layers stay in training mode, nothing is cached.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hvfreeze.config.flags import configuration, parse
from hvfreeze.config.sections import Config
from hvfreeze.config.tree import to_dict
from hvfreeze.data.batches import deal, open_feeds
from hvfreeze.data.datasets import open_data
from hvfreeze.data.feed import Batch, Images, TrainFeed, padded_batches
from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.ranks.world import SoloWorld
from hvfreeze.runs.clock import PhaseClock, train_seconds
from hvfreeze.runs.record import describe_environment
from hvfreeze.training.job import build_chain
from hvfreeze.training.learning_rate import learning_rate

PROGRAM = "torch DistributedDataParallel over gloo"


@dataclass
class Training:
    """The parts of a run."""

    config: Config
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    feed: TrainFeed
    evaluation: Images
    evaluation_batches: list[Batch]
    clock: PhaseClock
    trained_bytes: int
    step: int = 0
    exchanges: list[Any] = field(default_factory=list)
    """Sums that were made; see `add_up`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    rank, size = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default)) for name, default in (("RANK", 0), ("SIZE", 1))
    )
    try:
        config = configuration(parse(list(sys.argv[1:] if arguments is None else arguments))[1])
        run_dir = checked(config)
    except HvfreezeError as error:
        print(f"ddp: error: {error}", file=sys.stderr)
        return error.exit_code
    run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{run_dir / 'rendezvous'}", rank=rank, world_size=size)
    training = prepare(config, rank=rank, size=size)
    if rank == 0:
        describe(run_dir, config, size=size)
    lines = train(training, size=size, run_dir=run_dir)
    if rank == 0:
        conclude(run_dir, training, lines, size=size)
    dist.destroy_process_group()
    return 0


def checked(config: Config) -> Path:
    """Return the run directory.

    Raises:
        UsageError: the flags ask for what this program does not do.
    """
    if config.freeze.freeze not in ("none", "static") or config.cache.cache != "off":
        raise UsageError("DistributedDataParallel is run with --freeze none or static and without a cache only")
    if config.optimizer.precision != "float32" or config.optimizer.compression != "none":
        raise UsageError("DistributedDataParallel is run in float32 and without compression only")
    if config.run.run_dir is None:
        raise UsageError("--run-dir must be given")
    return Path(config.run.run_dir).resolve()


def prepare(config: Config, *, rank: int, size: int) -> Training:
    """Build the same model and the same batches as `hvfreeze train` does."""
    torch.set_num_threads(config.run.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    place = SoloWorld()
    place.rank, place.size, place.local_rank, place.local_size = rank, size, rank, size
    corpus = deal(
        config, open_data(config.data.data, config.data.data_dir, image_size=config.data.image_size), size=size
    )
    chain, _ = build_chain(config, corpus)
    frozen = chain.named_parameters(0, config.freeze.cut or 0)
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    trained = [parameter for parameter in chain.model.parameters() if parameter.requires_grad]
    settings = config.optimizer
    optimizer = torch.optim.SGD(trained, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    feed, evaluation = open_feeds(config, place, corpus)
    return Training(
        config=config,
        model=DistributedDataParallel(chain.model),
        optimizer=optimizer,
        feed=feed,
        evaluation=evaluation,
        evaluation_batches=padded_batches(corpus.share(place), corpus.evaluated.labels, settings.batch_size),
        clock=PhaseClock(),
        trained_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
    )


def train(training: Training, *, size: int, run_dir: Path) -> list[dict[str, Any]]:
    """Train all epochs and return the lines of metrics.jsonl, which rank 0 also writes. Collective."""
    lines: list[dict[str, Any]] = []
    before: dict[str, float] = {}
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
            due = training.config.run.evaluates(epoch, epochs=epochs)
            test_loss, test_accuracy = evaluate(training) if due else (None, None)
        now = training.clock.read()
        spent = {phase: value - before.get(phase, 0.0) for phase, value in now.items()}
        before = now
        seconds = train_seconds(spent)
        lines.append(
            {
                "epoch": epoch,
                "step": training.step,
                "cut": training.config.freeze.cut or 0,
                "train_loss": float(counted[0]) / (len(batches) * size),
                "train_accuracy": float(counted[1] / counted[2]),
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "train_seconds": seconds,
                "seconds": spent,
                "images_per_second": float(counted[2]) / max(seconds, 1e-9),
                "allreduce_bytes": training.step * training.trained_bytes if size > 1 else 0,
                "cache": {"mode": "off"},
            }
        )
        if dist.get_rank() == 0:
            with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            tested = "not evaluated" if test_accuracy is None else f"test {100 * test_accuracy:.2f} %"
            print(f"epoch {epoch}: {tested}, {seconds:.1f} s", flush=True)
    return lines


def train_step(training: Training, batch: Batch, *, total: int) -> tuple[float, int]:
    """Make one step and return this rank's loss and number of hits. Collective."""
    clock, settings = training.clock, training.config.optimizer
    clock.enter("data")
    images = training.feed.images.load(batch.ids, batch.views)
    clock.enter("forward")
    logits = training.model(images)
    loss = functional.cross_entropy(logits, batch.labels)
    value = float(loss)
    # The exchange is inside backward(), where DistributedDataParallel waits for it.
    clock.enter("backward")
    training.optimizer.zero_grad(set_to_none=True)
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
    module: nn.Module = training.model.module
    module.eval()
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


def describe(run_dir: Path, config: Config, *, size: int) -> None:
    """Write what a run directory says before training."""
    tree = {**to_dict(config), "program": {"program": PROGRAM}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    known = {**describe_environment(SoloWorld()), "size": size, "hosts": [socket.gethostname()] * size}
    (run_dir / "environment.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (run_dir / "decisions.jsonl").touch()


def conclude(run_dir: Path, training: Training, lines: Sequence[dict[str, Any]], *, size: int) -> None:
    """Write summary.json."""
    seconds = training.clock.read()
    spent = train_seconds(seconds)
    images = training.step * training.config.optimizer.batch_size * size
    cut = training.config.freeze.cut or 0
    summary = {
        "test_accuracy": lines[-1]["test_accuracy"],
        "best_test_accuracy": max(line["test_accuracy"] for line in lines if line["test_accuracy"] is not None),
        "epochs": len(lines),
        "steps": training.step,
        "world_size": size,
        "train_seconds": spent,
        "seconds": seconds,
        "images_per_second": images / max(spent, 1e-9),
        "allreduce_bytes": lines[-1]["allreduce_bytes"],
        "final_cut": cut,
        "cut_history": [[0, 0, cut]],
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
