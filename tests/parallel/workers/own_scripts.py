"""Every rank runs the example scripts as they are, and compares what they trained."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from hvfreeze.comm.replica_sync import check_replicas, parameter_digest
from hvfreeze.comm.world import World
from hvfreeze.examples import image, text
from hvfreeze.examples.data import TextClassifier, digits, reviews
from hvfreeze.freezing.settings import FreezeConfig
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.torchvision_shim import torchvision
from tests.parallel.workers.checking import with_folder
from tests.parallel.workers.own_optimizer import start as start

MODEL = "shufflenet_v2_x0_5"
Result = tuple[Any, Any, list[float]]


voted = patch.dict(DistributedOptimizer.__init__.__kwdefaults__, settings=FreezeConfig(freeze="geometric"))
"""Votes that freeze for certain, also on processors that round in another way."""


def without_cache(module: ModuleType) -> dict[str, Any]:
    """Run a script's text without its cached loader."""
    lines = Path(str(module.__file__)).read_text().replace("loader.suffix(", "model(").splitlines()
    found: dict[str, Any] = {"__name__": "voted"}
    exec("\n".join(line for line in lines if "hvfreeze.CachedLoader(" not in line), found)
    return found


@voted
def run_image(epochs: int, directory: Path | None) -> Result:
    words = ["--model", MODEL, "--samples", "72", "--batch-size", "6", "--epochs", str(epochs)]
    module = without_cache(image) if directory is None else vars(image)
    result: Result = module["main"](image.parser.parse_args([*words, "--cache-dir", str(directory)]))
    return result


@voted
def run_text(epochs: int, directory: Path | None) -> Result:
    module = without_cache(text) if directory is None else vars(text)
    result: Result = module["main"](epochs, samples=96, batch_size=8, cache_dir=str(directory))
    return result


def loop(model: torch.nn.Module, data: Any, rows: int, *, lr: float, cycle: bool, norm: float) -> str:
    """Train for an epoch in plain PyTorch, as the scripts do on one rank; return a digest."""
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=rows, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler: Any = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=len(loader) + 1)
        if cycle
        else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    )
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        scheduler.step()
    return parameter_digest(model)


@with_folder
def check_one_rank_is_plain_pytorch(world: World, folder: Path) -> None:
    if world.size > 1:
        return
    directory = folder / "one"
    torch.manual_seed(0)
    model = torchvision.models.get_model(MODEL, num_classes=10)
    expected = loop(model, digits(72)[0], 6, lr=1e-3, cycle=True, norm=5.0)
    assert {parameter_digest(run_image(1, where)[0]) for where in (None, directory)} == {expected}
    torch.manual_seed(0)
    data = reviews(96)
    expected = loop(TextClassifier(), data, 8, lr=3e-3, cycle=False, norm=float("inf"))
    assert {parameter_digest(run_text(1, where)[0]) for where in (None, directory)} == {expected}


@with_folder
def check_a_cache_changes_no_bit_of_a_script(world: World, folder: Path) -> None:
    for kind, run in (("image", run_image), ("text", run_text)):
        directory = folder / kind
        model, optimizer, losses = run(7, None)
        assert optimizer.freezer.cut > 0, f"{kind}: no block was ever frozen"
        optimizer.freezer.average_statistics()
        digest = check_replicas(model, optimizer.world, step=optimizer.freezer.step)
        for again in ("first", "again")[: 1 + (kind == "text")]:
            cached, other, same = run(7, directory)
            other.freezer.average_statistics()
            step = other.freezer.step
            assert check_replicas(cached, other.world, step=step) == digest, f"{kind}, {again}: other bits"
            assert same == losses and other.freezer.cut_history == optimizer.freezer.cut_history
        assert list(directory.glob("*.h5")), f"{kind}: nothing was cached"
        cuts = world.allgather_object(str(optimizer.freezer.cut_history), name="test.cuts")
        assert len(set(cuts)) == 1, cuts
