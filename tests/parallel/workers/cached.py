"""Every rank makes the same run without a cache, with one, with one that is stopped and resumed, and from its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvfreeze.ranks.horovod_world import open_world
from hvfreeze.ranks.world import end_job_on_exception
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.training.run import run
from tests.parallel.mpirun import report
from tests.parallel.workers.checking import let_runs_build
from tests.parallel.workers.runs import SCHEDULED, configuration, interrupted

models: Any = torchvision.models


def resnet() -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


def mobilenet() -> nn.Module:
    return models.MobileNetV2(num_classes=10, width_mult=0.25)


def vit() -> nn.Module:
    return models.VisionTransformer(
        32, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10, dropout=0.1
    )


def main() -> None:
    torch.set_num_threads(1)
    world, root = open_world(), Path(sys.argv[1])
    end_job_on_exception(world)
    found: dict[str, Any] = {}
    # What a family adds does not depend on the number of ranks: each takes part at one size or two.
    for build in {2: (mobilenet,), 3: (resnet, vit)}.get(world.size, (resnet,)):
        let_runs_build(lambda classes, build=build: build())  # type: ignore[misc]

        def settings(name: str, build: Any = build, **changes: Any) -> Any:
            # With two views the cut moves away from rows that were shown in half of an epoch, and from whole ones.
            views = f"views:{2 if world.size in (2, 3) else 1}"
            common = {**SCHEDULED, "interval": 6, "augment": views, "epochs": 5, "checkpoint_every": "3s"}
            return configuration(root / f"{build.__name__}-{name}", world.size, **{**common, **changes})

        plain = run(settings("plain"), world)
        cached = run(settings("cached", cache="on"), world)
        interrupted(settings("stopped", cache="on"), world, after=9)
        resumed = run(settings("stopped", cache="on", resume=True), world)
        files = str(root / f"{build.__name__}-cached" / "cache")
        again = run(settings("again", cache="on", cache_dir=files), world)
        runs = {"plain": plain, "cached": cached, "resumed": resumed, "again": again}
        found[build.__name__] = {
            "digests": {name: summary["parameter_digest"] for name, summary in runs.items()},
            "cache": {name: summary["cache"] for name, summary in runs.items()},
            "cuts": plain["cut_history"],
        }
    report(world.rank, **found)
    world.close()


if __name__ == "__main__":
    main()
