"""--freeze auto: what happens between stages; whether tuning pays is tried, and what is best is kept.

A program over the parts of every run: each of its stages (`auto_plan`) has a configuration of its own and is opened and
trained like any other. `Guard` keeps what is best on held-out samples, `TimeBudget` chooses steps. Stages that turn out
to gain nothing lose their steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.world import World
from hvfreeze.config.sections import AUTO
from hvfreeze.data.batches import announce
from hvfreeze.data.class_shares import accuracy_in_words
from hvfreeze.errors import NumericsError
from hvfreeze.heads.features import before_last_layer
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, in_precision
from hvfreeze.strategies.base import MODEL
from hvfreeze.training.evaluation import Score, Totals, balance_of, evaluate, mean, reduce
from hvfreeze.training.guard import Guard, HeldOut, Verdict, copied
from hvfreeze.training.job import Job
from hvfreeze.training.stage_build import HELD_OUT

WORTH_IT, FEWEST_WRONG, MUCH_LEFT = 0.005, 1.5, 0.05
"""Of the held-out samples, how many must be wrong for tuning to be worth a try: half a point, and more than one sample,
of which each view counts for its part, where there are enough for one to be fewer than `MUCH_LEFT`. What one sample
gains is chance."""
MENDED = 6
"""A solution for tuned blocks mends all but one in so many mistakes of the layer tuned with them, at best: where that
leaves something to gain, longer tuning does not wait for one."""
LEAST_GAIN = 0.03
"""Part by which the loss on held-out samples falls where longer tuning is worth a try."""


def begin_stage(job: Job) -> None:
    """Before pretrained blocks are first tuned, solve the model's own last layer, and a head to compare. Collective."""
    runner, guard = job.stage_runner, job.guard
    chain, judge = runner.opened.chain, job.judge
    # A time budget may leave no steps to the first tuning: nothing is tried then.
    tunes = job.stage.steps > 0 and not job.stage.solves
    first = tunes and all(before.solves for before in runner.stages[: runner.number] if before.steps)
    if not (job.config.freeze.auto and first and job.config.model.weights != "none"):
        return
    assert judge is not None
    with job.clock.within("optimizer"):
        loss = judge.begin(chain, solves_last=not starts_from_zero(job))
    if guard is not None and guard.best is None:
        guard.trial.before, guard.trial.samples = loss, judged_by(job)
        guard.trial.guess = math.log(before_last_layer(chain)[1].out_features)
        guard.before_trial = copied(chain.model)
        suit_last_layer(job)


def end_trial(job: Job, *, failed: bool = False) -> bool:
    """Judge the first tuning, and what follows; return whether it is taken back. Collective.

    Args:
        job: the run.
        failed: whether the stage has ended early, by numbers that are not finite. A tuning that is not on trial then
            ends the run, with the best solution, or with one for the blocks that were tuned before it.
    """
    guard, runner, judge = job.guard, job.stage_runner, job.judge
    if failed and not is_on_trial(job):
        assert guard is not None
        if guard.best is None and guard.own is not None:
            job.logger.info(
                "numbers that are not finite: the tuning is taken back, the head is solved for the one before"
            )
            put_back(guard.own.state, runner.opened.chain.model)
            runner.solve_alone()
            return True
        job.logger.info("numbers that are not finite: the tuning is taken back, the best solution is kept")
        runner.drop_rest()
        go_back(job)
        return False
    if guard is None or judge is None or guard.before_trial is None:
        return False
    stage, settings, trial = runner.stage, runner.stage.config.optimizer, guard.trial
    with job.clock.within("optimizer"):
        try:
            loss = math.inf if failed else judge.loss(runner.opened.chain)
        except NumericsError:
            loss = math.inf
    trial.after, trial.way = loss if math.isfinite(loss) else math.inf, f"{settings.optimizer} at {settings.lr:g}"
    before, guard.before_trial = guard.before_trial, None
    following = runner.next_stage
    if stage.is_trial and trial.pays_at_once:
        job.logger.info(trial.line(stage.steps, "blocks still gain, tuning goes on"))
        if following is not None and following.solves:
            runner.tune_at_once()
        if trial.leaves_much and runner.tune_instead():
            job.logger.info("much is left to learn: the time of the solution behind it is tuned too")
        return False
    if not stage.is_trial and trial.pays:
        job.logger.info(trial.line(stage.steps, "what was tuned is kept"))
        return False
    put_back(before, runner.opened.chain.model)
    if not any(stage.mirror_is_open for stage in runner.stages):
        # The solution finds out about mirror images itself, on all samples.
        runner.mirror = None
    if stage.is_trial and trial.pays and following is not None and not following.is_spare:
        job.logger.info(trial.line(stage.steps, "blocks gain a little, the head is solved before they are tuned"))
        suit_last_layer(job)
    else:
        job.logger.info(trial.line(stage.steps, "no block gains enough, the head is solved for them as they were"))
        runner.solve_alone()
    return True


def give_up_tuning(job: Job) -> bool:
    """Tell whether numbers that are not finite end a tuning alone, not the run, and end it then. Collective.

    A trial, or a tuning behind a solution, or a tuned model, that the run can end with. The epoch under way is then the
    stage's last.
    """
    guard, runner = job.guard, job.stage_runner
    if guard is None or runner.stage.solves:
        return False
    ends_with_best = (guard.best or guard.own) is not None and runner.stages[-1].steps == 0
    if not (is_on_trial(job) or ends_with_best):
        return False
    job.step = runner.first_step + runner.stage.steps
    job.epochs_done = runner.first_epoch + runner.stage.epochs - 1
    return True


def is_tuned(job: Job) -> bool:
    """Tell whether the network has been trained on samples that are not held out, and was not put back since."""
    guard, runner = job.guard, job.stage_runner
    if guard is None or guard.trial.after is None:
        return runner.is_tuned
    # Such a trial is gone on from, whatever chance may do, and stays where no time is left to go on.
    kept = runner.stages[0].is_trial and guard.trial.pays_at_once
    return kept or (guard.trial.pays and runner.is_tuned)


def is_on_trial(job: Job) -> bool:
    """Tell whether what the stage tunes is taken back unless it pays."""
    return job.guard is not None and job.guard.before_trial is not None


def starts_from_zero(job: Job) -> bool:
    """Tell whether tuning begins under a last layer of zeros: with SGD at `SGD_RATE`.

    The large weights of a solved layer would make gradients too large for its rate.
    """
    return job.config.optimizer.optimizer == AUTO and job.stage.config.optimizer.optimizer == "sgd"


def suit_last_layer(job: Job) -> None:
    """Let the model's own last layer begin anew, with zeros, where that suits the way to tune."""
    if not starts_from_zero(job):
        return
    _, layer = before_last_layer(job.stage_runner.opened.chain)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()


def put_back(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Give a model the parameters and buffers of a copy."""
    with torch.no_grad():
        model.load_state_dict(state)


def go_back(job: Job, *, tuned: bool = False) -> None:
    """Open the stage without steps that the run ends with, and give it the best state. Collective.

    If `tuned`, that is one of the model's own last layer, which has not been evaluated yet.
    """
    guard, runner = job.guard, job.stage_runner
    assert guard is not None and guard.best is not None
    runner.turn_back(tuned=tuned)
    put_back(guard.best.state, runner.opened.chain.model)
    if tuned:
        with job.clock.within("evaluate"):
            guard.best.scores = evaluate(job.strategy, job.evaluation_batches, job.world)
    job.last_scores, job.last_accuracy = guard.best.scores, mean(guard.best.scores).accuracy
    job.best_accuracy = max(job.best_accuracy, job.last_accuracy)


def judge(job: Job) -> None:
    """Make the job's state the best so far, where a stage has solved a head and there is a guard. Not a collective.

    And end the run with it where nothing is left to gain.
    """
    fit, job.solved = job.solved, None
    if job.guard is None or fit is None:
        return
    before = job.guard.best.verdict if job.guard.best else None
    runner = job.stage_runner
    verdict = job.guard.judge(fit, runner.opened.chain.model, job.last_scores, stage=runner.number)
    job.logger.info(f"{verdict.line(before)}; by heads that were fitted to all other samples{beside_majority(job)}")
    best = job.guard.best
    if before is not None and best is not None:
        job.last_scores, job.last_accuracy = best.scores, mean(best.scores).accuracy
    if runner.is_last or job.budget is not None:
        return
    if before is None and not runner.is_tuned:
        if not is_worth_it(verdict, held_out_of(job)):
            leave_out_tuning(job)
    elif not goes_on(before, verdict, held_out_of(job)):
        job.logger.info("longer tuning is not expected to gain: stopped")
        runner.drop_rest()


def leave_out_tuning(job: Job) -> None:
    """End the run with its first solution, and tell which settings have no effect then. Equal on all ranks."""
    count = held_out_of(job)
    why = f"blocks are not tuned: fewer than {100 * least_wrong(count):.2g} % of the {count} held-out samples are wrong"
    before = job.unread(job.stage_runner.stages, "")
    job.stage_runner.drop_rest()
    job.logger.info(why)
    for line in job.unread(job.stage_runner.stages, why):
        if line not in before:
            job.logger.info(f"note: {line}")


def held_out_of(job: Job) -> int:
    """Return how many samples are held out, of all ranks."""
    return int(job.feed.held_out(HELD_OUT).sum())


def judged_by(job: Job) -> int:
    """Return how many samples judge a trial, about, of all ranks."""
    assert job.judge is not None
    return min(held_out_of(job), job.judge.seen[1])


def goes_on(before: Verdict | None, now: Verdict, held_out: int) -> bool:
    """Tell whether more tuning may gain: the last one did, and there is something left."""
    better = before is None or (now.kept and now.held_out_loss < (1 - LEAST_GAIN) * before.held_out_loss)
    return better and is_worth_it(now, held_out)


def is_worth_it(found: Verdict, held_out: int) -> bool:
    """Tell whether enough of so many held-out samples are wrong for tuning to gain anything."""
    return 1 - found.held_out_accuracy >= least_wrong(held_out)


def leaves_much(own: Verdict, held_out: int) -> bool:
    """Tell whether a tuned model is so often wrong that a solution for its blocks would leave something to gain."""
    return 1 - own.held_out_accuracy >= MENDED * least_wrong(held_out)


def least_wrong(held_out: int) -> float:
    """Return which part of so many held-out samples must be wrong for tuning to gain anything."""
    return max(WORTH_IT, min(MUCH_LEFT, FEWEST_WRONG / held_out))


def judge_tuned(job: Job) -> None:
    """Judge a tuned model with its own last layer; at the run's end, go back to what is best. Collective.

    The model that the run keeps is then that of the stage without steps that is opened for it.
    """
    guard, runner = job.guard, job.stage_runner
    if guard is None or guard.held_out is None or runner.stage.is_trial:
        return
    if runner.stage.solves:
        if runner.is_last:
            end_with_own(job, guard)
        return
    mirrored, precision = runner.mirror != "off", job.config.optimizer.precision
    with job.clock.within("optimizer"):
        score = score_of(runner.opened.chain, guard.held_out, mirrored=mirrored, precision=precision, world=job.world)
    if not runner.is_last:
        verdict = guard.note_own(score, runner.opened.chain.model, stage=runner.number)
        job.logger.info(f"{verdict.line(None)}; by the tuned model's own last layer{beside_majority(job)}")
        if guard.best is None and leaves_much(verdict, held_out_of(job)) and runner.tune_on():
            job.logger.info("that is too much for a solved head to mend: tuning goes on without one")
    elif guard.best is not None:
        verdict = guard.judge_tuned(score, stage=runner.number)
        job.logger.info(verdict.line(guard.best.verdict) + beside_majority(job))
        if not verdict.kept:
            go_back(job)


def end_with_own(job: Job, guard: Guard) -> None:
    """End with a tuned model's own last layer where held-out samples find no solution better. Collective."""
    if job.stage_runner.stages[-1].steps:
        # A run that goes on from a source whose plans had no stage to go back to.
        return
    own = guard.take_own()
    if own is None:
        return
    go_back(job, tuned=True)
    beside = balance_of(job.last_scores)
    balanced, majority = (beside.get(f"test_{key}") for key in ("balanced_accuracy", "majority_share"))
    job.logger.info(
        f"the tuned model's own last layer is kept: loss {own.verdict.held_out_loss:.3f} on held-out samples is less "
        "than that of every solved head | test "
        f"{accuracy_in_words(job.last_accuracy, majority=majority, balanced=balanced)}"
    )


def beside_majority(job: Job) -> str:
    """Return what stands beside an accuracy on training samples where their classes are unequal."""
    return "" if job.majority_share is None else f"; the majority class is {100 * job.majority_share:.2f} % of these"


def score_of(chain: Chain, held_out: HeldOut, *, precision: str, world: World, mirrored: bool = True) -> Score:
    """Return the means over the views of held-out samples of all ranks, without mirror images unless `mirrored`.

    Collective.
    """
    totals = Totals()
    announce(held_out.images, held_out.batches)
    with in_evaluation(chain.model), torch.no_grad():
        for batch in held_out.batches:
            images = held_out.images.load(batch.ids, batch.views)
            with in_precision(precision):
                logits = chain.run(images, 0, len(chain.blocks)).float()
            counted = torch.arange(len(batch.ids)) < batch.counted
            if not mirrored:
                counted &= ~torch.from_numpy(held_out.images.mirrored(batch.ids, batch.views))
            if counted.any():
                said, labels = logits[counted], batch.labels[counted]
                totals.add(said, labels, float(functional.cross_entropy(said.double(), labels)))
    return reduce({MODEL: totals}, [MODEL], world, name="held-out")[MODEL]


def report_of_stages(job: Job) -> dict[str, Any]:
    """Return what summary.json says of each stage, and of the solved head that was kept: None for the own layer."""
    guard, stages = job.guard, [{"stage": stage.name, "steps": stage.steps} for stage in job.stage_runner.stages]
    for verdict in guard.verdicts if guard else ():
        stages[verdict.stage] |= verdict.describe()
    tried = {"trial": guard.trial.describe()} if guard and guard.trial.after is not None else {}
    return {"stages": stages, **tried, **({"head": guard.best.head or None} if guard and guard.best else {})}
