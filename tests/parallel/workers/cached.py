"""Every rank makes the same run without a cache, with one while it is stopped and resumed, and from its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from hvfreeze.comm.world import World
from hvfreeze.prefix.features import Features
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.training.run import run
from tests.parallel.workers.checking import let_runs_build, messages, with_folder
from tests.parallel.workers.runs import SCHEDULED, configuration, interrupted

models: Any = torchvision.models
UNITS = [[1, 16, 1, 1], [6, 24, 1, 2], [6, 32, 1, 2], [6, 64, 1, 2]]
"""Expansion, channels, number and stride of a small MobileNet's units."""


def mobilenet() -> nn.Module:
    return models.MobileNetV2(num_classes=10, width_mult=0.25, inverted_residual_setting=UNITS)


def vit() -> nn.Module:
    return models.VisionTransformer(
        32, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10, dropout=0.1
    )


@with_folder
def check_a_cached_run_is_the_uncached_run(world: World, folder: Path) -> None:
    # What a family adds does not depend on the number of ranks.
    build = mobilenet if world.size == 2 else vit
    let_runs_build(lambda classes: build())

    def settings(name: str, **changes: Any) -> Any:
        # With two views the cut moves away from rows that were shown in half of an epoch, and from whole ones.
        common = {**SCHEDULED, "interval": 6, "augment": "views:2", "epochs": 5, "checkpoint_every": "3steps"}
        return configuration(folder / name, world.size, **{**common, **changes})

    plain = run(settings("plain"), world)
    interrupted(settings("stopped", cache="on"), world, after=9)
    resumed = run(settings("stopped", cache="on", resume=True), world)
    with moves(world) as sent:
        again = run(settings("again", cache="on", cache_dir=str(folder / "stopped" / "cache")), world)
    assert len({cut for _, _, cut in plain["cut_history"]}) > 2, "the cut hardly moved"
    for name, summary in {"resumed": resumed, "again": again}.items():
        assert summary["parameter_digest"] == plain["parameter_digest"], f"{name}: other bits"
        assert summary["cache"]["exact"] is True and summary["cache"]["rows_read"] > 0, f"{name}: {summary}"
    steps = (
        *("cache.failed.{}", "verdict.cache.look.{}", "verdict.cache.measure.{}", "cache.plan.head"),
        *("verdict.cache.begin.{}", "verdict.rounds.cache.{}"),
    )
    # A message for each thing to agree on.
    assert set(map(tuple, sent)) == {tuple(step.format(split) for step in steps) for split in ("train", "test")}, sent


@contextmanager
def moves(world: World) -> Iterator[list[list[str]]]:
    """Collect the names of the messages of each move of the cut to a deeper one."""
    move, sent = Features.move, list[list[str]]()

    def counted(features: Features, cuts: Any) -> None:
        with messages(world) as names:
            move(features, cuts)
        # A plan that fits into the head of its message is the head alone.
        if cuts[-1] > 0:
            sent.append([name for name in names if name != "cache.plan"])

    with patch.object(Features, "move", counted):
        yield sent
