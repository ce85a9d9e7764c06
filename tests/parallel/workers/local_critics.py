"""Every rank has layer groups of one model; the model and its critics must be the twin's, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.early_exits import add_exits
from hvfreeze.strategies.local_critics import strategy
from hvfreeze.training.run import run
from tests.parallel.twins.local_critics import LocalCritics
from tests.parallel.workers import checking
from tests.parallel.workers.checking import as_runs_lay_out, batches_of, differing, let_runs_build, small_resnet
from tests.parallel.workers.runs import interrupted, see_that_stopped_runs_go_on

BATCH, STEPS, EPOCHS, LR, CRITIC_LR, DECAY = 8, 5, 2, 0.03, 1e-3, 1e-2
PIXELS = 16
BOUNDARIES = {1: 16 * 16 * 16, 2: 16 * 16 * 16, 3: 32 * 8 * 8, 4: 64 * 4 * 4}
"""Numbers of a sample behind the stem and the three residual blocks."""
SMOOTHING = 0.1

laid_out = as_runs_lay_out(small_resnet)


def with_dropout(classes: int) -> nn.Module:
    """A network in which every group but the first draws random numbers."""
    model = small_resnet(classes)
    for name in ("layer2", "layer3"):
        setattr(model, name, nn.Sequential(getattr(model, name), nn.Dropout(0.3)))
    model.fc = nn.Sequential(nn.Dropout(0.3), model.fc)
    return model


class Trial(checking.Trial):
    """Runs of a small network; see `checking.Trial`."""

    def __init__(self, world: World, root: Path) -> None:
        super().__init__(world, root, small_resnet)
        self.alone = world.among([0])

    def config(self, name: str, **changes: Any) -> Config:
        base = {
            "strategy": "local-critics",
            "cut_by": "count",
            "critic_lr": CRITIC_LR,
            "train_samples": STEPS * BATCH * 5 // 4 + 2,
            "batch_size": BATCH,
            "image_size": PIXELS,
            "epochs": EPOCHS,
            "lr": LR,
            "weight_decay": DECAY,
            "label_smoothing": SMOOTHING,
        }
        return super().config(name, **{**base, **changes})

    def twin(self, groups: Sequence[Sequence[int]], *, critic_every: int) -> dict[str, Tensor]:
        """The same training in this process."""
        torch.manual_seed(0)
        model: Any = laid_out(10)
        torch.manual_seed(1)
        starts = [start for start, _ in groups[1:]]
        exits = add_exits(
            cut_into_blocks(model, scheme="residual"), starts, example=torch.zeros(2, 3, PIXELS, PIXELS), classes=10
        )
        head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu)
        blocks = [stem, model.layer1, model.layer2, model.layer3, head]
        twin = LocalCritics(
            [nn.Sequential(*blocks[start:stop]) for start, stop in groups],
            exits.critics,
            critic_every=critic_every,
            critic_lr=CRITIC_LR,
            smoothing=SMOOTHING,
            lr=LR,
            momentum=0.9,
            weight_decay=DECAY,
        )
        for epoch in batches_of(self.config("data")):
            for (batch,) in epoch:
                twin.step(*batch)
        state: dict[str, Tensor] = model.state_dict()
        return state


def check_model_and_critics_are_the_twin_and_ranks_in_front_do_not_wait(trial: Trial) -> None:
    """When a rank starts a step, it knows the step of the last rank. All but the first step must be ahead of it."""
    size, batches = trial.world.size, STEPS * EPOCHS
    heard: list[int] = []
    hear = strategy.LocalCritics._hear

    def look(self: Any, *, ahead: int) -> None:
        hear(self, ahead=ahead)
        heard.append(len(self._signals))

    for parts, critic_every in ((size, 1), (4, 3)):
        name = f"{parts}-{critic_every}"
        with patch.object(strategy.LocalCritics, "_hear", look):
            summary = run(trial.config(name, parts=parts, critic_every=critic_every), trial.world)
        critics = summary["critics"]
        assert len(critics["groups"]) == parts
        inner = [critics["groups"][start][0] for start, _ in critics["groups_by_rank"][1:]]
        assert len(inner) == size - 1, "a rank has no group"
        learnt = len(range(0, batches, critic_every))
        assert critics["wire_bytes"] == {
            "activations": sum(4 * BATCH * batches * BOUNDARIES[depth] for depth in inner),
            "losses": 4 * BATCH * learnt * len(inner),
        }
        if trial.world.rank == 0:
            twin = trial.twin(critics["groups"], critic_every=critic_every)
            assert differing(trial.model(name), twin) == [], f"{name}: not the twin"
        trial.world.barrier(name="test.twin")
    assert max(heard) == size, heard


def check_a_stopped_run_goes_on_bit_for_bit(trial: Trial) -> None:
    """On as many ranks, and on one: in the middle of an epoch, with messages under way when it is asked to leave."""
    let_runs_build(with_dropout)
    given = {"critic_every": 2, "schedule": "cosine", "optimizer": "adamw", "lr": 1e-3, "clip_grad": 1.0}
    # Ranks leave in the same step of the second epoch on every size, some steps after they were asked to.
    stop, configure = STEPS + 2 - trial.world.size, partial(trial.config, **given)
    straight = see_that_stopped_runs_go_on(
        configure, trial.world, [stop], part="critics", without=["other_collective_bytes"]
    )
    interrupted(configure("alone"), trial.world, after=stop)
    if trial.alone is not None:
        resumed = run(configure("alone", resume=True, resume_inexact=True), trial.alone)
        assert resumed["parameter_digest"] == straight["parameter_digest"], "one process trains otherwise"
    let_runs_build(small_resnet)
    trial.world.barrier(name="test.stopped")


def check_a_frozen_front_is_read_from_the_cache(trial: Trial) -> None:
    given = {"freeze": "static", "cut": 1, "augment": "none", "parts": trial.world.size}
    plain = run(trial.config("plain", **given), trial.world)
    cached = run(trial.config("cached", cache="on", **given), trial.world)
    assert plain["final_cut"] == cached["final_cut"] == 1
    assert cached["cache"]["rows_read"] > 0 == plain["cache"]["rows_read"]
    assert cached["parameter_digest"] == plain["parameter_digest"]
    if trial.world.rank == 0:
        torch.manual_seed(0)
        start = laid_out(10).state_dict()
        found = trial.model("cached")
        assert torch.equal(found["conv1.weight"], start["conv1.weight"]), "a frozen block was trained"
        assert torch.equal(found["bn1.running_mean"], start["bn1.running_mean"])
        assert not torch.equal(found["layer1.0.conv1.weight"], start["layer1.0.conv1.weight"])


setting = Trial
