"""Parts that workers share: small networks, and comparisons of runs."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.config.model import TINY_LM
from hvfreeze.config.tree import Config, from_dict
from hvfreeze.data.batches import open_feeds
from hvfreeze.model import model_sources
from hvfreeze.model.model_sources import BuiltModel, set_memory_formats
from hvfreeze.model.narrow_resnets import NarrowResNet
from hvfreeze.model.tiny_lm import TinyLM
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.samples.opening import open_corpus
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.training import blueprint

Network = Callable[[int], nn.Module]
"""The number of classes -> a network."""


@contextmanager
def messages(world: World) -> Iterator[list[str]]:
    """Collect the names of the messages that this rank waits for within; none where it is alone."""
    names: list[str] = []
    wait = world.wait

    def noting(handle: Any) -> Any:
        if handle is not None:
            names.append(handle[1])
        return wait(handle)

    world.wait = noting  # type: ignore[method-assign]
    try:
        yield names
    finally:
        del world.wait


def with_folder(check: Callable[[World, Path], None]) -> Callable[[World], None]:
    """Call a check with a directory that all ranks see, empty at first and gone in the end."""

    @functools.wraps(check)
    def whole(world: World) -> None:
        folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "", name="folder")
        check(world, Path(folder))
        world.barrier(name="folder")
        if world.rank == 0:
            shutil.rmtree(folder)

    return whole


class Trial:
    """Runs of one network with equal settings except the given ones, each in its own directory."""

    def __init__(self, world: World, root: Path, network: Network) -> None:
        self.world, self.root = world, root
        let_runs_build(network)

    def config(self, name: str, **settings: Any) -> Config:
        """Return a run's settings, None left out; it is evaluated on held-out samples, fewer than the test split's."""
        base = {"validation_fraction": 0.2, "threads": 1, "run_dir": str(self.root / name)}
        return from_dict({flag: value for flag, value in {**base, **settings}.items() if value is not None})

    def model(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(self.root / name / "model.pt", weights_only=True)
        return found


def batches_of(config: Config, *, replicas: int = 1) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """Yield for each epoch of a run its steps: in each the inputs and labels of all replicas."""
    corpus = open_corpus(config, SoloWorld(), replicas=replicas, clock=PhaseClock(SET_UP_PHASES))
    given = {"seed": config.data_seed, "budget_bytes": 2**30}
    feeds = [open_feeds(corpus, config.data, replica=replica, **given)[0] for replica in range(replicas)]
    for epoch in range(config.optimizer.epochs):
        steps = zip(*[feed.epoch(epoch) for feed in feeds], strict=True)
        yield [[(feed.images.load(b.ids, b.views), b.labels) for feed, b in zip(feeds, step)] for step in steps]


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that do not have the same bits; both must have the same names in the same order."""
    assert list(found) == list(expected)
    return [key for key in expected if not torch.equal(found[key], expected[key])]


def small_shufflenet(classes: int) -> nn.Module:
    """Return a ShuffleNet of the usual blocks, each of one unit with few channels: a step takes a fifth of the time."""
    model: nn.Module = torchvision.models.ShuffleNetV2([1, 1, 1], [8, 16, 48, 96, 128], num_classes=classes)
    return model


def small_resnet(classes: int) -> nn.Module:
    """Return a ResNet of a stem, three residual blocks and a head."""
    return NarrowResNet(1, num_classes=classes)


SMALL: dict[str, Network] = {"shufflenet_v2_x0_5": small_shufflenet, "resnet20": small_resnet}


def let_runs_build(network: Network) -> None:
    """Let every run of this process train `network`, whatever model its settings name."""
    blueprint.build_model = lambda *args, num_classes, **kwargs: BuiltModel(network(num_classes), [])  # type: ignore[assignment]


def let_models_be_small() -> None:
    """Let the names in `SMALL` mean small networks of their kinds, wherever this process builds a model."""
    construct = model_sources._construct

    def small(name: str, *, num_classes: int, image_size: int) -> nn.Module:
        if name == TINY_LM:
            return TinyLM(num_classes, context=image_size, layers=3)
        if name in SMALL:
            return SMALL[name](num_classes)
        return construct(name, num_classes=num_classes, image_size=image_size)

    model_sources._construct = small


def as_runs_lay_out(network: Network) -> Network:
    """Return what makes `network` in the memory formats that runs give it, for images of 32 pixels."""

    def laid_out(classes: int) -> nn.Module:
        model = network(classes)
        set_memory_formats(BuiltModel(model, []), (3, 32, 32))
        return model

    return laid_out
