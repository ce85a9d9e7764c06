"""Every rank runs the example scripts as they are, and compares what they trained."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.examples import image, text
from hvfreeze.integration.optimizer import DistributedOptimizer
from tests.parallel.workers.checking import with_folder
from tests.parallel.workers.own_optimizer import start as start

EPOCHS = 7
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
def run_image(directory: Path | None) -> Result:
    words = ["--model", "shufflenet_v2_x0_5", "--samples", "72", "--batch-size", "6", "--epochs", str(EPOCHS)]
    module = without_cache(image) if directory is None else vars(image)
    result: Result = module["main"](image.parser.parse_args([*words, "--cache-dir", str(directory)]))
    return result


@voted
def run_text(directory: Path | None) -> Result:
    module = without_cache(text) if directory is None else vars(text)
    result: Result = module["main"](EPOCHS, samples=96, batch_size=8, cache_dir=str(directory))
    return result


@with_folder
def check_a_cache_changes_no_bit_of_a_script(world: World, folder: Path) -> None:
    """`own_on_nodes` compares the image script in the same way."""
    model, optimizer, losses = run_text(None)
    assert optimizer.freezer.cut > 0, "no block was ever frozen"
    optimizer.freezer.average_statistics()
    digest = check_replicas(model, optimizer.world, step=optimizer.freezer.step)
    cached, other, same = run_text(folder)
    other.freezer.average_statistics()
    assert check_replicas(cached, other.world, step=other.freezer.step) == digest, "other bits"
    assert same == losses and other.freezer.cut_history == optimizer.freezer.cut_history
    assert list(folder.glob("*.h5")), "nothing was cached"
    cuts = world.allgather_object(str(optimizer.freezer.cut_history), name="test.cuts")
    assert len(set(cuts)) == 1, cuts
