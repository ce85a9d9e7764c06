"""Every rank is part of a grid whose front freezes: caching changes no bit, dealing ranks out anew rounds otherwise."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hvfreeze.config.tree import Config
from hvfreeze.training.run import run
from tests.parallel.twins import pool
from tests.parallel.twins.grid import Grid
from tests.parallel.workers.checking import batches_of
from tests.parallel.workers.grid import BOUNDARIES, Trial, laid_out, ranges
from tests.parallel.workers.runs import lines, see_that_stopped_runs_go_on

BATCH, STEPS, EPOCHS, LR = 12, 2, 5, 1e-3
MICRO_BATCHES = {2: 4, 3: 3, 4: 4}
"""By the number of partitions."""
GEOMETRIC = {"freeze": "geometric", "interval": STEPS, "freeze_warmup": 0}
"""Cuts 0, 2, 3, 3 and 4 in the five epochs."""
CUTS = (0, 2, 3, 3, 4)
CHILDREN = (0, 3, 4, 5, 6)
"""Of the network that so many frozen blocks are."""
READ = {2: 2, 3: 2, 4: 1}
"""By the number of partitions: epochs that read what was cached, at their cut or at one before on the same rank."""
DEALS = {2: [(0, 2), (4, 1)], 3: [(0, 3), (6, 1)], 4: [(0, 4), (4, 2), (8, 1)]}
"""By the number of partitions: from which step on there are how many, with the cache."""


class Redealt(Trial):
    """Runs that end with most blocks frozen."""

    def frozen(self, name: str, parts: int, **changes: Any) -> Config:
        shares = self.world.size // parts
        settings: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "lr": LR, **GEOMETRIC}
        # Every epoch has all samples.
        settings |= {"train_samples": STEPS * BATCH * shares * 5 // 4, "augment": "none"}
        settings |= {"cache_failure": "stop"} if "cache" in changes else {}
        return self.grid(name, (parts, shares, MICRO_BATCHES[parts]), **{**settings, **changes})

    @cached_property
    def waiting(self) -> dict[str, Any]:
        """A run that is neither cached nor dealt out anew, its name is `plain`."""
        return run(self.frozen("plain", self.world.size), self.world)

    def followed(self, config: Config, summary: dict[str, Any]) -> dict[str, Tensor]:
        """The same training in this process, with the cuts and the deals that a run says it had."""
        grid, replicas = summary["grid"], summary["grid"]["replicas"]
        torch.manual_seed(0)
        first, *later = grid["deals"]
        options = {"lr": LR, "momentum": 0.9, "weight_decay": 1e-2}
        cut = ranges(first["segments"])
        twin = Grid(laid_out(10), replicas=replicas, ranges=cut, micro_batches=grid["micro_batches"], **options)
        for epoch, steps in enumerate(batches_of(config, replicas=replicas)):
            for deal in later:
                if deal["step"] == epoch * STEPS:
                    twin.become(deal["replicas"] // len(twin.models), ranges=ranges(deal["segments"]))
            twin.freeze(CHILDREN[CUTS[epoch]])
            for batches in steps:
                lines = len(twin.models) // replicas
                twin.step([some for x, y in batches for some in zip(x.tensor_split(lines), y.tensor_split(lines))])
            pool(twin.models)
        return twin.models[0].state_dict()


def deals_of(summary: dict[str, Any]) -> list[tuple[int, int]]:
    return [(deal["step"], deal["parts"]) for deal in summary["grid"]["deals"]]


def check_cached_rows_change_no_bit_and_travel_no_more(trial: Redealt) -> None:
    size = trial.world.size
    plain = trial.waiting
    cached = run(trial.frozen("cached", size, cache="on"), trial.world)
    assert cached["parameter_digest"] == plain["parameter_digest"], "a cached run is another"
    assert cached["cut_history"] == plain["cut_history"] and len(cached["grid"]["deals"]) == 1
    samples = STEPS * BATCH
    assert cached["cache"]["exact"] and cached["cache"]["rows_read"] == READ[size] * samples, cached["cache"]
    if trial.world.rank == 0:
        with_it, without = ([line["grid"]["wire_bytes"] for line in metrics_of(trial, n)] for n in ("cached", "plain"))
        assert [line["errors"] for line in without] == [line["errors"] for line in with_it]
        # The fourth epoch has the third's cut.
        sent, usual = (line[3]["activations"] - line[2]["activations"] for line in (with_it, without))
        starts = [start for start, _ in plain["grid"]["segments"][1:]]
        assert usual == samples * sum(4 * BOUNDARIES[start] for start in starts)
        assert sent == samples * sum(4 * BOUNDARIES[start] for start in starts if start > CUTS[3])
    trial.world.barrier(name="test.cached")


def check_ranks_that_are_dealt_out_train_the_twins_model(trial: Redealt) -> None:
    size = trial.world.size
    assert trial.waiting
    summary = run_and_compare(trial, "redealt", size, cache="on")
    if trial.world.rank == 0:
        losses = ([line["train_loss"] for line in metrics_of(trial, name)] for name in ("redealt", "plain"))
        # Before the last epoch; then blocks are frozen whose running statistics have seen other micro-batches.
        for dealt, idle in list(zip(*losses, strict=True))[:-1]:
            assert math.isclose(dealt, idle, rel_tol=1e-6), "gradients are not those of ranks that wait"
    if size == 2:
        computed = run(trial.frozen("computed", size, redeal="on"), trial.world)
        assert computed["parameter_digest"] == summary["parameter_digest"], "what is cached has changed a bit"
    if size == 4:
        # Two replicas, each of which becomes two.
        run_and_compare(trial, "replicated", 2, cache="on")


def run_and_compare(trial: Redealt, name: str, parts: int, **changes: Any) -> dict[str, Any]:
    config = trial.frozen(name, parts, redeal="on", **changes)
    summary = run(config, trial.world)
    assert deals_of(summary) == DEALS[parts], f"{name}: {deals_of(summary)}"
    assert summary["grid"]["moved_bytes"] > 0
    if trial.world.rank == 0:
        found, twin = trial.model(name), trial.followed(config, summary)
        for key in twin:
            torch.testing.assert_close(found[key], twin[key], rtol=1e-6, atol=1e-6)
    trial.world.barrier(name="test.compared")
    return summary


def metrics_of(trial: Redealt, name: str) -> list[dict[str, Any]]:
    return lines(trial.root / name, "metrics")


def check_a_resumed_run_is_the_uninterrupted_one(trial: Redealt) -> None:
    given: dict[str, Any] = {"redeal": "on", "cache": "on", "accumulate": STEPS, "interval": 1}
    given |= {"optimizer": "adamw", "clip_grad": 0.1, "compression": "fp16"}

    def stops(straight: dict[str, Any]) -> list[int]:
        # Between them a resumed run sends more: it has no rows of the cut before.
        return [0, deals_of(straight)[1][0]]

    see_that_stopped_runs_go_on(partial(trial.frozen, parts=trial.world.size, **given), trial.world, stops)


setting = Redealt
