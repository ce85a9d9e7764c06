"""Every rank makes the same run without a cache, with one, with one that is stopped and resumed, and from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hvfreeze.comm.world import World
from hvfreeze.prefix.features import Features
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.training.run import run
from tests.parallel.workers.checking import let_runs_build, messages, small_resnet, with_folder
from tests.parallel.workers.runs import SCHEDULED, configuration, interrupted

models: Any = torchvision.models


def mobilenet() -> nn.Module:
    return models.MobileNetV2(num_classes=10, width_mult=0.25)


def resnet() -> nn.Module:
    return small_resnet(10)


def vit() -> nn.Module:
    return models.VisionTransformer(
        32, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10, dropout=0.1
    )


@with_folder
def check_a_cached_run_is_the_uncached_run(world: World, folder: Path) -> None:
    # What a family adds does not depend on the number of ranks: each takes part at one size or two.
    for build in {2: (mobilenet,), 3: (resnet, vit)}.get(world.size, (resnet,)):
        let_runs_build(lambda classes, build=build: build())  # type: ignore[misc]
        compare(world, folder, build.__name__)


def compare(world: World, root: Path, model: str) -> None:
    """Compare runs of the model that runs build."""

    def settings(name: str, **changes: Any) -> Any:
        # With two views the cut moves away from rows that were shown in half of an epoch, and from whole ones.
        views = f"views:{2 if world.size in (2, 3) else 1}"
        common = {**SCHEDULED, "interval": 6, "augment": views, "epochs": 5, "checkpoint_every": "3steps"}
        return configuration(root / f"{model}-{name}", world.size, **{**common, **changes})

    plain = run(settings("plain"), world)
    cached = run(settings("cached", cache="on"), world)
    interrupted(settings("stopped", cache="on"), world, after=9)
    resumed = run(settings("stopped", cache="on", resume=True), world)
    again = run(settings("again", cache="on", cache_dir=str(root / f"{model}-cached" / "cache")), world)
    assert len({cut for _, _, cut in plain["cut_history"]}) > 2, f"{model}: the cut hardly moved"
    for name, summary in {"cached": cached, "resumed": resumed, "again": again}.items():
        assert summary["parameter_digest"] == plain["parameter_digest"], f"{model}, {name}: other bits"
        assert summary["cache"]["exact"] is True and summary["cache"]["rows_read"] > 0, f"{model}, {name}: {summary}"


@with_folder
def check_following_the_cut_takes_a_message_for_each_thing_to_agree_on(world: World, folder: Path) -> None:
    let_runs_build(lambda classes: resnet())
    move, sent = Features.move, list[list[str]]()

    def counted(features: Features, cuts: Any) -> None:
        with messages(world) as names:
            move(features, cuts)
        # A plan that fits into the head of its message is the head alone.
        sent.append([name for name in names if name != "cache.plan"] if cuts[-1] > 0 else [])

    Features.move = counted  # type: ignore[method-assign,assignment]
    changes = {**SCHEDULED, "cache": "on", "augment": "none"}
    try:
        run(configuration(folder / "counted", world.size, **changes), world)
    finally:
        Features.move = move  # type: ignore[method-assign]
    steps = (
        *("cache.failed.{}", "verdict.cache.look.{}", "verdict.cache.measure.{}", "cache.plan.head"),
        *("verdict.cache.begin.{}", "rounds.cache.{}"),
    )
    expected = {tuple(step.format(split) for step in steps) for split in ("train", "test")}
    assert set(map(tuple, sent)) - {()} == (expected if world.size > 1 else set()), sent
