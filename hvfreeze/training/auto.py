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
from hvfreeze.errors import NumericsError
from hvfreeze.heads.features import before_last_layer
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation
from hvfreeze.strategies.base import MODEL
from hvfreeze.training.evaluation import Score, Totals, evaluate, mean, reduce
from hvfreeze.training.guard import Guard, HeldOut, Verdict, copied
from hvfreeze.training.job import Job
from hvfreeze.training.stage_build import HELD_OUT
from hvfreeze.training.stages import TRY, TRY_LONGER, TUNE
from hvfreeze.training.trial import seen_by

WORTH_IT, FEWEST_WRONG = 0.005, 1.5
"""Of the held-out samples, how many must be wrong for tuning to be worth a try: half a point, and more than one sample,
of which each view counts for its part, where there are enough for one to be fewer than `MUCH_LEFT`. What one sample
gains is chance."""
LEAST_GAIN = 0.03
"""Part by which the loss on held-out samples falls where longer tuning is worth a try."""
MUCH_GAIN, MUCH_LEFT = 0.2, 0.05
"""Part by which that loss falls, and part of the held-out samples still wrong, where all steps left are one tuning."""


def begin_stage(job: Job) -> None:
    """Before pretrained blocks are first tuned, solve the model's own last layer, and a head to compare. Collective.

    Another way to tune is tried on the same blocks.
    """
    runner, guard, trying = job.stage_runner, job.guard, job.stage.is_trial
    chain, judge = runner.opened.chain, job.judge
    if trying and guard is not None and guard.before_trial is not None:
        guard.after_first = copied(chain.model) if job.stage.name == TRY else None
        put_back(guard.before_trial, chain.model)
        suit_last_layer(job)
        return
    first = not job.stage.solves and all(before.solves for before in runner.stages[: runner.number])
    if not (job.config.freeze.auto and first and job.config.model.weights != "none"):
        return
    assert judge is not None
    with job.clock.within("optimizer"):
        loss = judge.begin(chain, solves_last=not starts_from_zero(job))
    if guard is not None and (trying or guard.best is None):
        guard.trial.before, guard.trial.samples = loss, judged_by(job)
        if runner.trials_to_come or guard.best is None:
            guard.before_trial = copied(chain.model)
        suit_last_layer(job)


def end_trial(job: Job, *, failed: bool = False) -> None:
    """Judge tuning after a stage that tries it, and after the last of them, whether and how it goes on. Collective.

    So is a whole tuning that nothing came before.

    Where it does not, or the first way is the better, the model goes back to that. Of many samples an epoch is tried
    where short trials gain nothing: what it gains, a long tuning gains more of.

    Args:
        job: the run.
        failed: whether the stage has ended early, by numbers that are not finite.
    """
    guard, runner, judge = job.guard, job.stage_runner, job.judge
    if failed and not is_on_trial(job):
        job.logger.info("numbers that are not finite: the tuning is taken back, the best solution is kept")
        runner.drop_rest()
        go_back(job)
        return
    if guard is None or judge is None or not is_on_trial(job):
        return
    settings, chain = runner.stage.config.optimizer, runner.opened.chain
    trial = guard.trial
    with job.clock.within("optimizer"):
        try:
            loss = math.inf if failed else judge.loss(chain)
        except NumericsError:
            loss = math.inf
    way, longer = f"{settings.optimizer} at {settings.lr:g}", runner.stage.name == TRY_LONGER
    trial.after[f"{way}, an epoch" if longer else way] = loss if math.isfinite(loss) else math.inf
    # Few samples cannot show what one way gains, and the other costs them little time.
    if TRY in runner.trials_to_come and (trial.is_promising or runner.stage.epochs > 1):
        return
    if guard.best is None:
        end_early_trial(job, guard)
        return
    assert trial.before is not None
    best = guard.best.verdict
    epoch_follows = TRY_LONGER in runner.trials_to_come and leaves_much(best)
    job.logger.info(trial.line(runner.stage.steps, epoch_follows=epoch_follows))
    if not trial.pays and epoch_follows:
        runner.leave_out(TRY)
        return
    first, guard.before_trial, guard.after_first = guard.after_first, None, None
    if not trial.pays:
        runner.drop_rest()
        go_back(job)
        return
    runner.leave_out(TRY_LONGER)
    if first is not None and trial.best == next(iter(trial.after)):
        put_back(first, chain.model)
    elif first is not None or longer:
        runner.take_other_way()
    if longer or (fell_much(trial.before, trial.loss) and leaves_much(best)):
        tune_at_once(job)


def end_early_trial(job: Job, guard: Guard) -> None:
    """Go on after a trial before any solution: with the tuning, or with a solution for the blocks as they were.

    After a whole tuning, with a solution for the tuned blocks or for those. Equal on all ranks.
    """
    runner, trial, before = job.stage_runner, guard.trial, guard.before_trial
    assert before is not None
    guard.before_trial = None
    goes_on = runner.stage.is_trial
    pays = trial.pays_early if goes_on else trial.pays
    job.logger.info(trial.early_line(runner.stage.steps, pays=pays, goes_on=goes_on))
    if not pays:
        put_back(before, runner.opened.chain.model)
        runner.leave_out(TUNE)
        # The solution finds out about mirror images itself, on all samples, where there is room for them.
        runner.mirror = None
        runner.take_other_way()


def tune_at_once(job: Job) -> None:
    """Make one tuning of those to come, and tell so. Equal on all ranks."""
    job.logger.info("one tuning takes all steps that are left")
    job.stage_runner.tune_at_once()


def give_up_tuning(job: Job) -> bool:
    """Tell whether numbers that are not finite end a tuning alone, not the run, and end it then. Collective.

    A trial, or a tuning behind a solution that the run can end with.
    """
    guard, runner = job.guard, job.stage_runner
    if guard is None or runner.stage.solves:
        return False
    ends_with_best = guard.best is not None and runner.stages[-1].steps == 0
    if not (is_on_trial(job) or ends_with_best):
        return False
    job.step = runner.first_step + runner.stage.steps
    return True


def is_on_trial(job: Job) -> bool:
    """Tell whether what the stage tunes is taken back unless it pays."""
    return job.stage_runner.stage.is_trial or (job.guard is not None and job.guard.before_trial is not None)


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
    """Make the job's state the best so far, where a stage has solved a head and there is a guard. Not a collective."""
    fit, job.solved = job.solved, None
    if job.guard is None or fit is None:
        return
    before = job.guard.best.verdict if job.guard.best else None
    runner = job.stage_runner
    verdict = job.guard.judge(fit, runner.opened.chain.model, job.last_scores, stage=runner.number)
    job.logger.info(f"{verdict.line(before)}; by heads that were fitted to all other samples")
    best = job.guard.best
    if before is None or best is None:
        if not is_worth_it(verdict, held_out_of(job)) and job.budget is None and not runner.is_last:
            leave_out_tuning(job)
        return
    job.last_scores, job.last_accuracy = best.scores, mean(best.scores).accuracy
    if runner.is_last or job.budget is not None:
        return
    if not goes_on(before, verdict, held_out_of(job)):
        job.logger.info("longer tuning is not expected to gain: stopped")
        runner.drop_rest()
    elif fell_much(before.held_out_loss, verdict.held_out_loss) and leaves_much(verdict):
        tune_at_once(job)


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
    return min(held_out_of(job), seen_by(job.feed.plan.samples)[1])


def goes_on(before: Verdict, now: Verdict, held_out: int) -> bool:
    """Tell whether more tuning may gain: the last one did, and there is something left."""
    better = now.kept and now.held_out_loss < (1 - LEAST_GAIN) * before.held_out_loss
    return better and is_worth_it(now, held_out)


def fell_much(before: float, now: float) -> bool:
    """Tell whether a loss on held-out samples fell so much that short tunings on the way to a long one waste steps."""
    return now < (1 - MUCH_GAIN) * before


def leaves_much(found: Verdict) -> bool:
    """Tell whether so many held-out samples are wrong that a long tuning may gain."""
    return 1 - found.held_out_accuracy >= MUCH_LEFT


def is_worth_it(found: Verdict, held_out: int) -> bool:
    """Tell whether enough of so many held-out samples are wrong for tuning to gain anything."""
    return 1 - found.held_out_accuracy >= least_wrong(held_out)


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
    if guard.best is None and runner.other_way:
        # The whole tuning was taken back.
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
        job.logger.info(f"{verdict.line(None)}; by the tuned model's own last layer")
    elif guard.best is not None:
        verdict = guard.judge_tuned(score, stage=runner.number)
        job.logger.info(verdict.line(guard.best.verdict))
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
    job.logger.info(
        f"the tuned model's own last layer is kept: loss {own.verdict.held_out_loss:.3f} on held-out samples is less "
        f"than that of every solved head | test {100 * job.last_accuracy:.2f} %"
    )


def score_of(chain: Chain, held_out: HeldOut, *, precision: str, world: World, mirrored: bool = True) -> Score:
    """Return the means over the views of held-out samples of all ranks, without mirror images unless `mirrored`.

    Collective.
    """
    totals = Totals()
    announce(held_out.images, held_out.batches)
    with in_evaluation(chain.model), torch.no_grad():
        for batch in held_out.batches:
            images = held_out.images.load(batch.ids, batch.views)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
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
    tried = {"trial": guard.trial.describe()} if guard and guard.trial.after else {}
    return {"stages": stages, **tried, **({"head": guard.best.head or None} if guard and guard.best else {})}
