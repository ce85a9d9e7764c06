"""A worker that is a list of checks: run on every rank, one after another, on networks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hvfreeze.comm.horovod_world import open_world
from hvfreeze.comm.world import World, end_job_on_exception
from hvfreeze.config.sections import TINY_LM
from hvfreeze.model import model_sources
from hvfreeze.model.model_sources import BuiltModel, set_memory_formats
from hvfreeze.model.narrow_resnets import NarrowResNet
from hvfreeze.model.tiny_lm import TinyLM
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.training import stage_build
from tests.parallel.mpirun import report

T = TypeVar("T")
Network = Callable[[int], nn.Module]
"""The number of classes -> a network."""


def run_checks(
    inside: Mapping[str, Any], *, on: Callable[[World], T], only: str = "", world: World | None = None
) -> None:
    """Call every `check_*` of a module's globals with `on(world)`, or `only` that one, in order, and report them."""
    torch.set_num_threads(1)
    opened = world or open_world()
    end_job_on_exception(opened)
    trial = on(opened)
    checks = [
        check
        for name, check in inside.items()
        if name.startswith("check_") and only in ("", name) and check.__module__ == inside["__name__"]
    ]
    for check in checks:
        check(trial)
    report(opened.rank, checks=[check.__name__ for check in checks])
    if world is None:
        opened.close()


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


class Trial:
    """Runs of one network with equal settings but for what is said, each in a directory of its own."""

    def __init__(self, world: World, root: Path, network: Network) -> None:
        self.world, self.root = world, root
        let_runs_build(network)

    def model(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(self.root / name / "model.pt", weights_only=True)
        return found


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
    stage_build.build_model = lambda *args, num_classes, **kwargs: BuiltModel(network(num_classes), [])  # type: ignore[assignment]


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
        set_memory_formats(model, (3, 32, 32))
        return model

    return laid_out
