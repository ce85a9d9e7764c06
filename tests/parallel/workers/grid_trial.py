"""Runs of a small network in a grid, and the twin in this process that they must equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.chain.origins.narrow_resnets import NarrowResNet
from hvfreeze.config.tree import Config, from_dict
from hvfreeze.data.batches import open_feeds
from hvfreeze.ranks.world import SoloWorld, World
from hvfreeze.training.making.samples import open_corpus
from tests.parallel.twins.grid import Grid
from tests.parallel.workers.checking import as_runs_lay_out, let_runs_build
from tests.parallel.workers.runs import lines

BATCH, STEPS, EPOCHS, LR = 16, 3, 2, 0.03
BOUNDARIES = {1: 16 * 32 * 32, 2: 16 * 32 * 32, 3: 32 * 16 * 16, 4: 64 * 8 * 8}
"""Numbers of a sample behind the stem and the three residual blocks."""
SMALL_LR = 1e-3
"""Where three replicas' gradients are summed in another order: training doubles a difference in the last bit in a few
steps, the faster the larger the learning rate."""


def narrow(classes: int) -> nn.Module:
    return NarrowResNet(1, num_classes=classes)


laid_out = as_runs_lay_out(narrow)


class Trial:
    """Runs with equal settings but for what is said, each in a directory of its own."""

    def __init__(self, world: World, root: Path) -> None:
        self.world, self.root = world, root
        let_runs_build(narrow)

    def config(self, name: str, *, shares: int, **changes: Any) -> Config:
        base = {
            "train_samples": STEPS * BATCH * shares * 5 // 4 + 2,
            "validation_fraction": 0.2,
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "lr": LR,
            "weight_decay": 1e-2,
            "threads": 1,
            "run_dir": str(self.root / name),
        }
        return from_dict({**base, **changes})

    def grid(self, name: str, shape: tuple[int, int, int], **changes: Any) -> Config:
        parts, replicas, number = shape
        changes.setdefault("lr", rate_of(shape))
        given = {"strategy": "grid", "parts": parts, "replicas": replicas, "micro_batches": number, "cut_by": "count"}
        return self.config(name, shares=replicas, **{**given, **changes})

    def model(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(self.root / name / "model.pt", weights_only=True)
        return found

    def twin(self, shape: tuple[int, int, int], segments: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The same training in this process."""
        _, replicas, number = shape
        config = self.config("data", shares=replicas)
        shared = {"seed": config.data_seed, "batch_size": BATCH, "replicas": replicas}
        corpus = open_corpus(config.data, SoloWorld(), whole_batches=True, **shared)
        given = {"seed": config.data_seed, "replicas": replicas, "budget_bytes": 2**30}
        feeds = [open_feeds(corpus, config.data, replica=replica, **given)[0] for replica in range(replicas)]
        torch.manual_seed(0)
        options = {"lr": rate_of(shape), "momentum": 0.9, "weight_decay": 1e-2}
        twin = Grid(laid_out(10), replicas=replicas, ranges=ranges(segments), micro_batches=number, **options)
        for epoch in range(EPOCHS):
            steps = zip(*[feed.epoch(epoch) for feed in feeds], strict=True)
            for step in steps:
                twin.step([(feed.images.load(b.ids, b.views), b.labels) for feed, b in zip(feeds, step)])
            twin.pool()
        return twin.models[0].state_dict()


def rate_of(shape: tuple[int, int, int]) -> float:
    return LR if shape[1] < 3 else SMALL_LR


def ranges(segments: Sequence[Sequence[int]]) -> Callable[[nn.Module], list[Callable[[Tensor], Tensor]]]:
    """How a network's children are dealt out to partitions."""

    def cut(model: Any) -> list[Callable[[Tensor], Tensor]]:
        head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu)
        blocks = [stem, model.layer1, model.layer2, model.layer3, head]
        return [nn.Sequential(*blocks[start:stop]) for start, stop in segments]

    return cut


def without_places(directory: Path, kind: str) -> list[str]:
    """Lines of a record, but for what depends on where the chain is cut."""
    moved = ("grid", "allreduce_bytes", "other_collective_bytes")
    return [json.dumps({k: v for k, v in line.items() if k not in moved}) for line in lines(directory, kind)]
