"""Every rank runs the example scripts as they are, and compares what they trained."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.examples import image, text
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.torchvision_shim import torchvision
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


def output_of(world: World, name: str, *words: str) -> str:
    """Run a script as `python -m` does, in the world that stays open; return what rank 0 prints."""
    module, said = f"hvfreeze.examples.{name}", io.StringIO()
    stays = patch.object(world, "close", lambda: world.barrier(name="script"))
    with patch.object(sys, "argv", [module, *words]), stays, contextlib.redirect_stdout(said):
        runpy.run_module(module, run_name="__main__")
    assert bool(said.getvalue()) == (world.rank == 0)
    return str(world.broadcast_object(said.getvalue(), name="said"))


def check_a_loop_of_the_parts_learns_and_freezes(world: World) -> None:
    # A block in each stage: half the work of the script's own network.
    resnet = torchvision.models.resnet
    with patch.object(torchvision.models, "resnet18", partial(resnet.ResNet, resnet.BasicBlock, [1, 1, 1, 1])):
        said = output_of(world, "parts")
    losses = re.findall(r"loss (\S+), (\d) blocks frozen", said)
    assert len(losses) == 6 and min(float(loss) for loss, _ in losses) < 0.3, losses
    assert int(losses[0][1]) == 0 < int(losses[-1][1]), f"no block was ever frozen: {losses}"


def check_a_classifier_is_fitted_in_a_script_and_plain_horovod_trains_beside_it(world: World) -> None:
    fit_and_train(world, "classifier", least=80.0)


def fit_and_train(world: World, name: str, *, least: float) -> None:
    """Run a script that tells two accuracies, the first of a fit, which must be more than `least` per cent."""
    said = output_of(world, name, "--samples", "128", "--epochs", "1")
    found = [float(number) for number in re.findall(r"(\d+\.\d) %", said)]
    assert len(found) == 2 and found[0] > least, said
