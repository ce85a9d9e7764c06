"""What a verb works on, made ready: the model, the samples that it sees, and its strategy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus, TrainFeed, augment_of
from hvfreeze.data.decoding import Images
from hvfreeze.data.views import Augment, seen_shape
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen_prefix import release_model
from hvfreeze.heads.features import before_last_layer, every_block
from hvfreeze.heads.kernel import ALL_COMPARED, centres_for
from hvfreeze.heads.multilevel import solvable_chain
from hvfreeze.heads.probe import HeldOut, Probe, seen_by
from hvfreeze.heads.settings import HeadConfig
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import build_model, set_memory_formats
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.model.segments import work_of
from hvfreeze.model.settings import ModelConfig
from hvfreeze.strategies.base import BuildContext, OpenModel, Strategy
from hvfreeze.strategies.fitted_head import FittedHead, open_fitted_head
from hvfreeze.strategies.opening import open_strategy
from hvfreeze.training.budget import Work
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a model is built from, beside the number of its classes."""

    model: ModelConfig
    image_shape: tuple[int, ...]
    """(C, H, W) of the images that the model sees, or (T,) of a text's windows."""
    classes: int
    """Of the data set; a strategy may want the same model for others."""
    head: str = "last"
    """--head."""

    @classmethod
    def of(cls, model: ModelConfig, corpus: Corpus, *, image_size: int | None, head: str = "last") -> Blueprint:
        """Return the blueprint of a model for the images of `corpus`, resized to `image_size` where that is given."""
        shape = seen_shape(corpus.train.image_shape, image_size)
        return cls(model=model, image_shape=shape, classes=len(corpus.train.classes), head=head)

    def build(self, classes: int) -> tuple[Chain, list[str]]:
        """Return the model in blocks, for channels_last images, and what the user should know.

        What starts at random comes from torch's generator, whose state the caller decides.

        Raises:
            UsageError: the settings do not fit the model.
            RefusedError: the weights cannot be read, or are another model's.
        """
        settings = self.model
        built = build_model(
            settings.model,
            num_classes=classes,
            weights=settings.weights,
            reset_head=settings.reset_head,
            image_size=max(self.image_shape[1:] or self.image_shape),
            head=self.head,
        )
        built = set_memory_formats(built, self.image_shape)
        # What torchvision does is known; any other model is compared with its own forward pass.
        other = ":" in settings.model
        example = self.example() if other else None
        chain = built.in_blocks(scheme=settings.blocks, example=example)
        if built.chain is not None and example is not None:
            chain.verify(example)
        if example is not None:
            self.check_outputs(chain, example, classes=classes)
        return chain, built.notes

    @torch.no_grad()
    def check_outputs(self, chain: Chain, example: Tensor, *, classes: int) -> None:
        """Raise UsageError unless a classifier that is not torchvision's gives a logit for each class."""
        # A text's logits are (N, classes, T), and a multi-level head takes the place of the model's own.
        if len(self.image_shape) == 1 or self.head == "multi-level":
            return
        with state_kept(chain.model), in_evaluation(chain.model):
            shape = tuple(chain(example).shape)
        if shape != (len(example), classes):
            raise UsageError(
                f"--model ({self.model.model}) gives a tensor of shape {shape} for {len(example)} images, and must "
                f"give {(len(example), classes)}, a logit for each class; give its last layer as many outputs as "
                "num_classes, which the function is called with"
            )

    def example(self) -> Tensor:
        """Return two samples as the model sees them, at random but always the same."""
        shape, generator = (2, *self.image_shape), torch.Generator().manual_seed(0)
        if len(self.image_shape) == 1:
            return torch.randint(self.classes, shape, generator=generator)
        return torch.rand(shape, generator=generator)

    def build_from(self, seed: int) -> tuple[Chain, list[str]]:
        """Return what `build` does for the data set's classes; torch's generator starts at `seed` and has moved on."""
        torch.manual_seed(seed)
        return self.build(self.classes)


HELD_OUT = 0.1
"""Part of the training samples that choose a fitted head's penalty and judge a fine-tuned model."""


@dataclass(frozen=True)
class Part:
    """Settings, and which samples they see: a verb works on one part at a time."""

    settings: Config
    holds_out: bool = False
    """Whether held-out samples are left out of training."""

    @property
    def solves(self) -> bool:
        """Whether the head is fitted, and nothing trained."""
        return self.settings.head.solved


@dataclass(eq=False)
class Opened:
    """A part that is open."""

    part: Part
    model: OpenModel
    feed: TrainFeed
    chain: Chain
    length: Length
    """What the strategy knows of how long it trains."""
    steps: int = 0
    """Optimizer steps that are to be made."""
    first_step: int = 0
    """Steps of the run before them."""
    first_epoch: int = 0
    """Epochs of the run before them."""
    is_used: bool = False
    """Whether a verb has begun to work on it."""

    @property
    def strategy(self) -> Strategy:
        """What trains the model."""
        return cast(Strategy, self.model)

    @property
    def fitted(self) -> FittedHead:
        """What fits the head."""
        assert isinstance(self.model, FittedHead), "no head is fitted in this part"
        return self.model

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.part.settings.optimizer.steps_per_epoch(self.feed.plan.batches_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs, the last perhaps cut short."""
        return -(-self.steps // self.steps_per_epoch)

    def plan(self, steps: int) -> None:
        """Let the training last so many steps; the strategy learns of it. Equal on all ranks."""
        self.steps, self.length.epochs = steps, max(1, -(-steps // self.steps_per_epoch))


@dataclass(frozen=True, eq=False)
class Factory:
    """Opens the parts of one run, one at a time.

    Attributes:
        context: of the run; the chain is the model's own, the feed that of all samples.
        blueprint: what the chain was built from.
        trainable: the parameters that no one had frozen when the run began; the others stay as they are in all parts.
        asked_flips: --flips.
    """

    context: BuildContext
    blueprint: Blueprint
    trainable: frozenset[nn.Parameter]
    asked_flips: str = "auto"

    def open(self, part: Part) -> Opened:
        """Open a part; what another one has frozen trains again. Collective.

        Raises:
            UsageError: the settings do not fit the model or the world; on all ranks.
        """
        given, settings = self.context, part.settings
        release_model(given.chain.model, self.trainable)
        chain, feed = raise_on_all_ranks(given.world, lambda: (self.chain(settings), self.feed(part)), name="part")
        corpus = replace(given.corpus, plan=feed.plan)
        length = Length(settings.optimizer.epochs)
        context = replace(given, chain=chain, feed=feed, corpus=corpus, length=length)
        if part.solves:
            return Opened(part, open_fitted_head(context, settings), feed, chain, length)
        opened = Opened(part, open_strategy(context, settings), feed, chain, length)
        opened.plan(settings.optimizer.epochs * opened.steps_per_epoch)
        return opened

    def rows(self, config: Config) -> int:
        """Return how many views of samples a head is fitted to, on all ranks."""
        return self.context.feed.plan.samples * max(1, self.augment(config).num_views)

    def chain(self, settings: Config) -> Chain:
        """Return the chain that a part works on."""
        chain, head = self.context.chain, settings.head
        if not head.solved:
            return chain
        return solvable_chain(
            chain,
            head,
            classes=self.blueprint.classes,
            example=torch.zeros(2, *self.blueprint.image_shape),
            reads_mirrored=self.reads_mirrored(settings),
            biased=self.context.corpus.task.is_biased,
        )

    def feed(self, part: Part) -> TrainFeed:
        """Return the samples that a part sees."""
        feed, settings = self.context.feed, part.settings
        without = feed.held_out(HELD_OUT) if part.holds_out else None
        feed = feed.shown(self.augment(settings), mirrors=self.mirrors(settings), without=without)
        return replace(feed, plan=feed.plan.in_batches(settings.optimizer.batch_size))

    def augment(self, config: Config) -> Augment:
        """Return the views that the settings ask for."""
        return augment_of(config.data, solved=config.head.solved, mirrors=self.mirrors(config))

    def mirrors(self, config: Config) -> bool:
        """Tell whether the settings ask for flips of these samples."""
        return config.data.mirrors(self.context.corpus.train.flips)

    def reads_mirrored(self, config: Config) -> bool:
        """Tell whether a head that is fitted with the settings averages an image with its flip."""
        return self.mirrors(config) and config.data.flips == "mean"

    def check_held_out(self, head_fit: str) -> None:
        """Raise UsageError where there are too few samples to choose a penalty by."""
        feed = self.context.feed
        try:
            feed.held_out(HELD_OUT)
        except UsageError as error:
            fewest = next(count for count in itertools.count() if round(HELD_OUT * count) > 0)
            raise UsageError(
                f"--head-fit ({head_fit}, as in hvfreeze auto) cannot choose a penalty from "
                f"{plural(feed.plan.samples, 'training sample')}: a tenth of them, but never a class's only one, is "
                f"held out for that, and here that is none; give {fewest} or more, two of a class among them, or "
                "pass --head-fit sgd and another --freeze"
            ) from error

    def held_out(self, solving: Config) -> HeldOut:
        """Return this replica's held-out samples, in the views that a head is fitted to."""
        feed = self.feed(Part(solving))
        return HeldOut(feed.images, feed.every_view(of=feed.held_out(HELD_OUT)))

    def probe(self, solving: Config, tuning: Config) -> Probe:
        """Return what probes how good the features are, before and after a tuning with these settings."""
        feed = self.feed(Part(solving))
        assert isinstance(feed.images, Images), "a text has no head to fit"
        seen = seen_by(feed.plan.samples)
        most = max(1, seen[1] // feed.plan.replicas)
        return Probe(
            feed=self.feed(Part(tuning, holds_out=True)),
            images=feed.images,
            held_out=feed.every_view(of=feed.some_of(feed.held_out(HELD_OUT), most)),
            seen=seen,
            task=self.context.corpus.task,
            learned_from=(tuning.freeze.cut or 0) if tuning.freeze.statistics == "batch" else None,
            pool=solving.head.pool,
            tokens=solving.head.token_form,
            precision=solving.optimizer.precision,
            world=self.context.world,
        )

    def can_hold_out(self) -> bool:
        """Tell whether the network ends in a linear layer, and samples that are not held out fill a batch."""
        feed = self.context.feed
        try:
            before_last_layer(self.context.chain)
            return feed.plan.without(feed.held_out(HELD_OUT)).batches_per_epoch > 0
        except UsageError:
            return False

    def with_affordable_flips(self, settings: Config) -> Config:
        """Return the settings; with rows too many to be compared with each other, a head averages images with flips.

        Unless --flips says otherwise: with the same number of comparisons, more samples tell more than their flips do.
        """
        many = settings.head.head_fit == "kernel" and settings.head.centres is None
        if self.asked_flips != "auto" or not (many and self.mirrors(settings)):
            return settings
        rows = self.context.feed.plan.samples * max(1, self.augment(settings).num_views)
        return replace(settings, data=replace(settings.data, flips="mean")) if rows > ALL_COMPARED else settings

    def work(self, settings: Config, *, cut: int, evaluated: int) -> Work:
        """Return the table of work of a run, whose head is fitted with these settings, and tuned behind `cut`.

        `evaluated` are the samples of this replica's evaluations.

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
        held_out = int(self.context.feed.held_out(HELD_OUT).sum()) * max(1, self.augment(settings).num_views)
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
    """Return how many features of an image a fitted head takes; of `example`, (1, ...), only the shape counts."""
    if settings.head != "multi-level":
        return before_last_layer(chain)[1].in_features
    with in_evaluation(chain.model), torch.no_grad():
        return every_block(chain, pool=settings.pool, example=example, tokens=settings.token_form)(example).shape[1]
