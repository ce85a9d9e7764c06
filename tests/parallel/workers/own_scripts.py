"""Every rank runs the example scripts as they are, and compares what they trained."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import World
from hvfreeze.examples import image, text
from hvfreeze.freezing.settings import FreezeConfig
from hvfreeze.integration.optimizer import DistributedOptimizer
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
