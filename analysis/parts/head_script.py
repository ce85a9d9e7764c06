"""A plain Horovod script that trains all layers, or fits a head in their place; the flags of `hvfreeze train`.

    mpirun -n 2 python -m analysis.parts.head_script train --data imagefolder --data-dir DIR --model M --weights FILE \
        --epochs 4 --run-dir RUN

`--head-fit exact` calls `hvfreeze.fit_head`, `--head multi-level --head-fit kernel` calls `hvfreeze.fit_classifier`.
Processor seconds are of all ranks, for training or fitting alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hvfreeze
from analysis.parts.run_files import EpochLines, describe, run_script
from hvfreeze.config.tree import Config
from hvfreeze.data.data_sets import ImageSet, open_data
from hvfreeze.data.shards import stratified_subset
from hvfreeze.errors import UsageError
from hvfreeze.model.model_sources import build_model
from hvfreeze.runs.clock import PhaseClock

PROGRAM = "a Horovod script"
BORDER = 8
"""Images are shifted by up to an eighth of their side."""


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Decoded images, normalised; where they are augmented, shifted and perhaps flipped."""

    def __init__(self, images: ImageSet, ids: Any, config: Config, *, augmented: bool) -> None:
        self.pixels = torch.stack([torch.from_numpy(images.decode(int(sample))) for sample in ids])
        self.labels = images.labels[torch.as_tensor(ids)]
        mean, std = config.data.statistics() or (images.mean, images.std)
        self._mean, self._std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
        self._augmented, self._flips = augmented, config.data.mirrors(images.flips)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        pixels = self.pixels[place]
        if self._augmented:
            side = pixels.shape[-1]
            border = side // BORDER
            top, left, flipped = (int(torch.randint(most, ())) for most in (2 * border + 1, 2 * border + 1, 2))
            pixels = functional.pad(pixels, [border] * 4)[:, top : top + side, left : left + side]
            pixels = pixels.flip(2) if flipped and self._flips else pixels
        return (pixels / 255 - self._mean) / self._std, self.labels[place]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train or fit and return the exit code. Collective."""
    hvd.init()
    return run_script("head_script", run, arguments)


def run(config: Config) -> None:
    """Train or fit, and test; rank 0 leaves a run directory. Collective.

    Raises:
        UsageError: there is no run directory.
    """
    if config.run.run_dir is None:
        raise UsageError("--run-dir must be given")
    settings, run_dir, writes = config.optimizer, Path(config.run.run_dir), hvd.rank() == 0
    torch.set_num_threads(config.run.threads or 1)
    torch.manual_seed(config.run.seed)
    if writes:
        run_dir.mkdir(parents=True, exist_ok=True)
        describe(run_dir, config, program=PROGRAM, size=hvd.size())
    splits = open_data(config.data.data, config.data.data_dir, image_size=config.data.image_size)
    ids = splits.train.ids
    if config.data.train_samples is not None:
        ids = ids[stratified_subset(splits.train.labels[ids], config.data.train_samples, seed=config.run.seed)]
    train_set = Pictures(splits.train, ids, config, augmented=not config.head.solved)
    test_set = Pictures(splits.test, splits.test.ids, config, augmented=False)
    sampler: Any = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=config.run.seed)
    loader = DataLoader(train_set, settings.batch_size, sampler=sampler, drop_last=not config.head.solved)
    test_sampler: Any = DistributedSampler(test_set, hvd.size(), hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, settings.batch_size, sampler=test_sampler)
    side = train_set.pixels.shape[-1]
    model = build_model(
        config.model.model,
        num_classes=len(splits.train.classes),
        weights=config.model.weights,
        image_size=side,
        reset_head=True,
    ).model
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    clock = PhaseClock()
    lines = EpochLines(run_dir, clock, size=hvd.size(), batch_size=settings.batch_size, writes=writes)
    spent = 0.0

    def timed(make: Callable[[], nn.Module]) -> nn.Module:
        nonlocal spent
        began = time.process_time()
        with clock.within("forward"):
            made = make()
        spent += float(hvd.allreduce(torch.tensor(time.process_time() - began), op=hvd.Sum, name="processor"))
        return made

    def record(classifier: nn.Module, epoch: int) -> None:
        with clock.within("evaluate"):
            accuracy = tested(classifier, test_loader)
        line = {"cut": 0, "test_accuracy": accuracy, "processor_seconds": spent, "allreduce_bytes": 0}
        lines.add(line, step=(epoch + 1) * len(loader))

    if config.head.head == "multi-level":
        flips = config.data.mirrors(splits.train.flips)
        record(timed(lambda: hvfreeze.fit_classifier(model, loader, flips=flips).classifier), 0)
    elif config.head.solved:
        timed(lambda: hvfreeze.fit_head(model, loader) and model)
        record(model, 0)
    else:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs * len(loader))
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for epoch in range(settings.epochs):
            sampler.set_epoch(epoch)
            timed(lambda: train_epoch(model, loader, optimizer, schedule))
            record(model, epoch)
    if writes:
        lines.conclude(cut_history=[(0, 0, 0)])


def train_epoch(model: nn.Module, loader: Any, optimizer: Any, schedule: Any) -> nn.Module:
    """Train for an epoch; return the model."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def tested(model: nn.Module, loader: Any) -> float:
    """Return the accuracy on all ranks' test images."""
    model.eval()
    right = torch.tensor([0.0, 0.0])
    for images, labels in loader:
        right += torch.tensor([float((model(images).argmax(1) == labels).sum()), len(labels)])
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    return float(right[0] / right[1])


if __name__ == "__main__":
    sys.exit(main())
