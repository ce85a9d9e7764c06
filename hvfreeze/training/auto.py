"""hvfreeze auto: fine-tune while that pays for its time, then keep what scores best on held-out samples.

Read `auto` first. The held-out loss of a probe, a small head on the features of all blocks, decides whether to start
and continue fine-tuning; the held-out score of the network (its loss, or --metric), which model to keep. Costs are work
in forward passes of a sample; `run.budget.left()` is what remains of --epochs or, at measured speed, of --time-budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.config.freeze import AUTO
from hvfreeze.config.tree import Config
from hvfreeze.training.evaluation import Score, fall
from hvfreeze.training.verb_settings import default, for_head, for_network, for_round, for_trial, in_short, with_sgd
from hvfreeze.training.verbs import Run

# Tasks: photographs of signed digits and dot counting, far from the pretraining data; CIFAR-10 and rotation, near it.
SGD_RATE = 0.05
"""Learning rate of SGD: photographs reach 98.7 % at 0.05, 94.0 % at 0.003; dots 91.9 % at 0.05, 88.8 % at 0.02."""
BATCHES, MIN_STEPS = (64, 32, 16), 400
"""Batch sizes, and the fewest steps that a size must allow: 600 dot images reach 76, 87 and 92 % with 64, 32 and 16."""
TRIAL_STEPS, MIN_FALL = 20, 0.05
"""Steps of the trial, and the least fall of the probe's loss: far tasks 6 to 60 %, near ones none (it rises)."""
MANY_SAMPLES = 15_000
"""Samples from which a whole round is the trial: on 20,000 of CIFAR-10, 20 steps raise the loss, a round lowers it."""
FIRST_ROUND_EPOCHS, FIRST_ROUND_STEPS = (3, 4), 100
"""Epochs, with few and many samples, and fewest steps: 20,000 of CIFAR-10 reach 81.2, 81.3, 82.2 % after 0, 2, 4."""
MIN_FALL_TO_CONTINUE = 0.4
"""Fall of the probe's loss in a round that makes a longer round pay: dots 50 % and more; CIFAR-10 only 9 to 29 %."""
GOOD_ENOUGH = 0.07
"""Held-out loss below which fine-tuning ends: photographs reach 0.05 in the first round; dots 0.28, then 0.10."""


def auto(run: Run) -> None:
    """Fine-tune while it pays; keep the better of the network and a head fitted to the features of all its blocks."""
    plan = plan_run(run)
    if not plan.has_room:
        finish(run, plan)
    elif not run.settings.freeze.has("guard"):
        room = run.budget.left() - run.budget.work.head_fit
        run.fine_tune(plan.settings_for(room), work=room, zeroes_last_layer=plan.has_default_sgd)
        finish(run, plan, is_fine_tuned=True)
    else:
        run.snapshot("kept")
        pays, probed = trial(run, plan) if plan.is_pretrained else (True, math.inf)
        network = fine_tune(run, plan, probed) if pays else None
        if network is None:
            run.say(f"=> keeping the {'pretrained' if plan.is_pretrained else 'initial'} blocks")
            run.restore("kept")
        finish(run, plan, network, is_fine_tuned=network is not None)


def trial(run: Run, plan: Plan) -> tuple[bool, float]:
    """Return whether a few steps of fine-tuning pay, True with many samples: a round decides; and the probe's loss."""
    before = run.probe(plan.head_fit, plan.fine_tuning, is_fine_tuned=False)
    if not plan.has_default_sgd:
        run.fit_last_layer(plan.head_fit, plan.fine_tuning)
    if not plan.has_trial:
        return True, before
    zeroes = plan.has_default_sgd
    tried = run.fine_tune(plan.trial, steps=plan.trial_steps, holds_out=True, zeroes_last_layer=zeroes, may_fail=True)
    after = run.probe(plan.head_fit, plan.fine_tuning) if tried.is_finite else math.inf
    run.say(f"trial: {tried.steps} steps ({in_short(plan.trial)}): held-out loss {fall(before, after, MIN_FALL)}")
    return after < (1 - MIN_FALL) * before, after


def fine_tune(run: Run, plan: Plan, probed: float) -> Score | None:
    """Fine-tune in rounds, each twice as long as the one before; one that leaves too little for another uses all.

    Return the network's held-out score, or None if the first round did not pay. `probed` is the probe's loss before it.
    """
    costs, length, best = run.budget.work, plan.first_round, None
    while True:
        left = run.budget.left() - costs.held_out - costs.probe
        room = left - costs.head_fit
        if room < plan.epoch:
            if best is not None or plan.has_many or left <= 0:
                return best
            # No time for both: after a trial that paid, more steps gain more than a fitted head.
            room = left
        is_first, is_last = best is None, room < 2 * length or not plan.is_pretrained
        work = room if is_last else length
        settings = plan.settings_for(work, warms_up=not (is_first and plan.has_trial))
        zeroes = plan.has_default_sgd and is_first and not plan.has_trial
        tuned = run.fine_tune(settings, work=work, holds_out=True, zeroes_last_layer=zeroes, may_fail=True)
        network = run.held_out(plan.head_fit) if tuned.is_finite else Score(math.inf, 0.0)
        run.say(f"fine-tuned: {tuned.steps} steps ({in_short(settings)}): held-out {network.described}")
        if best is not None and not network.cost < best.cost:
            run.say("=> reverted to the round before")
            run.restore("kept")
            return best
        if not tuned.is_finite:
            return None
        is_trial = is_first and plan.has_many
        ends = is_last or network.loss < GOOD_ENOUGH
        after = run.probe(plan.head_fit, plan.fine_tuning) if is_trial or not ends else math.inf
        if is_trial and not after < (1 - MIN_FALL) * probed:
            run.say(f"trial: held-out loss of a head on the features {fall(probed, after, MIN_FALL)}")
            return None
        run.snapshot("kept")
        if ends or not after < (1 - MIN_FALL_TO_CONTINUE) * probed:
            return network
        best, probed, length = network, after, 2 * length


def finish(run: Run, plan: Plan, network: Score | None = None, *, is_fine_tuned: bool = False) -> None:
    """End the run with a head on the features of all blocks, or with the network, whose held-out score is `network`."""
    # Half: with a time budget, fine-tuning may have used some of the time reserved for the head.
    has_time = run.settings.freeze.has("last-solve") and run.budget.left() >= 0.5 * run.budget.work.head_fit
    if is_fine_tuned and not has_time:
        if run.settings.freeze.has("last-solve"):
            run.say("=> keeping the network: too little of the budget is left to fit a head")
        run.finish_with(plan.fine_tuning)
        return
    head = run.fit_head(plan.head_fit, is_fine_tuned=is_fine_tuned)
    head_wins = network is None or head.cost <= network.cost
    run.say(f"head fitted: held-out {head.described}{run.verdict(head, network, head_wins)}")
    if not head_wins:
        run.restore("kept")
    run.finish_with(None if head_wins else plan.fine_tuning)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the network is fine-tuned, and whether there is room for it."""

    head_fit: Config
    fine_tuning: Config
    has_default_sgd: bool
    """Whether to use SGD at a large rate from a zeroed last layer. Without BatchNorm it is AdamW at a small rate."""
    is_pretrained: bool
    has_many: bool
    has_trial: bool
    """Whether a trial of a few steps decides if fine-tuning pays."""
    trial: Config
    trial_steps: int
    epoch: float
    """The work of an epoch without frozen blocks, as --epochs counts it: with frozen blocks it makes more steps."""
    first_round: float
    has_room: bool
    settings_for: Callable[..., Config]
    """Returns the fine-tuning settings for an amount of work, with batches small enough for MIN_STEPS steps."""


def plan_run(run: Run) -> Plan:
    """Return the plan of a run; set its budget to the work of --epochs of full fine-tuning."""
    settings, costs, factory = run.settings, run.budget.work, run.job.factory
    deal, asked, accumulate = factory.context.feed.plan, settings.optimizer.batch_size, settings.optimizer.accumulate
    pretrained, samples = settings.model.weights != "none", deal.batches_per_epoch * deal.batch_size
    many = pretrained and deal.samples >= MANY_SAMPLES
    normalises = any(isinstance(module, _BatchNorm) for module in factory.context.chain.model.modules())
    sgd = normalises and pretrained and settings.optimizer.optimizer == AUTO
    fine_tuning = for_network(with_sgd(settings, SGD_RATE) if sgd else settings)

    def batch_for(steps: Callable[[int], float]) -> int:
        """Return the largest batch size with enough steps; below 64 only if an update takes at most 60 % of a step."""
        if "batch_size" in settings.given or not (sgd or many):
            return asked
        # With many samples, twice the batch at twice the rate (Goyal et al., 2017).
        sizes = [2 * BATCHES[0], *BATCHES] if many else list(BATCHES)
        cheap = [size for size in sizes if size >= BATCHES[0] or costs.update <= 0.6 * costs.step(accumulate * size)]
        fitting = [size for size in cheap if size <= samples // 2 and steps(size) >= MIN_STEPS]
        return min(fitting[0] if fitting else cheap[-1], max(asked, samples // 2))

    def settings_for(work: float, *, warms_up: bool = True) -> Config:
        batch = batch_for(lambda size: work / costs.step(accumulate * size))
        rate, steps = max(1.0, batch / BATCHES[0]) if sgd else 1.0, max(0.0, work / costs.step(accumulate * batch))
        return for_round(fine_tuning, batch, rate=rate, warmup=int(0.1 * steps) * warms_up)

    trial_settings = for_trial(fine_tuning, warmup=TRIAL_STEPS // 10)
    trial_batch = trial_settings.optimizer.batch_size
    trial_steps = TRIAL_STEPS if sgd and samples // trial_batch >= TRIAL_STEPS else 2 * TRIAL_STEPS
    trial_steps = max(1, min(trial_steps, 4 * (samples // trial_batch)))
    trial_work = trial_steps * costs.step(trial_batch) + 2 * costs.probe
    full_batch = batch_for(lambda size: default("epochs") * samples / (accumulate * size))
    epoch = samples / (accumulate * full_batch) * replace(costs, frozen=0.0).step(accumulate * full_batch)
    # With few samples, a trial longer than an epoch is added to the budget; else it would leave little for the rounds.
    is_extra = pretrained and not many and trial_steps * trial_batch > samples and settings.optimizer.epochs > 1
    run.budget.limit = settings.optimizer.epochs * epoch + is_extra * trial_work
    least = 2 * costs.probe + epoch if many or not pretrained else trial_work + 0.5 * epoch
    first_batch = settings_for(FIRST_ROUND_EPOCHS[many] * epoch).optimizer.batch_size
    return Plan(
        head_fit=for_head(factory.with_affordable_flips(settings)),
        fine_tuning=fine_tuning,
        has_default_sgd=sgd,
        is_pretrained=pretrained,
        has_many=many,
        has_trial=pretrained and not many,
        trial=trial_settings,
        trial_steps=trial_steps,
        epoch=epoch,
        first_round=max(FIRST_ROUND_EPOCHS[many] * epoch, FIRST_ROUND_STEPS * costs.step(accumulate * first_batch)),
        has_room=factory.can_hold_out() and run.budget.left() >= costs.head_fit + least,
        settings_for=settings_for,
    )
