"""A worker that is a list of checks: run on every rank, one after another, on networks of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hvfreeze.chain.memory_formats import set_memory_formats
from hvfreeze.chain.models import BuiltModel
from hvfreeze.ranks.horovod_world import open_world
from hvfreeze.ranks.world import World, end_job_on_exception
from hvfreeze.training.making import blueprint
from tests.parallel.mpirun import report

T = TypeVar("T")
Network = Callable[[int], nn.Module]
"""The number of classes -> a network."""


def run_checks(inside: Mapping[str, Any], *, on: Callable[[World], T]) -> None:
    """Call every `check_*` of a module's globals with `on(world)`, in order of their names, and report them."""
    torch.set_num_threads(1)
    world = open_world()
    end_job_on_exception(world)
    trial = on(world)
    checks = [check for name, check in sorted(inside.items()) if name.startswith("check_")]
    for check in checks:
        check(trial)
    report(world.rank, checks=[check.__name__ for check in checks])
    world.close()


def let_runs_build(network: Network) -> None:
    """Let every run of this process train `network`, whatever model its settings name."""
    blueprint.build_model = lambda *args, num_classes, **kwargs: BuiltModel(network(num_classes), [])  # type: ignore[assignment]


def as_runs_lay_out(network: Network) -> Network:
    """Return what makes `network` in the memory formats that runs give it, for images of 32 pixels."""

    def laid_out(classes: int) -> nn.Module:
        model = network(classes)
        set_memory_formats(model, (3, 32, 32))
        return model

    return laid_out
