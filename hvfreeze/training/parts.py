"""The parts of a run, one for each verb's settings: the model, the training samples and the strategy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.config.head import HeadConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import TrainFeed, augment_of
from hvfreeze.data.decoding import Images
from hvfreeze.data.views import Augment
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen_prefix import release_model
from hvfreeze.heads.features import before_last_layer, every_block
from hvfreeze.heads.kernel import ALL_COMPARED, centres_for
from hvfreeze.heads.multilevel import solvable_chain
from hvfreeze.heads.probe import HeldOut, Probe, seen_by
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import work_of
from hvfreeze.strategies.base import BuildContext, OpenModel, Strategy
from hvfreeze.strategies.fitted_head import FittedHead, open_fitted_head
from hvfreeze.strategies.opening import open_strategy
from hvfreeze.training.blueprint import Blueprint
from hvfreeze.training.budget import Work
from hvfreeze.wording import plural

HELD_OUT = 0.1
"""Share of the training samples that choose a fitted head's penalty and score a fine-tuned model."""


@dataclass(frozen=True)
class Part:
    """Settings and samples of a verb; a run works on one part at a time."""

    settings: Config
    holds_out: bool = False
    """Whether training excludes the held-out samples."""

    @property
    def fits_head(self) -> bool:
        """Whether the head is fitted, without training."""
        return self.settings.head.solved


@dataclass(eq=False)
class Opened:
    """An open part."""

    part: Part
    model: OpenModel
    feed: TrainFeed
    chain: Chain
    length: Length
    """Length of the training, for the strategy."""
    steps: int = 0
    """Number of optimizer steps to make."""
    first_step: int = 0
    """Steps of the run before the part."""
    first_epoch: int = 0
    """Epochs of the run before the part."""
    is_used: bool = False
    """Whether a verb has used the part."""

    @property
    def strategy(self) -> Strategy:
        """Strategy that trains the model."""
        return cast(Strategy, self.model)

    @property
    def fitted(self) -> FittedHead:
        """Strategy that fits the head."""
        assert isinstance(self.model, FittedHead), "no head is fitted in this part"
        return self.model

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self.part.settings.optimizer.steps_per_epoch(self.feed.plan.batches_per_epoch)

    @property
    def epochs(self) -> int:
        """Number of epochs, counting a partial last one."""
        return -(-self.steps // self.steps_per_epoch)

    def plan(self, steps: int) -> None:
        """Set the number of steps, equal on all ranks, here and in the strategy."""
        self.steps, self.length.epochs = steps, max(1, -(-steps // self.steps_per_epoch))


@dataclass(frozen=True, eq=False)
class Factory:
    """Opens the parts of a run, one at a time.

    Attributes:
        context: the run's model, with the feed of all training samples.
        blueprint: the settings of the model.
        trainable: the parameters that were trainable at the start of the run; the others stay frozen in all parts.
        asked_flips: value of --flips.
    """

    context: BuildContext
    blueprint: Blueprint
    trainable: frozenset[nn.Parameter]
    asked_flips: str = "auto"

    def open(self, part: Part) -> Opened:
        """Open a part, after unfreezing blocks that another part froze. Collective.

        Raises:
            UsageError: the settings do not fit the model or the world; on all ranks.
        """
        given, settings = self.context, part.settings
        release_model(given.chain.model, self.trainable)
        chain, feed = raise_on_all_ranks(given.world, lambda: (self.chain(settings), self.feed(part)), name="part")
        corpus = replace(given.corpus, plan=feed.plan)
        length = Length(settings.optimizer.epochs)
        context = replace(given, chain=chain, feed=feed, corpus=corpus, length=length)
        if part.fits_head:
            return Opened(part, open_fitted_head(context, settings), feed, chain, length)
        opened = Opened(part, open_strategy(context, settings), feed, chain, length)
        opened.plan(settings.optimizer.epochs * opened.steps_per_epoch)
        return opened

    def rows(self, config: Config) -> int:
        """Return the number of rows that a head is fitted to, over all ranks."""
        return self.context.feed.plan.samples * max(1, self.augment(config).num_views)

    def chain(self, settings: Config) -> Chain:
        """Return the model of a part, in blocks."""
        chain, head = self.context.chain, settings.head
        if not head.solved:
            return chain
        return solvable_chain(
            chain,
            head,
            classes=self.blueprint.classes,
            example=torch.zeros(2, *self.blueprint.image_shape),
            reads_mirrored=self.reads_mirrored(settings),
        )

    def feed(self, part: Part) -> TrainFeed:
        """Return the training samples of a part."""
        feed, settings = self.context.feed, part.settings
        without = feed.held_out(HELD_OUT) if part.holds_out else None
        feed = feed.shown(self.augment(settings), mirrors=self.mirrors(settings), without=without)
        return replace(feed, plan=feed.plan.in_batches(settings.optimizer.batch_size))

    def augment(self, config: Config) -> Augment:
        """Return the augmentation of the settings."""
        return augment_of(config.data, fits_head=config.head.solved, mirrors=self.mirrors(config))

    def mirrors(self, config: Config) -> bool:
        """Return True if the settings flip these samples."""
        return config.data.mirrors(self.context.corpus.train.flips)

    def reads_mirrored(self, config: Config) -> bool:
        """Return True if a head fitted with the settings averages over flips."""
        return self.mirrors(config) and config.data.flips == "mean"

    def check_held_out(self, head_fit: str) -> None:
        """Raise UsageError if there are too few samples to choose a penalty."""
        if self.held_out_samples:
            return
        fewest = next(count for count in itertools.count() if round(HELD_OUT * count) > 0)
        raise UsageError(
            f"--head-fit ({head_fit}, as in hvfreeze auto) cannot choose a penalty from "
            f"{plural(self.context.feed.plan.samples, 'training sample')}: it holds out a tenth of them, but not the "
            f"only sample of a class, and here that is none; use {fewest} or more, with two of a class, or --head-fit "
            "sgd with another --freeze"
        )

    @property
    def held_out_samples(self) -> int:
        """Number of training samples that are held out, over all ranks."""
        return int(self.context.feed.held_out(HELD_OUT).sum())

    def held_out(self, head_fit: Config) -> HeldOut:
        """Return this replica's held-out samples, in the views for fitting a head."""
        feed = self.feed(Part(head_fit))
        return HeldOut(feed.images, feed.every_view(of=feed.held_out(HELD_OUT)))

    def probe(self, head_fit: Config, fine_tuning: Config) -> Probe:
        """Return the probe of the features for the settings of fitting a head and of fine-tuning."""
        feed = self.feed(Part(head_fit))
        assert isinstance(feed.images, Images), "a text has no head to fit"
        seen = seen_by(feed.plan.samples)
        most = max(1, seen[1] // feed.plan.replicas)
        return Probe(
            feed=self.feed(Part(fine_tuning, holds_out=True)),
            images=feed.images,
            held_out=feed.every_view(of=feed.some_of(feed.held_out(HELD_OUT), most)),
            seen=seen,
            task=self.context.corpus.task,
            learned_from=(fine_tuning.freeze.cut or 0) if fine_tuning.freeze.statistics == "batch" else None,
            pool=head_fit.head.pool,
            tokens=head_fit.head.token_form,
            precision=head_fit.optimizer.precision,
            world=self.context.world,
        )

    def obstacle(self) -> str:
        """Return why the network cannot be fine-tuned without the held-out samples; "" if it can."""
        feed = self.context.feed
        try:
            before_last_layer(self.context.chain)
        except UsageError:
            return f"{self.blueprint.model.model} does not end in a linear layer with a bias"
        try:
            held = feed.held_out(HELD_OUT)
            is_enough = bool(held.any()) and feed.plan.without(held).batches_per_epoch > 0
        except UsageError:
            is_enough = False
        return "" if is_enough else "the training samples that are not held out do not fill a batch"

    def can_hold_out(self) -> bool:
        """Return True if the network can be fine-tuned without the held-out samples."""
        return not self.obstacle()

    def with_affordable_flips(self, settings: Config) -> Config:
        """Return the settings, with a head that averages over flips if there are too many rows for all kernel values.

        --flips overrides this. At the same cost, more samples help more than separate rows for flips.
        """
        many = settings.head.head_fit == "kernel" and settings.head.centres is None
        if self.asked_flips != "auto" or not (many and self.mirrors(settings)):
            return settings
        is_much = self.rows(settings) > ALL_COMPARED
        return replace(settings, data=replace(settings.data, flips="mean")) if is_much else settings

    def work(self, settings: Config, *, cut: int, evaluated: int) -> Work:
        """Return the work per verb of a run that fits a head with these settings and trains the blocks after `cut`.

        `evaluated` is the number of samples that this replica evaluates.

        Raises:
            UsageError: --cut is deeper than the model.
        """
        chain, plan = self.context.chain, self.context.feed.plan
        if not settings.head.solved:
            return Work(evaluated=evaluated)
        example = torch.zeros(1, *self.blueprint.image_shape)
        operations, rows, kernel = work_of(chain, example), self.rows(settings), None
        if cut >= len(operations):
            raise UsageError(f"--cut ({cut}) must be in 0..{len(operations) - 1}: the head is never frozen")
        if settings.head.head_fit == "kernel":
            kernel = (features_of(chain, settings.head, example), centres_for(rows, settings.head.centres))
        held_out = self.held_out_samples * max(1, self.augment(settings).num_views)
        return Work(
            forward=sum(operations),
            parameters=sum(parameter.numel() for parameter in chain.model.parameters()),
            frozen=sum(operations[:cut]) / max(1, sum(operations)),
            evaluated=evaluated,
            held_out=held_out / plan.replicas,
            rows=rows / plan.replicas,
            looks=2 if self.reads_mirrored(settings) else 1,
            kernel=kernel,
            probed=min(plan.samples, sum(seen_by(plan.samples))) / plan.replicas,
        )


def features_of(chain: Chain, settings: HeadConfig, example: Tensor) -> int:
    """Return the number of features of an image for a fitted head; `example`, (1, ...), gives the shape alone."""
    if settings.head != "multi-level":
        return before_last_layer(chain)[1].in_features
    with in_evaluation(chain.model), torch.no_grad():
        return every_block(chain, pool=settings.pool, example=example, tokens=settings.token_form)(example).shape[1]
