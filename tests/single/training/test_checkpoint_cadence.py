"""When a checkpoint is written by default: as often as costs at most 3 % of the training time, and at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.sections import RunConfig
from hvfreeze.training import checkpoint

STEPS, EPOCHS = 10, 40


def checkpoints(*, step_seconds: float, checkpoint_seconds: float, every: str = "auto") -> tuple[list[int], float]:
    """The steps after which a run writes one, and their part of the training time."""
    seconds = {"forward": 0.0, "checkpoint": 0.0, "evaluate": 0.0}
    job: Any = SimpleNamespace(
        config=SimpleNamespace(run=RunConfig(checkpoint_every=every)),
        world=SoloWorld(),
        clock=SimpleNamespace(read=lambda: dict(seconds)),
        checkpoint_seconds=0.0,
        stage=SimpleNamespace(solves=False),
        total_steps=STEPS * EPOCHS,
    )
    written = []
    for job.step in range(1, STEPS * EPOCHS + 1):
        seconds["forward"] += step_seconds
        job.at_epoch_end, job.epochs_done = job.step % STEPS == 0, job.step // STEPS
        # Evaluating takes as long as it takes: it is no training time.
        seconds["evaluate"] += 100.0 * job.at_epoch_end
        if checkpoint.is_due(job):
            written.append(job.step)
            seconds["checkpoint"] += checkpoint_seconds
            job.checkpoint_seconds = checkpoint_seconds
    return written, seconds["checkpoint"] / (seconds["forward"] + seconds["checkpoint"])


@pytest.fixture(autouse=True)
def without_early_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "out_of_patience", lambda job: False)


def test_cheap_checkpoints_are_written_after_every_epoch_and_dear_ones_as_often_as_they_may() -> None:
    cheap, share = checkpoints(step_seconds=1.0, checkpoint_seconds=0.1)
    assert cheap == list(range(STEPS, STEPS * EPOCHS + 1, STEPS)) and share < 0.03
    dear, share = checkpoints(step_seconds=0.1, checkpoint_seconds=0.2)
    assert dear[0] == STEPS, "the first is written soon: what it costs is not known yet"
    assert dear[-1] == STEPS * EPOCHS, "and one at the end, always"
    assert 3 < len(dear) < 10 and all(step % STEPS == 0 for step in dear)
    # The last is owed, whatever it costs.
    assert share < 0.03 + 0.2 / (0.1 * STEPS * EPOCHS)


def test_what_the_user_asks_for_is_done() -> None:
    assert checkpoints(step_seconds=0.1, checkpoint_seconds=9.0, every="15s")[0] == [*range(15, 400, 15), 400]
    assert checkpoints(step_seconds=0.1, checkpoint_seconds=9.0, every="0")[0] == []
    assert checkpoints(step_seconds=0.1, checkpoint_seconds=9.0, every="15")[0] == [150, 300, 400]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        # Epochs of the run end after steps 7 (solved), 12, 17, 20 (cut short), 24, 28, 32 and 35 (solved).
        ("1", [7, 12, 17, 20, 24, 28, 32, 35]),
        ("2", [12, 20, 28, 35]),
        ("3", [17, 28, 35]),
        # A solution stands for many steps at once.
        ("3s", [7, 9, 12, 15, 18, 21, 24, 27, 30, 35]),
        ("8s", [8, 16, 24, 32, 35]),
        ("0", []),
    ],
)
def test_epochs_and_steps_are_the_runs_whatever_stages_it_has(every: str, expected: list[int]) -> None:
    job: Any = SimpleNamespace(
        config=SimpleNamespace(run=RunConfig(checkpoint_every=every)),
        step=0,
        epochs_done=0,
        total_steps=35,
        stage_runner=SimpleNamespace(first_step=0),
    )
    written = []
    for solves, steps, per_epoch in ((True, 7, 7), (False, 13, 5), (False, 12, 4), (True, 3, 3)):
        job.stage, job.stage_runner.first_step = SimpleNamespace(solves=solves), job.step
        for made in [steps] if solves else range(1, steps + 1):
            job.step = job.stage_runner.first_step + made
            job.at_epoch_end = made % per_epoch == 0 or made == steps
            job.epochs_done += job.at_epoch_end
            if checkpoint.is_due(job):
                written.append(job.step)
    assert written == expected
