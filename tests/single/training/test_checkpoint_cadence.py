"""When a checkpoint is written by default: as often as costs at most 3 % of the training time, and at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.config.run import RunConfig
from hvfreeze.ranks.world import SoloWorld
from hvfreeze.training.checkpoints import due

STEPS, EPOCHS = 10, 40


def checkpoints(*, step_seconds: float, checkpoint_seconds: float, every: str = "auto") -> tuple[list[int], float]:
    """The steps after which a run writes one, and their part of the training time."""
    seconds = {"forward": 0.0, "checkpoint": 0.0, "evaluate": 0.0}
    job: Any = SimpleNamespace(
        config=SimpleNamespace(run=RunConfig(checkpoint_every=every)),
        world=SoloWorld(),
        clock=SimpleNamespace(read=lambda: dict(seconds)),
        checkpoint_seconds=0.0,
        steps_per_epoch=STEPS,
        total_steps=STEPS * EPOCHS,
    )
    written = []
    for job.step in range(1, STEPS * EPOCHS + 1):
        seconds["forward"] += step_seconds
        job.at_epoch_end = job.step % STEPS == 0
        # Evaluating takes as long as it takes: it is no training time.
        seconds["evaluate"] += 100.0 * job.at_epoch_end
        if due.is_due(job):
            written.append(job.step)
            seconds["checkpoint"] += checkpoint_seconds
            job.checkpoint_seconds = checkpoint_seconds
    return written, seconds["checkpoint"] / (seconds["forward"] + seconds["checkpoint"])


@pytest.fixture(autouse=True)
def without_early_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "out_of_patience", lambda job: False)


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
