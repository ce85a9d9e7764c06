"""What a user probably did not mean, said before training starts."""

from __future__ import annotations

from collections.abc import Sequence

from hvfreeze.config.tree import Config
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.heads.kernel.fit import MOST_ROWS
from hvfreeze.training.stages.stage import Stage


def notes_on_freezing(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return notes on votes that are never held, blocks that stay untrained, heads that are other than was asked."""
    settings, notes = config.freeze, []
    untrained = config.model.weights == "none"
    if settings.auto:
        taken = stages[0].config.head
        if taken != config.head:
            same_fit = taken.head_fit == config.head.head_fit
            instead = "no mirror images" if same_fit else "head-fit exact, not kernel"
            notes.append(
                f"{instead}: there are more than {MOST_ROWS} views of samples, every pair of which kernel would compare"
            )
        solved = "the head is solved on a network with random weights; --freeze auto is for trained --weights"
        return [*notes, solved] if untrained and len(stages) == 1 else notes
    stage, epochs = stages[0], stages[0].config.optimizer.epochs
    cadence = Cadence.of(settings, steps_per_epoch=stage.steps_per_epoch, num_epochs=epochs)
    if (settings.votes or settings.shadow_names()) and cadence.first_vote >= stage.steps:
        notes.append(
            f"no vote is held: the first would be after step {cadence.first_vote}, and the run has {stage.steps}; "
            "lower --freeze-warmup or --interval, or raise --epochs"
        )
    if settings.cut and untrained:
        notes.append(
            f"the first {settings.cut} blocks keep their random initialisation; freezing is for trained --weights"
        )
    return notes
