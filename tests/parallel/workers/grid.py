"""Every rank is part of a grid; the model must be the twin's, and where nothing is split that of plain replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import hvfreeze.strategies.grid.build as opening
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.errors import DivergedError
from hvfreeze.freezing import freezer
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import BuiltModel
from hvfreeze.training import blueprint
from hvfreeze.training.run import run
from tests.parallel.twins import pool
from tests.parallel.twins.grid import Grid
from tests.parallel.workers import checking
from tests.parallel.workers.checking import as_runs_lay_out, batches_of, differing, small_resnet
from tests.parallel.workers.runs import lines, see_that_stopped_runs_go_on

BATCH, STEPS, EPOCHS, LR = 16, 3, 2, 0.03
BOUNDARIES = {1: 16 * 16 * 16, 2: 16 * 16 * 16, 3: 32 * 8 * 8, 4: 64 * 4 * 4}
"""Numbers of a sample behind the stem and the three residual blocks."""


laid_out = as_runs_lay_out(small_resnet)


class Trial(checking.Trial):
    """Runs of a small network; see `checking.Trial`."""

    def __init__(self, world: World, root: Path) -> None:
        super().__init__(world, root, small_resnet)

    def config(self, name: str, *, shares: int, **changes: Any) -> Config:  # type: ignore[override]
        samples = STEPS * BATCH * shares * 5 // 4 + 2
        base = {"train_samples": samples, "batch_size": BATCH, "epochs": EPOCHS, "lr": LR, "weight_decay": 1e-2}
        base |= {"image_size": 16}
        return super().config(name, **{**base, **changes})

    def grid(self, name: str, shape: tuple[int, int, int], **changes: Any) -> Config:
        parts, replicas, number = shape
        given = {"strategy": "grid", "parts": parts, "replicas": replicas, "micro_batches": number, "cut_by": "count"}
        return self.config(name, shares=replicas, **{**given, **changes})

    def twin(self, shape: tuple[int, int, int], segments: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The same training in this process."""
        _, replicas, number = shape
        torch.manual_seed(0)
        options = {"lr": LR, "momentum": 0.9, "weight_decay": 1e-2}
        twin = Grid(laid_out(10), replicas=replicas, ranges=ranges(segments), micro_batches=number, **options)
        for epoch in batches_of(self.config("data", shares=replicas), replicas=replicas):
            for step in epoch:
                twin.step(step)
            pool(twin.models)
        return twin.models[0].state_dict()


def ranges(segments: Sequence[Sequence[int]]) -> Callable[[nn.Module], list[Callable[[Tensor], Tensor]]]:
    """How a network's children are dealt out to partitions."""

    def cut(model: Any) -> list[Callable[[Tensor], Tensor]]:
        head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu)
        blocks = [stem, model.layer1, model.layer2, model.layer3, head]
        return [nn.Sequential(*blocks[start:stop]) for start, stop in segments]

    return cut


PLACES = ("grid", "allreduce_bytes", "other_collective_bytes")
"""Parts of a record that depend on where the chain is cut."""
FROZEN = 3
SHAPES = {2: [(1, 2, 3)], 4: [(2, 2, 4), (4, 1, 5)]}
"""By the number of ranks: partitions, replicas and micro-batches; a batch of 16 divided by 3 and 5 leaves a rest."""
VOTED = {
    "freeze": "percentile",
    "eta_max": float("inf"),
    "interval": 2,
    "freeze_warmup": 1,
    "quorum": 0.25,
    "image_size": 32,
}
"""Votes that freeze blocks of whole batches within two epochs."""


def check_every_shape_is_the_twin(trial: Trial) -> None:
    for shape in SHAPES[trial.world.size]:
        name = "-".join(map(str, shape))
        summary = run(trial.grid(name, shape), trial.world)
        if shape[0] == 4:
            drained = run(trial.grid(f"{name}-drained", shape, pipeline="fill-drain"), trial.world)
            assert summary["parameter_digest"] == drained["parameter_digest"], f"{name}: schedules differ"
        see_what_travelled(shape, summary)
        if trial.world.rank == 0:
            found, expected = trial.model(name), trial.twin(shape, summary["grid"]["segments"])
            assert differing(found, expected) == [], f"{name}: not the twin"
        trial.world.barrier(name="test.shape")


def see_what_travelled(shape: tuple[int, int, int], summary: dict[str, Any]) -> None:
    parts, replicas, _ = shape
    grid, steps = summary["grid"], STEPS * EPOCHS
    inner = [start for start, _ in grid["segments"][1:]]
    assert len(inner) == parts - 1
    crossing = steps * replicas * sum(4 * BATCH * BOUNDARIES[depth] for depth in inner)
    assert grid["wire_bytes"] == {"activations": crossing, "errors": crossing}
    whole = laid_out(10)
    parameters = sum(p.nbytes for p in whole.parameters())
    assert sum(grid["optimizer_bytes"][:parts]) == parameters
    assert sum(grid["parameter_bytes"][:parts]) == parameters + sum(b.nbytes for b in whole.buffers())
    handed_over = steps * parameters if replicas > 1 else 0
    assert sum(grid["allreduce_bytes"][:parts]) == handed_over
    assert grid["parameter_bytes"][:parts] * replicas == grid["parameter_bytes"]


def check_a_grid_that_splits_no_batch_is_replicas_with_their_votes(trial: Trial) -> None:
    if trial.world.size != 4:
        return
    parts = replicas = 2
    some = trial.world.among(range(replicas))
    for kind in (
        {
            "freeze": "static",
            "cut": FROZEN,
            "optimizer": "adamw",
            "accumulate": 2,
            "momentum": 0.8,
            "compression": "fp16",
        },
        {**VOTED, "vote_weight": "loss"},
    ):
        name = kind["freeze"]
        summary = run(trial.grid(name, (parts, replicas, 1), **kind), trial.world)
        if some is not None:
            expected = run(trial.config(f"{name}-plain", shares=replicas, blocks="residual", **kind), some)
            assert summary["cut_history"] == expected["cut_history"], name
            assert summary["final_cut"] > 0, "nothing was frozen"
        if trial.world.rank == 0:
            assert differing(trial.model(name), trial.model(f"{name}-plain")) == []
            decisions, theirs = (lines(trial.root / run, "decisions") for run in (name, f"{name}-plain"))
            assert decisions == theirs, name
            scores, theirs = (
                [{key: line[key] for key in line if "loss" in key or "accuracy" in key} for line in metrics]
                for metrics in (lines(trial.root / run, "metrics") for run in (name, f"{name}-plain"))
            )
            assert scores == theirs, name
        if name == "static":
            see_that_frozen_ranges_are_silent(summary)
        trial.world.barrier(name="test.votes")


def with_a_pool(classes: int) -> BuiltModel:
    """Return a model whose second block has no parameters."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(classes))
    model(torch.zeros(1, 3, 16, 16))
    parts = [("conv", model[0]), ("pool", model[1]), ("more", model[2]), ("head", [model[3], model[4]])]
    return BuiltModel(model, [], Chain.from_modules(model, parts))


def check_a_part_without_gradients_goes_on(trial: Trial) -> None:
    if trial.world.size != 2:
        return
    alone = trial.world.among([0])
    for name, trains, kind in (("pool", True, {"freeze": "static", "cut": 1}), ("users", False, {})):

        def build(*_: Any, num_classes: int, trains: bool = trains, **__: Any) -> BuiltModel:
            built = with_a_pool(num_classes)
            built.model.get_submodule("0").requires_grad_(trains)
            return built

        with patch.object(blueprint, "build_model", build):
            run(trial.grid(name, (2, 1, 1), **{**kind, "cut_by": "given", "cut_at": "2"}), trial.world)
            if alone is not None:
                run(trial.config(f"{name}-plain", shares=1, **kind), alone)
                assert differing(trial.model(name), trial.model(f"{name}-plain")) == [], name
        trial.world.barrier(name=f"test.{name}")


def check_gradients_are_clipped_to_the_norm_of_all_parts(trial: Trial) -> None:
    if trial.world.size != 2:
        return
    alone, given = trial.world.among([0]), {"clip_grad": 0.5, "lr": 1e-3}
    run(trial.grid("clipped", (2, 1, 1), **given), trial.world)
    if alone is not None:
        run(trial.config("clipped-plain", shares=1, blocks="residual", **given), alone)
        found, expected = trial.model("clipped"), trial.model("clipped-plain")
        for key in expected:
            # PyTorch clips to a norm that is larger by a millionth.
            torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-5)
    trial.world.barrier(name="test.clipped")


def see_that_frozen_ranges_are_silent(summary: dict[str, Any]) -> None:
    grid, steps = summary["grid"], STEPS * EPOCHS
    inner = [start for start, _ in grid["segments"][1:]]
    errors = sum(4 * BATCH * BOUNDARIES[depth] for depth in inner if depth > FROZEN)
    assert grid["wire_bytes"]["errors"] == steps * grid["replicas"] * errors
    frozen = [stop <= FROZEN for _, stop in grid["segments"]] * grid["replicas"]
    assert [bytes_held == 0 for bytes_held in grid["optimizer_bytes"]] == frozen
    if grid["replicas"] > 1:
        assert [sent == 0 for sent in grid["allreduce_bytes"]] == frozen


def check_a_resumed_run_is_the_uninterrupted_one(trial: Trial) -> None:
    """Also if the blocks would be partitioned differently when the run continues."""
    if trial.world.size != 4:
        return
    given = {**VOTED, "cut_by": "compute", "checkpoint_every": "2steps", "schedule": "cosine"}
    measured = iter([[1.0] * 5, [1.0] * 5, [101.0, 1.0, 1.0, 1.0, 1.0]])
    with patch.object(opening, "block_times", lambda *_, **__: next(measured)):
        configure = partial(trial.grid, shape=(2, 2, 2), **given)
        see_that_stopped_runs_go_on(configure, trial.world, [STEPS + 1], without=PLACES)
    assert trial.world.rank > 0 or next(measured, None) is None, "no run has measured"


def check_ranks_whose_blocks_are_all_frozen_take_part_in_what_gains_are_summed(trial: Trial) -> None:
    size = trial.world.size
    # The first rank has two blocks, and both are frozen.
    given = {"freeze": "static", "cut": 3, "shadow": "coherence", "interval": 3, "freeze_warmup": 0}
    summary = run(trial.grid("all-frozen", (size, 1, 1), **given), trial.world)
    assert summary["final_cut"] == 3
    if trial.world.rank == 0:
        assert lines(trial.root / "all-frozen", "decisions"), "no vote was counted"


def check_a_line_whose_ranks_count_a_vote_otherwise_is_stopped(trial: Trial) -> None:
    size = trial.world.size
    count = freezer.hold_vote

    def miscounted(*args: Any, **options: Any) -> Any:
        decision = count(*args, **options)
        return replace(decision, cut_after=decision.cut_before + int(trial.world.rank == size - 1))

    freezer.hold_vote = miscounted
    try:
        run(trial.grid("miscounted", (size, 1, 1), **VOTED), trial.world)
    except DivergedError as error:
        assert f"rank {size - 1} has cut 1 and rank 0 has cut 0" in str(error) and error.everywhere
    else:
        raise AssertionError("ranks went on with different cuts")
    finally:
        freezer.hold_vote = count


setting = Trial
