"""The recipes of training and of fitting a head, as ordinary code over the verbs of `Run`. See `auto.py` for `auto`.

`plain` trains with each of the seven strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvfreeze.config.tree import Config
from hvfreeze.effects import Stretch
from hvfreeze.training.auto import auto, plan_run
from hvfreeze.training.job import Job
from hvfreeze.training.parts import Part
from hvfreeze.training.verb_settings import for_head
from hvfreeze.training.verbs import Run

Recipe = Callable[[Run], None]


def plain(run: Run) -> None:
    """Train for --epochs, or until the time budget ends."""
    if run.budget.seconds is None:
        run.fine_tune(run.settings, epochs=run.settings.optimizer.epochs)
    else:
        run.fine_tune(run.settings, work=run.budget.left())


def head_alone(run: Run) -> None:
    """Fit the head on the features of frozen blocks."""
    run.fit_head(run.settings)
    run.finish_with()


def recipe_of(config: Config) -> Recipe:
    """Return the recipe of the settings."""
    if config.freeze.auto:
        return auto
    return head_alone if config.head.solved else plain


def named(config: Config) -> dict[str, Any]:
    """Return the recipe's name and the settings that must be equal on resuming; plain training may become longer."""
    name = recipe_of(config).__name__
    return {"recipe": name, **({"epochs": config.optimizer.epochs} if config.freeze.auto else {})}


def first_part(settings: Config) -> Part:
    """Return the part that a run opens before its recipe, so that invalid settings are refused early."""
    return Part(for_head(settings) if settings.freeze.auto else settings)


def planned(job: Job) -> list[Stretch]:
    """Return the parts that the recipe may open; a recipe may decide on others later."""
    config, deal = job.settings, job.factory.context.feed.plan
    if config.freeze.auto:
        plan, head = plan_run(Run(job)), Stretch(for_head(config))
        if not plan.has_room:
            return [head]
        room = job.budget.left() - job.budget.work.head_fit
        tuned = plan.settings_for(room).optimizer
        steps = max(1, int(room / job.budget.work.step(tuned.batch_size * tuned.accumulate)))
        samples = deal.batches_per_epoch * deal.batch_size
        per_epoch = tuned.steps_per_epoch(max(1, samples // tuned.batch_size))
        return [Stretch(plan.fine_tuning, steps=steps, steps_per_epoch=per_epoch), head]
    if config.head.solved:
        return [Stretch(config)]
    steps = config.optimizer.steps_per_epoch(deal.batches_per_epoch)
    made = config.optimizer.epochs * steps
    if job.budget.seconds is not None:
        each = job.budget.work.step(config.optimizer.batch_size * config.optimizer.accumulate)
        made = max(1, int(job.budget.left() / each))
    return [Stretch(config, steps=made, steps_per_epoch=steps)]
