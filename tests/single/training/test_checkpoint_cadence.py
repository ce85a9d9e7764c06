"""When a checkpoint is written by default: as often as costs at most 3 % of the training time, and at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.run import RunConfig
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
    )
    written = []
    for job.step in range(1, STEPS * EPOCHS + 1):
        seconds["forward"] += step_seconds
        job.at_epoch_end, job.epochs_done = job.step % STEPS == 0, job.step // STEPS
        # Evaluating takes as long as it takes: it is no training time.
        seconds["evaluate"] += 100.0 * job.at_epoch_end
        is_last = job.step == STEPS * EPOCHS
        if checkpoint.is_due_at_end(job, is_last=True) if is_last else checkpoint.is_due(job):
            written.append(job.step)
            seconds["checkpoint"] += checkpoint_seconds
            job.checkpoint_seconds = checkpoint_seconds
    return written, seconds["checkpoint"] / (seconds["forward"] + seconds["checkpoint"])


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
    assert checkpoints(step_seconds=0.1, checkpoint_seconds=9.0, every="15steps")[0] == [*range(15, 400, 15), 400]
    assert checkpoints(step_seconds=0.1, checkpoint_seconds=9.0, every="0")[0] == []
    assert checkpoints(step_seconds=0.1, checkpoint_seconds=9.0, every="15")[0] == [150, 300, 400]


@pytest.mark.parametrize("every", ["1", "3steps", "auto", "0"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_verb_ends_with_a_checkpoint_where_there_are_any(every: str, is_last: bool) -> None:
    seconds = {"forward": 1.0, "checkpoint": 0.0}
    job: Any = SimpleNamespace(
        config=SimpleNamespace(run=RunConfig(checkpoint_every=every)),
        world=SoloWorld(),
        clock=SimpleNamespace(read=lambda: dict(seconds)),
        checkpoint_seconds=9.0,
    )
    expected = every != "0" and (is_last or every != "auto")
    assert checkpoint.is_due_at_end(job, is_last=is_last) == expected, "with auto it would be too dear before the end"
