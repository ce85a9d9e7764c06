"""--freeze auto: which stages a run has, and how many steps each: what --epochs or a time budget has room for.

Try whether tuning pays. Where it does not, solve the head for the blocks as they are; where it does, tune on and solve
it then, once after a few epochs and once at the end. Costs are counted in forward passes; no clock is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.config.sections import AUTO, WEIGHT_DECAYS, HeadConfig, OptimizerConfig
from hvfreeze.config.tree import SOLVED, Config, leaves
from hvfreeze.errors import UsageError
from hvfreeze.heads.features import before_last_layer, every_block
from hvfreeze.heads.kernel import ALL_COMPARED, centres_for
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import work_of
from hvfreeze.training.stage_build import HELD_OUT, StageFactory, without_mirror
from hvfreeze.training.stages import MUCH_TUNED, SOLVE, TRY, TUNE, Stage
from hvfreeze.training.trial import LEAST_WORK, MANY, MOST_TRIED, TRIED, TUNED, judging

WARMUP = 0.1
"""Part of a stage's steps in which the learning rate rises, where --lr-warmup does not say."""
SOLVING = 0.15
"""What solving a linear head takes beside the features' forward pass, as a part of it."""
POINT, PAIR = 1.24e4, 1.6e3
"""Floating-point operations of the forward pass in whose time a feature of a row becomes a part of its point of a
kernel head, and a row is compared with another until the head is solved; as measured for 2 500 to 50 000 rows."""
SGD_RATE, LARGER_BATCH, ENOUGH_STEPS, MOST_UPDATING = 0.05, 64, 400, 1.5
"""SGD takes the largest batches, up to such ones, of which there are so many. With fewer steps the blocks learn less,
however many samples each has. But none so small that an update takes that many times as long as its samples' passes. Of
many samples AdamW takes the larger batches too: its updates then take half the time, and there are enough of them.

SGD then takes batches twice as large, at twice the rate (Goyal et al., "Accurate, Large Minibatch SGD", 2017): the same
samples teach as much, in fewer updates."""
ROUND, LEAST_ROUND = 3.0, 100
"""Epochs of full fine-tuning that the first tuning takes where there is twice as much for a second one, and so many
steps in it: easy tasks need no more."""
LEAST_TUNED = 0.5
"""Such epochs, fewer than which are not tuned where a head is solved behind them."""
SPARED = 1.25
"""Times what a solution is counted to take, that must be left for a trial to come before it."""
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
    solving: float = SOLVING
    """Of a view of a sample in a solution, beside its features."""
    judging: float = 0.0
    """Of judging once how the network stands, for each sample of an epoch."""
    haste: float = 0.0
    """Of the same by half as many samples."""
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
        return self.views * (1 + self.solving)


def auto_stages(factory: StageFactory, passes: float | None) -> tuple[Stage, ...]:
    """Return the stages with the steps that --epochs gives them, or `passes`; see `stages_of`.

    Raises:
        UsageError: see `first_cut`; or there are too few samples to solve a head.
    """
    solved, cut = affordable(factory), first_cut(factory)
    factory.check_held_out()
    chain, feed = factory.context.chain, factory.context.feed
    return stages_of(
        factory.config,
        solved=solved,
        batches_per_epoch=feed.plan.batches_per_epoch,
        guarded_batches=factory.guarded_batches() if ends_in_linear(chain) else 0,
        cut=cut,
        deepest=len(chain.blocks) - 1,
        costs=costs_of(factory, solved, cut),
        passes=passes,
        replicas=len(feed.plan.shards),
        normalises=any(isinstance(module, _BatchNorm) for module in chain.model.modules()),
    )


def first_cut(factory: StageFactory) -> int:
    """Return the cut at which tuning begins.

    Raises:
        UsageError: --cut is deeper than the model.
    """
    deepest, cut = len(factory.context.chain.blocks) - 1, factory.config.freeze.cut or 0
    if cut > deepest:
        raise UsageError(f"--cut ({cut}) must be in 0..{deepest}: the head is never frozen")
    return cut


def costs_of(factory: StageFactory, solved: Config, cut: int) -> Costs:
    """Return the costs of a run whose heads are solved as `solved` says, and whose blocks are tuned behind `cut`."""
    chain, samples = factory.context.chain, factory.context.feed.plan.samples
    example = torch.zeros(1, *factory.blueprint.image_shape)
    work = work_of(chain, example)
    whole = max(sum(work), LEAST_WORK)
    compares = solved.head.head_fit == "kernel"
    pointing = POINT * width_of(chain, solved.head, example) if compares else 0.0

    def of(solved: Config) -> Costs:
        compared = centres_for(factory.rows(solved), solved.head.centres)
        rows, looks = max(1, factory.augment(solved).num_views), 2 if factory.reads_mirrored(solved) else 1
        return Costs(
            views=rows * looks,
            frozen=sum(work[:cut]) / sum(work),
            solving=((pointing + PAIR * compared) / whole if compares else SOLVING) / looks,
            judging=judging(sum(work), samples=samples) / samples,
            haste=judging(sum(work), samples=samples, in_haste=True) / samples,
            update=UPDATE * sum(parameter.numel() for parameter in chain.model.parameters()) / whole,
        )

    return replace(of(solved), plain=of(without_mirror(solved)) if solved.data.mirror == "auto" else None)


def width_of(chain: Chain, settings: HeadConfig, example: Tensor) -> int:
    """Return how many features of an image a solved head takes; of `example`, (1, ...), only the shape counts."""
    if settings.head != "multi-level":
        return before_last_layer(chain)[1].in_features
    with in_evaluation(chain.model), torch.no_grad():
        return every_block(chain, pool=settings.pool, example=example)(example).shape[1]


def ends_in_linear(chain: Chain) -> bool:
    """Tell whether the model's own last layer can be solved, under which tuning begins."""
    try:
        before_last_layer(chain)
    except UsageError:
        return False
    return True


def gentle(config: Config) -> Config:
    """Return the settings with AdamW where --optimizer leaves that open.

    At a small rate, with the statistics of the pretrained weights, it improves features that serve the task.
    """
    settings = config.optimizer
    return replace(config, optimizer=replace(settings, optimizer="adamw")) if settings.optimizer == AUTO else config


def bold(config: Config) -> Config:
    """Return the settings with SGD where --optimizer leaves that open.

    At a large rate, with each batch's statistics, it learns other features, in half the steps.
    """
    settings, freeze = config.optimizer, config.freeze
    if settings.optimizer != AUTO:
        return config
    decay = WEIGHT_DECAYS["sgd"] if settings.weight_decay == WEIGHT_DECAYS[AUTO] else settings.weight_decay
    sgd = replace(settings, optimizer="sgd", lr=SGD_RATE, weight_decay=decay)
    statistics = "batch" if freeze.statistics == AUTO else freeze.statistics
    return replace(config, optimizer=sgd, freeze=replace(freeze, statistics=statistics))


def batch_is_given(settings: OptimizerConfig) -> bool:
    """Tell whether --batch-size says how large batches are."""
    return bool(settings.batch_size != usual("batch_size"))


def usual(leaf: str) -> Any:
    """Return what a setting is with --freeze auto where it is not given."""
    return leaves()[leaf][1].metadata["auto"]


def affordable(factory: StageFactory) -> Config:
    """Return the run's settings; with rows too many to be compared with each other, the mean over mirror images.

    Unless --mirror on asks for rows of their own: with the same number of comparisons, more samples tell more than
    their mirror images do. The mean adds no row, but answers then take two forward passes.
    """
    config = factory.config
    many = config.head.head_fit == "kernel" and config.head.centres is None and factory.rows(config) > ALL_COMPARED
    if not (many and config.data.mirror == "auto" and factory.mirrors(config)):
        return config
    return replace(config, data=replace(config.data, mirror="mean"))


def stages_of(
    config: Config,
    *,
    solved: Config | None = None,
    batches_per_epoch: int,
    guarded_batches: int,
    cut: int,
    deepest: int,
    costs: Costs,
    passes: float | None = None,
    replicas: int = 1,
    normalises: bool = True,
) -> tuple[Stage, ...]:
    """Return the stages, in order.

    Args:
        config: the run's, resolved.
        solved: the same as far as a head is solved, where that is different; see `affordable`.
        batches_per_epoch: of all samples.
        guarded_batches: of an epoch without the samples that are held out; 0 where nothing can be tuned.
        cut: at which tuning begins.
        deepest: the cut of a network that is frozen but for its head.
        costs: of its parts.
        passes: what a time budget has time for, in forward passes for each sample of an epoch; None is what --epochs
            of full fine-tuning take. Of a time budget there is one tuning, whose steps are chosen as they are made.
        replicas: that train on an epoch's batches each.
        normalises: whether the network has BatchNorm; others are not tuned by SGD.
    """
    settings, freeze, batch = config.optimizer, config.freeze, config.optimizer.batch_size
    solve = Stage(
        name=SOLVE,
        config=solving(solved or config),
        steps=batches_per_epoch,
        batches_per_epoch=batches_per_epoch,
        shown_cut=deepest,
        worth=costs.solution / costs.tuning_step(batch),
        mirror_is_open=solved is not None and solved.data.mirror != config.data.mirror,
    )
    last_solve, guarded = freeze.has("last-solve"), freeze.has("guard")
    batches = guarded_batches if guarded else batches_per_epoch
    if batches == 0 or (passes is None and settings.epochs == 1):
        return (solve,)
    tries = last_solve and guarded and config.model.weights != "none"
    many = batches_per_epoch * batch * replicas >= MANY
    tunings = Tunings(
        way=bold(config) if tries and normalises else gentle(config),
        chooses_batch=tries and normalises and settings.optimizer == AUTO,
        settings=settings,
        batches=batches,
        cut=cut,
        guarded=guarded,
        replicas=replicas,
        costs=costs,
        many=tries and many,
    )
    whole = settings.epochs * costs.full_step(tunings.full_batch()) if passes is None else passes
    if tries:
        return tried_stages(tunings, solve, whole, timed=passes is not None)
    # Nothing tells whether tuning pays. Without a last solution the guard judges the tuned model itself.
    each, after = costs.tuning_step(batch), HELD_OUT * costs.views + (costs.solution if last_solve else 0.0)
    epochs = (whole - costs.solution - after) / each
    if passes is not None:
        epochs = max(1.0, epochs)
    if epochs < 1:
        return (solve,)
    count = int(tunings.per_epoch * epochs)
    tune = tunings.tune(count, is_followed=last_solve)
    return (solve, tune, *((solve,) if last_solve else ()), *((back_to(solve),) if guarded else ()))


def without_mirror_images(solve: Stage, costs: Costs) -> Stage:
    """Return the solution without mirror images, where --mirror leaves them open."""
    if costs.plain is None:
        return solve
    return replace(
        solve, config=without_mirror(solve.config), worth=solve.worth * costs.plain.solution / costs.solution
    )


def back_to(solve: Stage) -> Stage:
    """Return the stage without steps that is opened for the best model, where what came after it is no better."""
    return replace(solve, name="back", steps=0)


def tried_stages(tunings: Tunings, solve: Stage, whole: float, *, timed: bool) -> tuple[Stage, ...]:
    """Return the stages of which the first tells whether the others pay; `solve` alone where there is no room for them.

    A short trial is gone on from, at its rate. Of many samples it would gain nothing that shows: there the first tuning
    is judged. `whole` is what all may take, in forward passes for each sample of an epoch.
    """
    costs, many, settings = tunings.costs, tunings.many, tunings.settings
    least, own = costs.tuning_step(tunings.full_batch()), HELD_OUT * costs.views
    tried = 2 * costs.judging + (0.0 if many else tunings.trial_cost)
    if not (many or timed) and settings.epochs >= usual("epochs") and tunings.trial_epochs > 1:
        # Of few samples trials take a large part of the steps that a far task needs, and little time.
        whole += tried
    room = whole - tried - own
    found = tuned_first(room, costs, least=least)
    if found is None:
        return in_little_time(tunings, solve, room) if timed and not many else (solve,)
    spent, mirrored = found
    last, solution = solve, costs.solution
    if not mirrored and costs.plain is not None:
        last, solution = without_mirror_images(solve, costs), costs.plain.solution
        tunings = tunings.without_mirror()
    # A clock may find a solution to take longer than it is counted: the one in reserve must fit all the same.
    first = solve if room >= (2 if timed else 1) * costs.solution else last
    comes_first = spent - costs.solution >= MUCH_TUNED * least
    if comes_first and not many:
        spent -= costs.solution
    in_haste = not (many or mirrored)
    if in_haste:
        spent += 2 * (costs.judging - costs.haste)

    def tuned(parts: Sequence[float]) -> list[Stage]:
        counts = [int(tunings.per_epoch * part / costs.tuning_step(settings.batch_size)) for part in parts]
        return [tunings.tune(count, goes_on=not (many or place)) for place, count in enumerate(counts)]

    tunes = tuned([spent] if timed else rounds_of(spent, first=ROUND * least, between=solution + own))
    if len(tunes) > 1 and tunes[0].steps < LEAST_ROUND:
        tunes = tuned([spent])
    stages = [stage for tune in tunes for stage in (tune, last)]
    if not many:
        stages = [tunings.trial(in_haste=in_haste), replace(first, is_spare=not comes_first), *stages]
    return (*stages, back_to(solve))


def in_little_time(tunings: Tunings, solve: Stage, room: float) -> tuple[Stage, ...]:
    """Return the stages where a trial leaves time for a solution or for tuning, not for both; `solve` alone where not.

    A head without mirror images, which takes half the time, is worth less than one with them, but on tasks of which
    the weights know little even a short tuning is worth far more.
    """
    costs = tunings.costs
    plain = costs.plain or costs
    if room < SPARED * plain.solution:
        return (solve,)
    tunings = tunings.without_mirror()
    count = int(tunings.per_epoch * room / costs.tuning_step(tunings.settings.batch_size))
    tune = tunings.tune(count, goes_on=True, is_followed=False)
    spare = replace(without_mirror_images(solve, costs), is_spare=True)
    return (tunings.trial(in_haste=True), spare, tune, back_to(solve))


def rounds_of(room: float, *, first: float, between: float) -> list[float]:
    """Return what each tuning takes of `room`: one, or where twice as much is left, a `first` and a longer one.

    `between` is what comes after each but the last.
    """
    rest = room - first - between
    return [first, rest] if rest >= 2 * first else [room]


@dataclass(frozen=True, kw_only=True)
class Tunings:
    """The stages that tune. Steps are counted in batches of the run's own size, and changed into those of theirs."""

    way: Config
    """With the optimizer."""
    chooses_batch: bool
    """Whether they are SGD's at auto's own rate, with batches as large as there are enough of; see `ENOUGH_STEPS`."""
    settings: OptimizerConfig
    """With the run's own batch."""
    batches: int
    """Of an epoch, of every replica, in the run's own size."""
    cut: int
    guarded: bool
    replicas: int
    costs: Costs
    many: bool
    """Whether there are many samples, and larger batches are no loss."""

    def without_mirror(self) -> Tunings:
        """Return the same without mirror images, where --mirror leaves them open.

        In few epochs they teach blocks next to nothing, and to find out about them takes as long as some steps.
        """
        return replace(self, way=without_mirror(self.way)) if self.way.data.mirror == "auto" else self

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
        return self.trial_epochs * self.costs.tuning_step(self.half)

    @property
    def trial_epochs(self) -> float:
        """Of a trial."""
        return self._tries / self._halves

    def trial(self, *, in_haste: bool) -> Stage:
        """Return a stage that tells whether tuning pays; it keeps its rate to its end, to be gone on from."""
        settings = replace(self.way.optimizer, batch_size=self.half, accumulate=1)
        if settings.schedule == "cosine":
            settings = replace(settings, schedule="constant")
        way = replace(self.way, optimizer=settings)
        stage = tune_stage(way, self.cut, steps=self._tries, batches=self._halves, name=TRY)
        return replace(stage, is_in_haste=in_haste)

    def tune(self, count: int, *, goes_on: bool = False, is_followed: bool = True) -> Stage:
        """Return a stage that tunes as long as `count` steps take."""
        batch = self._batch_of(count)
        own = self.batches * self.settings.batch_size // batch
        if own == 0:
            # Too few samples for a larger batch.
            batch, own = self.settings.batch_size, self.batches
        optimizer = replace(self.way.optimizer, batch_size=batch)
        if batch > LARGER_BATCH and not batch_is_given(self.settings):
            optimizer = replace(optimizer, lr=optimizer.lr * batch / LARGER_BATCH)
        way = replace(self.way, optimizer=optimizer)
        steps = max(1, int(count * self._pace(batch)) * way.optimizer.steps_per_epoch(own) // self.per_epoch)
        return tune_stage(
            way, self.cut, steps=steps, batches=own, guarded=self.guarded, goes_on=goes_on, is_followed=is_followed
        )

    def _batch_of(self, count: int) -> int:
        """Return the batch for as long as `count` steps take. One that was given is taken."""
        settings = self.settings
        if batch_is_given(settings):
            return settings.batch_size
        if not self.chooses_batch:
            return LARGER_BATCH if self.many else settings.batch_size
        samples = count * settings.batch_size * settings.accumulate
        return self._largest(lambda size: samples * self._pace(size) / size)

    def full_batch(self) -> int:
        """Return the batch of the full fine-tuning that --epochs counts: one of which auto's own epochs have enough."""
        settings = self.settings
        if batch_is_given(settings):
            return settings.batch_size
        samples = usual("epochs") * self.batches * settings.batch_size
        return self._largest(lambda size: samples / size)

    def _largest(self, steps: Callable[[int], float]) -> int:
        """Return the largest batch with which there are enough `steps`; see `ENOUGH_STEPS`."""
        fitting, usual_batch = LARGER_BATCH, self.settings.batch_size
        larger = (2 * LARGER_BATCH, LARGER_BATCH) if self.many and self.chooses_batch else (LARGER_BATCH,)
        for size in (*larger, usual_batch, usual_batch // 2):
            if size < LARGER_BATCH and self.costs.updating(size) > MOST_UPDATING:
                break
            fitting = size
            if steps(size) >= ENOUGH_STEPS:
                break
        return fitting

    @property
    def _halves(self) -> int:
        """Half batches of an epoch."""
        return self.batches * self.settings.batch_size // self.half

    @property
    def _tries(self) -> int:
        """Steps of a trial."""
        # Of fewer samples than an epoch of the half, a far task needs all that comes on top of auto's own epochs.
        halved = self.chooses_batch and self._halves >= TRIED // 2
        tuned, tried = (TUNED // 2, TRIED // 2) if halved else (TUNED, TRIED)
        by_samples = min(math.ceil(tuned / (self.half * self.replicas)), self._halves)
        return max(by_samples, min(tried, int(MOST_TRIED * self._halves)))

    def _pace(self, batch: int) -> float:
        """Return how many samples in such batches take as long as one in those of the run's own size."""
        return self.costs.tuning_step(self.settings.batch_size) / self.costs.tuning_step(batch)


def tuned_first(room: float, costs: Costs, *, least: float) -> tuple[float, bool] | None:
    """Return what is spent on tuning, and whether the head behind it has mirror images; None without room.

    `room` is what a trial leaves, in forward passes for each sample of an epoch, `least` what an epoch of tuning takes.
    """
    if room - costs.solution >= MUCH_TUNED * least:
        return room - costs.solution, True
    plain = costs.plain or costs
    left = room - plain.solution
    return (left, plain is costs) if left >= LEAST_TUNED * least else None


def tune_stage(
    config: Config,
    cut: int,
    *,
    steps: int,
    batches: int,
    guarded: bool = True,
    is_followed: bool = True,
    goes_on: bool = False,
    name: str = TUNE,
) -> Stage:
    """Return a stage that trains so many steps behind `cut`; one that `goes_on` begins at its whole rate."""
    settings = config.optimizer
    warmup = settings.lr_warmup or (0 if goes_on else max(1, int(WARMUP * steps)))
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
    config = gentle(config)
    data = config.data if config.data.cacheable() else replace(config.data, augment="none", recipe="crop")
    return replace(
        config,
        data=data,
        optimizer=replace(config.optimizer, epochs=1, mixup=0.0, accumulate=1),
        freeze=replace(config.freeze, freeze=criterion, cut=cut, auto_without="none"),
    )


def tuning(config: Config, cut: int, *, epochs: int) -> Config:
    """Return the settings with which the model is tuned behind `cut`, under its own last layer."""
    config = gentle(config)
    freeze = "coherence" if config.freeze.has("votes") else "static" if cut else "none"
    pretrained = config.model.weights != "none"
    return replace(
        config,
        # Blocks that learn see mirror images one by one.
        data=replace(config.data, mirror="on") if config.data.mirror == "mean" else config.data,
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


def notes_on_views(factory: StageFactory) -> list[str]:
    """Return a note on a head that looks at mirror images too when it answers."""
    if affordable(factory) == factory.config:
        return []
    why = f"there are too many samples for mirror images beside them (together at most {ALL_COMPARED})"
    what = "a solved head reads the mean of an image's features and its mirror image's, and answers in twice the time"
    return [f"{what}: {why}; --mirror off looks at each image alone"]


def notes_on_stages(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return a note on a head that is solved on random weights."""
    if config.model.weights == "none" and len(stages) == 1:
        return ["the head is solved on a network with random weights; --freeze auto is for trained --weights"]
    return []
