"""Every rank trains alone and meets the others after every round; the model must be the twin's, and bytes are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch
from hvfreeze.errors import Preempted
from hvfreeze.training import loop
from hvfreeze.training.job import Job
from hvfreeze.training.run import run
from tests.parallel.twins.local_sgd import Copies
from tests.parallel.workers import checking
from tests.parallel.workers.checking import as_runs_lay_out, batches_of, differing, small_resnet
from tests.parallel.workers.runs import record_of, see_that_stopped_runs_go_on

BATCH, STEPS, EPOCHS, LR = 8, 4, 3, 0.03
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.999), weight_decay=1e-2),
}

laid_out = as_runs_lay_out(small_resnet)


class Trial(checking.Trial):
    """Runs of a small network; see `checking.Trial`."""

    def __init__(self, world: World, root: Path) -> None:
        super().__init__(world, root, small_resnet)

    def config(self, name: str, **changes: Any) -> Config:
        base = {
            "strategy": "local-sgd",
            "train_samples": STEPS * BATCH * self.world.size * 5 // 4 + 2,
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "lr": LR,
            "weight_decay": 1e-2,
            "checkpoint_every": "0",
        }
        return super().config(name, **{**base, **changes})

    def steps(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return for each step of a run the batches of all ranks."""
        return [step for epoch in batches_of(self.config("data"), replicas=self.world.size) for step in epoch]


def check_every_round_is_the_twin(trial: Trial) -> None:
    size = trial.world.size
    for optimizer, local_steps in (("sgd", 1), ("adamw", 5)):
        name = f"{optimizer}-{local_steps}"
        summary = run(trial.config(name, optimizer=optimizer, local_steps=local_steps), trial.world)
        found = summary["local_sgd"]
        assert found["rounds"] == STEPS * EPOCHS // local_steps
        torch.manual_seed(0)
        twin = Copies(laid_out(10), number=size, local_steps=local_steps, optimizer=OPTIMIZERS[optimizer])
        payload = sum(parameter.nbytes for parameter in twin.models[0].parameters())
        assert found["wire_bytes"] == dict.fromkeys(("parts", "means"), (size - 1) * payload * found["rounds"]), found
        looks = sum(1 for epoch in range(1, EPOCHS + 1) if epoch * STEPS % local_steps)
        assert found["evaluation_wire_bytes"] == 2 * (size - 1) * payload * looks
        assert summary["allreduce_bytes"] == (payload * found["rounds"] if size > 1 else 0)
        if trial.world.rank == 0:
            for step in trial.steps():
                twin.step(step)
            assert differing(trial.model(name), twin.seen().state_dict()) == [], f"{name}: not the twin"
        trial.world.barrier(name="test.twin")


def check_looking_changes_nothing_and_a_run_goes_on_in_the_middle_of_a_round(trial: Trial) -> None:
    given = {"local_steps": 5, "schedule": "cosine", "freeze": "static", "cut": 1, "augment": "views:2", "cache": "on"}
    see_rounds_that_are_looked_at(trial, "local_sgd", given)


def see_rounds_that_are_looked_at(trial: Trial, part: str, given: dict[str, Any]) -> dict[str, Any]:
    """Compare runs with and without checkpoints, and stopped in rounds; return the summary of one with checkpoints."""
    alone = run(trial.config("unseen", **given), trial.world)
    configure = partial(trial.config, **given, checkpoint_every="3steps")
    # A run that is asked to leave does so at a round's end; a killed run continues from its last checkpoint.
    looked = [part, "other_collective_bytes"]
    straight = see_that_stopped_runs_go_on(configure, trial.world, [6], part=part, without=looked)
    assert straight["parameter_digest"] == alone["parameter_digest"], "a checkpoint changed the training"
    if trial.world.rank == 0:
        kept = trial.root / "stop-6" / "checkpoints"
        assert (kept / "step-00000010.pt").exists(), "it left before the round's end"
    # After the checkpoint of step 6; rounds end at 5 and 10.
    killed(configure("killed"), trial.world, after=8)
    resumed = run(configure("killed", resume=True), trial.world)
    assert resumed["parameter_digest"] == straight["parameter_digest"], "a run resumed in the middle of a round differs"
    if trial.world.rank == 0:
        seen, expected = (record_of(trial.root / name, without=looked) for name in ("killed", "straight"))
        assert seen == expected
    return straight


def killed(config: Config, world: World, *, after: int) -> None:
    """Make a run that ends without a word after some steps."""
    make_step = loop.train_step

    def step(job: Job, batches: Sequence[Batch]) -> float:
        if job.step == after:
            raise Preempted("ended")
        return make_step(job, batches)

    with patch.object(loop, "train_step", step):
        try:
            run(config, world)
        except Preempted:
            return
    raise AssertionError("the run was not ended")


setting = Trial
