"""--freeze auto: solve the head; try whether tuning pays; tune and solve again, longer each time, while it does.

A program over the parts of every run: each of its stages has a configuration of its own and is opened and trained like
any other. `Guard` keeps what is best on held-out samples, `TimeBudget` chooses steps. Stages that turn out to gain
nothing lose their steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.world import World
from hvfreeze.config.sections import AUTO, WEIGHT_DECAYS, HeadConfig, OptimizerConfig
from hvfreeze.config.tree import SOLVED, Config, leaves
from hvfreeze.data.batches import announce
from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.heads.features import before_last_layer
from hvfreeze.heads.kernel import ALL_COMPARED, centres_for
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import work_of
from hvfreeze.strategies.base import MODEL
from hvfreeze.training.evaluation import Score, Totals, mean, reduce
from hvfreeze.training.guard import Guard, HeldOut, Verdict, copied
from hvfreeze.training.job import Job
from hvfreeze.training.stage_build import HELD_OUT, StageFactory
from hvfreeze.training.stages import SOLVE, TRY, TRY_LONGER, TUNE, Stage
from hvfreeze.training.trial import LEAST_WORK, MANY, TUNED, judging

WARMUP = 0.1
"""Part of a stage's steps in which the learning rate rises, where --lr-warmup does not say."""
SOLVING = 0.15
"""What solving takes beside the features' forward pass, as a part of it, but for comparing rows."""
PAIR = 14e3
"""Floating-point operations of the forward pass in whose time a row is compared with another, as measured."""
WORTH_IT, FEWEST_WRONG = 0.005, 1.5
"""Of the held-out samples, how many must be wrong for tuning to be worth a try: half a point, and more than one sample,
of which each view counts for its part, where there are enough for one to be fewer than `MUCH_LEFT`. What one sample
gains is chance."""
LEAST_GAIN = 0.03
"""Part by which the loss on held-out samples falls where longer tuning is worth a try."""
MUCH_GAIN, MUCH_LEFT = 0.2, 0.05
"""Part by which that loss falls, and part of the held-out samples still wrong, where all steps left are one tuning."""
LONG = 4.0
"""Epochs of tuning that are left where one more is tried before them."""
SGD_RATE, LARGER_BATCH, ENOUGH_STEPS, MOST_UPDATING = 0.05, 64, 400, 1.5
"""Of the way to tune by SGD that is tried beside AdamW's: it takes the largest batches, up to such ones, of which there
are so many. With fewer steps the blocks learn less, however many samples each has. But none so small that an update
takes that many times as long as its samples' passes. Of many samples AdamW takes the larger batches too: its updates
then take half the time, and there are enough of them."""
FEWEST_TUNED, LEAST_TUNED = 4.0, 0.5
"""Where --epochs are fewer than auto takes by itself, tuning is tried before a head is solved, and goes on from there
where it pays. The head that is solved behind it has mirror images where at least so many epochs are tuned beside; there
is no such tuning where even without them fewer than the last are left."""
EARLY_GAIN = 0.15
"""Part by which the loss falls in such a trial where it pays: no solution could be gone back to. On far tasks it fell
by a quarter and more, on near ones, judged by few samples, by a twenty-fifth at most."""
BACKWARD, UPDATE = 3.0, 1e3
"""What the backward pass takes, in forward passes of the same blocks; and floating-point operations of the forward pass
in whose time a parameter's gradient is exchanged and the parameter updated, as measured."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in forward passes of a sample through the whole network; no clock is asked."""

    views: int
    """Of each sample, that a solution is fitted to."""
    frozen: float
    """Part of the forward pass in front of the cut at which tuning begins."""
    comparing: float = 0.0
    """Of a view of a sample with all views that a solution compares it with."""
    judging: float = 0.0
    """Of judging once how the network stands, for each sample of an epoch."""
    update: float = 0.0
    """Of a step, beside its samples: gradients are exchanged and parameters updated."""
    plain: Costs | None = None
    """With solutions without mirror images, where --mirror leaves them open."""

    def full_step(self, batch: int) -> float:
        """Of a step of full fine-tuning, for each of its samples, of which a replica has `batch`."""
        return 1 + BACKWARD + self.update / batch

    def tuning_step(self, batch: int) -> float:
        """Of a step behind the cut, whose frozen blocks are computed."""
        return self._passes + self.update / batch

    def updating(self, batch: int) -> float:
        """Return how many times as long as its samples' passes an update takes."""
        return self.update / batch / self._passes

    @property
    def _passes(self) -> float:
        """Of a step behind the cut, without its update, for each of its samples."""
        return 1 + BACKWARD * (1 - self.frozen)

    @property
    def solution(self) -> float:
        """Of a solution, for each sample of an epoch."""
        return self.views * (1 + SOLVING + self.comparing)


def auto_stages(factory: StageFactory) -> tuple[Stage, ...]:
    """Return the stages with the steps that --epochs gives them, or as yet one epoch's under a time budget.

    Raises:
        UsageError: --cut is deeper than the model, or there are too few samples to solve a head.
    """
    config, solved, context = factory.config, affordable(factory), factory.context
    factory.check_held_out()
    chain, feed = context.chain, context.feed
    deepest, cut = len(chain.blocks) - 1, config.freeze.cut or 0
    if cut > deepest:
        raise UsageError(f"--cut ({cut}) must be in 0..{deepest}: the head is never frozen")
    return stages_of(
        config,
        solved=solved,
        batches_per_epoch=feed.plan.batches_per_epoch,
        guarded_batches=factory.guarded_batches() if ends_in_linear(chain) else 0,
        cut=cut,
        deepest=deepest,
        costs=None if config.run.budget_seconds() is not None else costs_of(factory, solved, cut),
        replicas=len(feed.plan.shards),
    )


def costs_of(factory: StageFactory, solved: Config, cut: int) -> Costs:
    """Return the costs of a run whose heads are solved as `solved` says, and whose blocks are tuned behind `cut`."""
    chain, samples = factory.context.chain, factory.context.feed.plan.samples
    work = work_of(chain, torch.zeros(1, *factory.blueprint.image_shape))
    whole = max(sum(work), LEAST_WORK)

    def of(solved: Config) -> Costs:
        compared = centres_for(factory.rows(solved), solved.head.centres) if solved.head.head_fit == "kernel" else 0
        return Costs(
            views=max(1, factory.augment(solved).num_views),
            frozen=sum(work[:cut]) / sum(work),
            comparing=compared * PAIR / whole,
            judging=judging(sum(work), samples=samples) / samples,
            update=UPDATE * sum(parameter.numel() for parameter in chain.model.parameters()) / whole,
        )

    return replace(of(solved), plain=of(without_mirror(solved)) if solved.data.mirror == "auto" else None)


def without_mirror(config: Config) -> Config:
    """Return the settings without mirror images."""
    return replace(config, data=replace(config.data, mirror="off"))


def ends_in_linear(chain: Chain) -> bool:
    """Tell whether the model's own last layer can be solved, under which tuning begins."""
    try:
        before_last_layer(chain)
    except UsageError:
        return False
    return True


def ways_of(config: Config) -> tuple[Config, ...]:
    """Return the settings of each way to tune that may be tried; the first is taken where none is tried.

    AdamW at a small rate, with the statistics of the pretrained weights, improves features that serve the task. SGD at
    a large rate, with each batch's statistics, learns others. --optimizer says which, unless it is auto.
    """
    settings, freeze = config.optimizer, config.freeze
    if settings.optimizer != AUTO:
        return (config,)
    decay = WEIGHT_DECAYS["sgd"] if settings.weight_decay == WEIGHT_DECAYS[AUTO] else settings.weight_decay
    sgd = replace(settings, optimizer="sgd", lr=SGD_RATE, weight_decay=decay)
    statistics = "batch" if freeze.statistics == AUTO else freeze.statistics
    return (
        replace(config, optimizer=replace(settings, optimizer="adamw")),
        replace(config, optimizer=sgd, freeze=replace(freeze, statistics=statistics)),
    )


def larger_batch(settings: OptimizerConfig) -> int:
    """Return `LARGER_BATCH`, or the batch that was given."""
    return LARGER_BATCH if settings.batch_size == usual("batch_size") else settings.batch_size


def usual(leaf: str) -> Any:
    """Return what a setting is with --freeze auto where it is not given."""
    return leaves()[leaf][1].metadata["auto"]


def affordable(factory: StageFactory) -> Config:
    """Return the run's settings; where rows are too many to be compared with each other, without mirror images.

    Unless --mirror on asks for them: with the same number of comparisons, more samples tell more than their mirror
    images do.
    """
    config = factory.config
    many = config.head.head_fit == "kernel" and config.head.centres is None and factory.rows(config) > ALL_COMPARED
    return without_mirror(config) if many and config.data.mirror == "auto" else config


def stages_of(
    config: Config,
    *,
    solved: Config | None = None,
    batches_per_epoch: int,
    guarded_batches: int,
    cut: int,
    deepest: int,
    costs: Costs | None,
    replicas: int = 1,
) -> tuple[Stage, ...]:
    """Return the stages, in order.

    Args:
        config: the run's, resolved.
        solved: the same as far as a head is solved, where that is different; see `affordable`.
        batches_per_epoch: of all samples.
        guarded_batches: of an epoch without the samples that are held out; 0 where nothing can be tuned.
        cut: at which tuning begins.
        deepest: the cut of a network that is frozen but for its head.
        costs: what --epochs is counted in; None where a time budget chooses the steps, all stages are then there.
        replicas: that train on an epoch's batches each.
    """
    ways = ways_of(config)
    config, solved = ways[0], solved or config
    settings, freeze, batch = config.optimizer, config.freeze, config.optimizer.batch_size
    solve = Stage(
        name=SOLVE,
        config=solving(solved),
        steps=batches_per_epoch,
        batches_per_epoch=batches_per_epoch,
        shown_cut=deepest,
        worth=costs.solution / costs.tuning_step(batch) if costs else 0.0,
    )
    # Without a last solution the guard judges the tuned model itself.
    last_solve, guarded = freeze.has("last-solve"), freeze.has("guard")
    batches = guarded_batches if guarded else batches_per_epoch
    several = last_solve and guarded and config.model.weights != "none"
    if batches == 0:
        return (solve,)
    longer = several and batches_per_epoch * batch * replicas >= MANY
    if longer:
        ways = (replace(ways[0], optimizer=replace(settings, batch_size=larger_batch(settings))), *ways[1:])
    tunings = Tunings(settings=settings, batches=batches, cut=cut, guarded=guarded, replicas=replicas, costs=costs)
    trials = [tunings.trial(way) for way in (ways if several else ())]
    ends_solved, tried, steps = last_solve, len(ways), [tunings.per_epoch]
    if costs is not None:
        whole, each_tuned = settings.epochs * costs.full_step(larger_batch(settings)), costs.tuning_step(batch)
        trial, judged = (tunings.trial_cost, costs.judging) if several else (0.0, 0.0)
        rounds = list[float]()
        # Where there is no room to try all ways, or to solve the head again, fewer are tried, or it is not.
        for count, ends_solved in plans(len(ways), several=several, last_solve=last_solve):
            left = whole - costs.solution - judged - count * (trial + judged)
            each = costs.solution if ends_solved else 0.0
            rounds = epochs_of_rounds(left / each_tuned, each / each_tuned, several=several and ends_solved)
            if rounds:
                tried = count
                break
        if settings.epochs < usual("epochs") and several and len(ways) > 1 and not longer:
            # SGD alone: it tells what is far from the pretraining in half the steps, and learns that the sooner.
            room = whole - trial - 2 * judged
            first = tuned_first(room, costs, least=costs.tuning_step(larger_batch(settings)))
            if first is not None:
                spent, mirrored = first
                count = int(tunings.per_epoch * spent / each_tuned)
                last = solve if mirrored else replace(solve, config=solving(without_mirror(solved)))
                if not mirrored and room >= costs.solution:
                    last = replace(last, other=solve)
                return (trials[1], tunings.tune(ways[1:], count, of=count, is_followed=True), last)
        steps = [int(tunings.per_epoch * epochs) for epochs in rounds]
    stages = [solve, *(trials[:tried] if steps else [])]
    if longer and (costs is None or sum(steps) >= LONG * tunings.per_epoch):
        stages.append(tunings.by(ways[0], tunings.per_epoch, name=TRY_LONGER))
        if costs is not None:
            steps[-1] -= int(tunings.per_epoch * (1 + costs.judging / each_tuned))
    for count in steps:
        tune = tunings.tune(ways[: tried if several else 1], count, of=sum(steps), is_followed=ends_solved)
        stages += [tune, solve] if ends_solved else [tune]
    # The model of the best solution, where what came after it is no better.
    goes_back = guarded and steps and (stages[1].is_trial or not last_solve)
    return (*stages, replace(solve, name="back", steps=0)) if goes_back else tuple(stages)


@dataclass(frozen=True, kw_only=True)
class Tunings:
    """The stages that tune. Steps are counted in batches of the run's own size, and changed into those of a way."""

    settings: OptimizerConfig
    """Of the first way, with the run's own batch."""
    batches: int
    """Of an epoch, of every replica, in the run's own size."""
    cut: int
    guarded: bool
    replicas: int
    costs: Costs | None

    @property
    def per_epoch(self) -> int:
        """Steps."""
        return self.settings.steps_per_epoch(self.batches)

    @property
    def half(self) -> int:
        """The batch of a trial: steps count there, and not samples."""
        return max(2, self.settings.batch_size // 2)

    @property
    def trial_cost(self) -> float:
        """Of a trial, but for judging it, for each sample of an epoch."""
        assert self.costs is not None
        return self._tries / self._halves * self.costs.tuning_step(self.half)

    def trial(self, way: Config) -> Stage:
        """Return a stage that tells whether such tuning pays."""
        way = replace(way, optimizer=replace(way.optimizer, batch_size=self.half, accumulate=1))
        return tune_stage(way, self.cut, steps=self._tries, batches=self._halves, name=TRY)

    def tune(self, ways: Sequence[Config], count: int, *, of: int, is_followed: bool) -> Stage:
        """Return a stage that tunes, in the first of the ways, which knows the second."""
        first, *others = (self.by(way, count, of=of, guarded=self.guarded, is_followed=is_followed) for way in ways)
        return replace(first, other=others[0]) if others else first

    def by(self, way: Config, count: int, *, of: int = 0, **terms: Any) -> Stage:
        """Return a stage that tunes in such a way, as long as `count` steps take, `of` so many of all stages."""
        batch = self.batch_of(way, of)
        own = self.batches * self.settings.batch_size // batch
        if own == 0:
            # Too few samples for a larger batch.
            batch, own = self.settings.batch_size, self.batches
        way = replace(way, optimizer=replace(way.optimizer, batch_size=batch))
        steps = max(1, int(count * self._pace(batch)) * way.optimizer.steps_per_epoch(own) // self.per_epoch)
        return tune_stage(way, self.cut, steps=steps, batches=own, **terms)

    def batch_of(self, way: Config, of: int) -> int:
        """Return the batch of a way, for `of` steps; see `ENOUGH_STEPS`. One that was given is taken."""
        settings = self.settings
        if way.optimizer.optimizer == settings.optimizer or settings.batch_size != usual("batch_size"):
            return way.optimizer.batch_size
        samples, fitting = of * settings.batch_size * settings.accumulate, LARGER_BATCH
        for size in (LARGER_BATCH, settings.batch_size, settings.batch_size // 2):
            if size < LARGER_BATCH and self.costs and self.costs.updating(size) > MOST_UPDATING:
                break
            fitting = size
            if samples * self._pace(size) / size >= ENOUGH_STEPS:
                break
        return fitting

    @property
    def _halves(self) -> int:
        """Half batches of an epoch."""
        return self.batches * self.settings.batch_size // self.half

    @property
    def _tries(self) -> int:
        """Steps of a trial."""
        return min(math.ceil(TUNED / (self.half * self.replicas)), self._halves)

    def _pace(self, batch: int) -> float:
        """Return how many samples in such batches take as long as one in those of the run's own size."""
        costs = self.costs
        return costs.tuning_step(self.settings.batch_size) / costs.tuning_step(batch) if costs else 1.0


def plans(ways: int, *, several: bool, last_solve: bool) -> list[tuple[int, bool]]:
    """Return what there may be room for, the best first: how many ways are tried, whether the head is solved again."""
    if not several:
        return [(ways, last_solve)]
    return [(count, ends_solved) for count in range(ways, 0, -1) for ends_solved in (True, False)]


def tuned_first(room: float, costs: Costs, *, least: float) -> tuple[float, bool] | None:
    """Return what is spent on tuning before any head is solved, and whether that has mirror images; None without room.

    `room` is what a trial leaves, in forward passes for each sample of an epoch, `least` what an epoch of tuning takes.
    """
    if room - costs.solution >= FEWEST_TUNED * least:
        return room - costs.solution, True
    plain = costs.plain or costs
    left = room - plain.solution
    return (left, plain is costs) if left >= LEAST_TUNED * least else None


def epochs_of_rounds(room: float, solution: float, *, several: bool) -> list[float]:
    """Return how many epochs each tuning lasts: 1, 2, 4 and so on, then what is left, where `several` are wanted.

    `room` is what there is for all, and `solution` what comes after each, in epochs. Less than one is not tuned.
    """
    rounds: list[float] = []
    while room - solution >= 1:
        length = room - solution
        longer = 2.0 ** len(rounds)
        # Too little is left for a longer one after it.
        if several and length - longer - solution >= 2 * longer:
            length = longer
        rounds.append(length)
        room -= length + solution
    return rounds


def tune_stage(
    config: Config,
    cut: int,
    *,
    steps: int,
    batches: int,
    guarded: bool = True,
    is_followed: bool = True,
    name: str = TUNE,
) -> Stage:
    """Return a stage that trains so many steps behind `cut`."""
    settings = config.optimizer
    warmup = settings.lr_warmup or max(1, int(WARMUP * steps))
    return Stage(
        name=name,
        config=tuning(
            replace(config, optimizer=replace(settings, lr_warmup=warmup)),
            cut,
            epochs=-(-steps // settings.steps_per_epoch(batches)),
        ),
        steps=steps,
        batches_per_epoch=batches,
        guarded=guarded,
        is_followed=is_followed,
    )


def solving(config: Config) -> Config:
    """Return the settings with which stages solve the head: fixed views for fresh draws, no pairs, no groups."""
    criterion, cut = SOLVED
    config = ways_of(config)[0]
    data = config.data if config.data.cacheable() else replace(config.data, augment="none", recipe="crop")
    return replace(
        config,
        data=data,
        optimizer=replace(config.optimizer, epochs=1, mixup=0.0, accumulate=1),
        freeze=replace(config.freeze, freeze=criterion, cut=cut, auto_without="none"),
    )


def tuning(config: Config, cut: int, *, epochs: int) -> Config:
    """Return the settings with which the model is tuned behind `cut`, under its own last layer."""
    config = ways_of(config)[0]
    freeze = "coherence" if config.freeze.has("votes") else "static" if cut else "none"
    pretrained = config.model.weights != "none"
    return replace(
        config,
        head=HeadConfig(),
        optimizer=replace(config.optimizer, epochs=epochs),
        freeze=replace(
            config.freeze,
            freeze=freeze,
            cut=cut or None,
            auto_without="none",
            # Statistics of this task's batches would spoil features whose weights were trained with others.
            statistics="kept" if pretrained and config.freeze.statistics == "auto" else config.freeze.statistics,
        ),
        cache=config.cache if config.data.cacheable() else replace(config.cache, cache="off"),
    )


def notes_on_stages(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return notes on rows that are other than was asked, and on a head that is solved on random weights."""
    notes = []
    if any(stage.solves and stage.config.data.mirror != config.data.mirror for stage in stages):
        notes.append(
            f"no mirror images for the solved head: with them there are more than {ALL_COMPARED} views of samples, "
            "more than are all compared with each other; --mirror on takes them, and compares all with fewer"
        )
    if config.model.weights == "none" and len(stages) == 1:
        notes.append("the head is solved on a network with random weights; --freeze auto is for trained --weights")
    return notes


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
    if guard is not None and trying:
        guard.trial.before = loss
        if runner.trials_to_come or guard.best is None:
            guard.before_trial = copied(chain.model)
        suit_last_layer(job)


def end_trial(job: Job, *, failed: bool = False) -> None:
    """Judge tuning after a stage that tries it, and after the last of them, whether and how it goes on. Collective.

    Where it does not, or the first way is the better, the model goes back to that. Of many samples an epoch is tried
    where short trials gain nothing: what it gains, a long tuning gains more of.

    Args:
        job: the run.
        failed: whether the stage has ended early, by numbers that are not finite.
    """
    guard, runner, judge = job.guard, job.stage_runner, job.judge
    if guard is None or judge is None or not runner.stage.is_trial:
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
    if TRY in runner.trials_to_come and trial.is_promising:
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
    elif first is not None:
        runner.take_other_way()
    if longer or (fell_much(trial.before, trial.loss) and leaves_much(best)):
        tune_at_once(job)


def end_early_trial(job: Job, guard: Guard) -> None:
    """Go on after a trial before any solution: with the tuning, or with a solution for the blocks as they were.

    Equal on all ranks.
    """
    runner, trial, before = job.stage_runner, guard.trial, guard.before_trial
    assert before is not None
    guard.before_trial = None
    pays = trial.before is not None and trial.loss < (1 - EARLY_GAIN) * trial.before
    job.logger.info(trial.early_line(runner.stage.steps, pays=pays))
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


def give_up_trial(job: Job) -> bool:
    """Tell whether numbers that are not finite end a trial alone, not the run, and end it then. Collective."""
    if job.guard is None or not job.stage.is_trial:
        return False
    job.step = job.stage_runner.first_step + job.stage.steps
    return True


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


def go_back(job: Job) -> None:
    """Open the stage without steps that the run ends with, and give it the best state. Collective."""
    guard, runner = job.guard, job.stage_runner
    assert guard is not None and guard.best is not None
    runner.turn_back()
    put_back(guard.best.state, runner.opened.chain.model)
    job.last_scores, job.last_accuracy = guard.best.scores, mean(guard.best.scores).accuracy


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
    """Go back to the best solution where a guard finds a tuned model, which ends the run, no better. Collective.

    The model that the run keeps is then that of the stage without steps that is opened for it.
    """
    guard, runner = job.guard, job.stage_runner
    if guard is None or guard.best is None or guard.held_out is None or runner.stage.solves or not runner.is_last:
        return
    mirrored, precision = runner.mirror != "off", job.config.optimizer.precision
    score = score_of(runner.opened.chain, guard.held_out, mirrored=mirrored, precision=precision, world=job.world)
    verdict = guard.judge_tuned(score, stage=runner.number)
    job.logger.info(verdict.line(guard.best.verdict))
    if not verdict.kept:
        go_back(job)


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
    """Return what summary.json says of each stage, and of the head that was kept."""
    guard, stages = job.guard, [{"stage": stage.name, "steps": stage.steps} for stage in job.stage_runner.stages]
    for verdict in guard.verdicts if guard else ():
        stages[verdict.stage] |= verdict.describe()
    tried = {"trial": guard.trial.describe()} if guard and guard.trial.after else {}
    return {"stages": stages, **tried, **({"head": guard.best.head} if guard and guard.best else {})}
