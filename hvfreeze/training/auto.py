"""hvfreeze auto: fine-tune only while that pays for its time, then end with what is best on held-out samples.

Read `auto` from top to bottom. Work is counted in forward passes of one sample: `run.budget.left()` says how much is
left, of --epochs or of a time budget, and `run.budget.work` what each verb costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.config.sections import AUTO
from hvfreeze.config.tree import Config
from hvfreeze.training.evaluation import Score, fall
from hvfreeze.training.verb_settings import default, for_round, for_trial, solving, tuning, with_sgd
from hvfreeze.training.verbs import Run

SGD_RATE = 0.05
"""Learning rate of SGD: photographs reach 98.7 % at 0.05, 94.0 % at 0.003; dots 91.9 % at 0.05, 88.8 % at 0.02."""
BATCHES, ENOUGH_STEPS = (64, 32, 16), 400
"""Batches get smaller until there are enough steps: 600 images of dots reach 76, 87 and 92 % with 64, 32 and 16."""
TRIAL_STEPS, WORTH_TUNING = 20, 0.15
"""20 steps of trial lower a probe's loss by 19 to 60 % on far tasks, and raise it by 1 to 21 % on near ones."""
MANY, LEAST_GAIN = 15_000, 0.04
"""With so many samples a trial tells nothing (+31 % on CIFAR-10), a whole round does: its probe's loss falls by 9 %."""
ROUND, LEAST_STEPS = 3, 100
"""Epochs and steps of the first round: they are all that photographs and 50,000 images of CIFAR-10 need."""
LONGER = 0.25
"""Fall of a probe's loss in a round from which on a longer one pays: dots 50 % and more, CIFAR-10 9 to 11 %."""
GOOD_ENOUGH = 0.005
"""Share of held-out samples that may be wrong. Half a point on photographs and dots is within the seeds' spread."""


def auto(run: Run) -> None:
    """Fine-tune while it pays; end with the better of the network and a head on the features of all its blocks."""
    way, work = choose_way(run), run.budget.work
    if not way.has_room:
        end(run, way)
    elif not run.settings.freeze.has("guard"):
        room = run.budget.left() - work.solve
        run.tune(way.round(room), work=room, zeroes_last_layer=way.has_sgd)
        end(run, way, is_tuned=True)
    else:
        run.snapshot("kept")
        pays, loss = trial(run, way)
        own = rounds(run, way, loss) if pays else None
        if own is None:
            run.say("=> the pretrained blocks stay as they are")
            run.restore("kept")
        end(run, way, own, is_tuned=own is not None)


def trial(run: Run, way: Way) -> tuple[bool, float]:
    """Return whether a few steps of fine-tuning pay, and a probe's loss; of many samples a whole round has to tell."""
    if not way.is_pretrained:
        return True, math.inf
    before = run.probe(way.solving, way.tuning, is_tuned=False)
    if not way.has_sgd:
        run.fit_last_layer(way.solving, way.tuning)
    if way.has_many:
        return True, before
    tuned = run.tune(way.trial, steps=way.trial_steps, holds_out=True, zeroes_last_layer=way.has_sgd, may_fail=True)
    after = run.probe(way.solving, way.tuning) if tuned.is_finite else math.inf
    run.say(f"trial: {tuned.steps} steps of {way.name}: held-out loss {fall(before, after)}")
    return after < (1 - WORTH_TUNING) * before, after


def rounds(run: Run, way: Way, loss: float) -> Score | None:
    """Fine-tune in rounds, each twice as long as the one before; return the network's held-out score.

    None where many samples' first round did not pay. `loss` is a probe's before the first.
    """
    work, share, best = run.budget.work, way.first_round, None
    while True:
        first, left = best is None, run.budget.left() - work.held_out - work.probe
        room = left - work.solve
        if room < way.epoch:
            if not first:
                return best
            # There is no time for both: where a trial has paid, steps gain more than a head.
            room = left
        is_last = room < 2 * share or not way.is_pretrained
        spent, begins = room if is_last else share, first and (way.has_many or not way.is_pretrained)
        settings, zeroes = way.round(spent, warms_up=begins or not first), way.has_sgd and begins
        tuned = run.tune(settings, work=spent, holds_out=True, zeroes_last_layer=zeroes, may_fail=True)
        own = run.held_out(way.solving) if tuned.is_finite else Score(math.inf, 0.0)
        run.say(f"fine-tuned: {tuned.steps} steps: held-out {own.described}")
        if best is not None and not own.loss < best.loss:
            run.say("=> reverted to the round before")
            run.restore("kept")
            return best
        judges = (way.has_many and first) or not is_last
        after = run.probe(way.solving, way.tuning) if tuned.is_finite and judges else math.inf
        if not tuned.is_finite or (way.has_many and first and after > (1 - LEAST_GAIN) * loss):
            return None
        run.snapshot("kept")
        # A round at best halves what is wrong.
        if is_last or 1 - own.accuracy < 2 * GOOD_ENOUGH or not after < (1 - LONGER) * loss:
            return own
        best, loss, share = own, after, 2 * share


def end(run: Run, way: Way, own: Score | None = None, *, is_tuned: bool = False) -> None:
    """End with a head that is fitted to the features, or with a fine-tuned network, of held-out score `own`."""
    # Half: where time was kept for a head, a clock may have taken some of it.
    has_time = run.settings.freeze.has("last-solve") and run.budget.left() >= 0.5 * run.budget.work.solve
    if is_tuned and (not has_time or (own is not None and 1 - own.accuracy < GOOD_ENOUGH)):
        run.finish_with(way.tuning)
        return
    head = run.solve(way.solving, is_tuned=is_tuned)
    is_kept = own is None or head.loss <= own.loss
    run.say(f"head fitted: held-out {head.described}{'' if is_kept else ': the network is better, and kept'}")
    if not is_kept:
        run.restore("kept")
    run.finish_with(None if is_kept else way.tuning)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the network is fine-tuned, and whether there is room for it."""

    solving: Config
    tuning: Config
    has_sgd: bool
    """SGD at a large rate, from zeros in the last layer; networks without BatchNorm have AdamW at a small one."""
    is_pretrained: bool
    has_many: bool
    trial: Config
    trial_steps: int
    epoch: float
    """The work of an epoch of full fine-tuning, as --epochs counts it."""
    first_round: float
    has_room: bool
    round: Callable[..., Config]
    """The settings of so much work of fine-tuning, in batches of which there are enough."""

    @property
    def name(self) -> str:
        """The optimizer and its rate."""
        return f"{self.tuning.optimizer.optimizer} at {self.tuning.optimizer.lr:g}"


def choose_way(run: Run) -> Way:
    """Return how a run fine-tunes; give its budget the work of --epochs of full fine-tuning."""
    settings, table, factory = run.settings, run.budget.work, run.job.factory
    plan, asked = factory.context.feed.plan, settings.optimizer.batch_size
    pretrained, samples = settings.model.weights != "none", plan.batches_per_epoch * plan.batch_size
    many = pretrained and plan.samples >= MANY
    normalises = any(isinstance(module, _BatchNorm) for module in factory.context.chain.model.modules())
    sgd = normalises and pretrained and settings.optimizer.optimizer == AUTO
    tuned = tuning(with_sgd(settings, SGD_RATE) if sgd else settings)

    def batch_for(steps: Callable[[int], float]) -> int:
        """Return the largest batch with enough steps; a small one only where updates take less time than samples."""
        if "batch_size" in settings.given or not (sgd or many):
            return asked
        # Twice the batch at twice the rate where there are many samples (Goyal et al., 2017).
        sizes = [2 * BATCHES[0], *BATCHES] if many else list(BATCHES)
        cheap = [size for size in sizes if size >= BATCHES[0] or table.update <= 0.6 * table.step(size)]
        fitting = [size for size in cheap if size <= samples // 2 and steps(size) >= ENOUGH_STEPS]
        return min(fitting[0] if fitting else cheap[-1], max(asked, samples // 2))

    def round_of(work: float, *, warms_up: bool = True) -> Config:
        batch = batch_for(lambda size: work / table.step(size))
        larger = batch / BATCHES[0] if sgd and batch > BATCHES[0] else 1.0
        return for_round(tuned, batch, rate=larger, warmup=int(0.1 * work / table.step(batch)) if warms_up else 0)

    tried, whole = for_trial(tuned, warmup=TRIAL_STEPS // 10), replace(table, frozen=0.0)
    half = tried.optimizer.batch_size
    trial_steps = TRIAL_STEPS if sgd and samples // half >= TRIAL_STEPS else 2 * TRIAL_STEPS
    trial_steps = max(1, min(trial_steps, 4 * (samples // half)))
    full = batch_for(lambda size: default("epochs") * samples / size)
    epoch = samples / full * whole.step(full)
    tried_work = trial_steps * table.step(half) + 2 * table.probe
    # A trial of more than an epoch comes on top: few samples have few steps in all.
    on_top = tried_work if trial_steps * half > samples and settings.optimizer.epochs > 1 else 0.0
    run.budget.limit = settings.optimizer.epochs * epoch + on_top
    least = 2 * table.probe + epoch if many or not pretrained else tried_work + 0.5 * epoch
    first = max(ROUND * epoch, LEAST_STEPS * table.step(round_of(ROUND * epoch).optimizer.batch_size))
    return Way(
        solving=solving(factory.with_affordable_flips(settings)),
        tuning=tuned,
        has_sgd=sgd,
        is_pretrained=pretrained,
        has_many=many,
        trial=tried,
        trial_steps=trial_steps,
        epoch=epoch,
        first_round=first,
        has_room=factory.can_hold_out() and run.budget.left() >= table.solve + least,
        round=round_of,
    )
