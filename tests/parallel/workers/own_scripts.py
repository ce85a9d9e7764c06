"""Every rank runs the example scripts as they are, and compares what they trained."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.examples.digits import digits
from hvfreeze.examples.text.reviews import Classifier, reviews
from hvfreeze.own_loop.optimizer import DistributedOptimizer
from hvfreeze.ranks.equal_models import check_replicas, parameter_digest
from hvfreeze.torchvision_shim import torchvision
from tests.parallel.mpirun import report

MODEL = "shufflenet_v2_x0_5"
IMAGE = ["--model", MODEL, "--samples", "72", "--batch-size", "6"]
TEXT = ["--samples", "96", "--batch-size", "8"]


def run(script: str, *arguments: str) -> tuple[Any, Any, list[float]]:
    module = importlib.import_module(f"hvfreeze.examples.{script}")
    given: argparse.Namespace = module.parser.parse_args(arguments)
    result: tuple[Any, Any, list[float]] = module.main(given)
    return result


def loop(
    model: torch.nn.Module, data: Any, rows: int, *, lr: float, weight_decay: float, schedule: str, norm: float
) -> None:
    """Train for an epoch in plain PyTorch, as the scripts do on one rank."""
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=rows, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    scheduler: Any = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=len(loader) + 1)
        if schedule == "cycle"
        else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    )
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        scheduler.step()


def one_rank_is_plain_pytorch() -> None:
    for script in ("image.voted", "image.cached"):
        cache = ["--cache-dir", f"{sys.argv[1]}/one"] if script.endswith("cached") else []
        model, _, _ = run(script, *IMAGE, *cache, "--epochs", "1")
        torch.manual_seed(0)
        reference = torchvision.models.get_model(MODEL, num_classes=10)
        loop(reference, digits(72)[0], 6, lr=1e-3, weight_decay=1e-2, schedule="cycle", norm=5.0)
        assert parameter_digest(model) == parameter_digest(reference), script
    for script in ("text.voted", "text.cached"):
        cache = ["--cache-dir", f"{sys.argv[1]}/one"] if script.endswith("cached") else []
        model, _, _ = run(script, *TEXT, *cache, "--epochs", "1")
        torch.manual_seed(0)
        data = reviews(96)
        text = Classifier()
        loop(text, data, 8, lr=3e-3, weight_decay=1e-2, schedule="cosine", norm=float("inf"))
        assert parameter_digest(model) == parameter_digest(text), script


def main() -> None:
    torch.set_num_threads(1)
    # Votes that freeze for certain, also on processors that round in another way.
    DistributedOptimizer.__init__.__kwdefaults__["settings"] = FreezeConfig(freeze="geometric")
    found: dict[str, Any] = {}
    for kind, arguments in (("image", [*IMAGE, "--epochs", "7"]), ("text", [*TEXT, "--epochs", "7"])):
        model, optimizer, losses = run(f"{kind}.voted", *arguments)
        assert optimizer.freezer.cut > 0, f"{kind}: no block was ever frozen"
        optimizer.freezer.average_statistics()
        digest = check_replicas(model, optimizer.world, step=optimizer.freezer.step)
        for again in ("first", "again")[: 1 + (kind == "text")]:
            cached, other, same = run(f"{kind}.cached", *arguments, "--cache-dir", f"{sys.argv[1]}/{kind}")
            other.freezer.average_statistics()
            assert check_replicas(cached, other.world, step=other.freezer.step) == digest, (
                f"{kind}, {again}: other bits"
            )
            assert same == losses and other.freezer.cut_history == optimizer.freezer.cut_history
        found[kind] = optimizer.freezer.cut_history
    size = optimizer.world.size
    if size == 1:
        one_rank_is_plain_pytorch()
    files = {
        kind: sorted(path.name for path in Path(f"{sys.argv[1]}/{kind}").glob("*.h5")) for kind in ("image", "text")
    }
    report(optimizer.world.rank, cuts=found, files=files)


if __name__ == "__main__":
    main()
