"""A stage made ready: its model, the samples that it sees, and its strategy."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.config.rules import is_downloaded
from hvfreeze.config.sections import ModelConfig, StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus, TrainFeed, augment_of, rows_at_once
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.decoding import Images
from hvfreeze.data.views import Augment, Statistics, seen_shape
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.frozen_prefix import release_model
from hvfreeze.heads.multilevel import solvable_chain
from hvfreeze.inference.card import read_card, sha256_of
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import build_model, set_memory_formats, timm_statistics
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.model.weight_names import entry_of_file, find_entry
from hvfreeze.model.weights import statistics_of_entry
from hvfreeze.strategies.base import BuildContext, Strategy
from hvfreeze.training.guard import HeldOut
from hvfreeze.training.stages import Opened, Stage, single_stage
from hvfreeze.training.trial import Judge, seen_by
from hvfreeze.user_code import TIMM
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


@dataclass(frozen=True)
class Normalisation:
    """The mean and standard deviation of each channel with which images are normalised, and where they come from."""

    statistics: Statistics
    source: str

    def describe(self) -> str:
        """Return a note for the user."""
        mean, std = (", ".join(f"{number:.4g}" for number in numbers) for numbers in self.statistics)
        return f"images are normalised with mean {mean} and standard deviation {std}: {self.source}"


def normalisation_of(config: Config, image_set: ImageSet, model: nn.Module) -> Normalisation:
    """Return how a run normalises images: as it was told, as the weights were trained, or by the data's own values."""
    given = config.data.statistics()
    if given is not None:
        return Normalisation(given, "--mean and --std")
    known = trained_with(config.model, model)
    if known is not None:
        return known
    name = image_set.name
    source = f"those of {name}" if name in MEASURED else "ImageNet's, for want of others"
    configured = configured_in(model)
    if configured is not None and configured != (image_set.mean, image_set.std):
        mean, std = (",".join(f"{number:.4g}" for number in numbers) for numbers in configured)
        source += f"; the model's configuration has --mean {mean} --std {std}, in case it comes with trained weights"
    return Normalisation((image_set.mean, image_set.std), source)


def trained_with(settings: ModelConfig, model: nn.Module) -> Normalisation | None:
    """Return the mean and standard deviation that images had when the weights were trained, None where nobody says.

    In this order: the card that a run leaves beside its model, torchvision of its own weights, the configuration that
    comes with a file of a hub, and what timm says of the model, or the model of itself.
    """
    if settings.weights == "none":
        return None
    entry = find_entry(settings.model, settings.weights)
    if entry is None and not is_downloaded(settings.weights):
        path = Path(os.path.expanduser(settings.weights))
        with suppress(RefusedError):
            card = read_card(path.with_suffix(".yaml"))
            if card.image is not None and card.sha256 == sha256_of(path):
                return Normalisation((card.image.mean, card.image.std), f"those of the run that made {path}")
        configured = configured_beside(path)
        if configured is not None:
            return Normalisation(configured, f"those in {path.with_name(HUB_CONFIGURATION)}")
        entry = entry_of_file(settings.model, path)
    if entry is not None:
        return Normalisation(statistics_of_entry(entry), f"torchvision's for {entry}")
    if settings.model.startswith(TIMM):
        known = timm_statistics(settings.model)
        return known and Normalisation(known, f"timm's for {settings.model.removeprefix(TIMM)}")
    known = configured_in(model)
    return known and Normalisation(known, f"those in the configuration of {settings.model}")


HUB_CONFIGURATION = "config.json"
MEASURED = ("digits", "cifar10", "cifar100")
"""Data sets whose own values are known."""


def configured_beside(path: Path) -> Statistics | None:
    """Return mean and standard deviation in the configuration that a hub keeps beside a file of timm's weights."""
    try:
        tree = json.loads(path.with_name(HUB_CONFIGURATION).read_bytes()[: 2**20])
    except (OSError, ValueError):
        return None
    return statistics_in(tree.get("pretrained_cfg")) if isinstance(tree, dict) else None


def configured_in(model: nn.Module) -> Statistics | None:
    """Return mean and standard deviation in the configuration of a model that timm has made; None of any other."""
    return statistics_in(getattr(model, "pretrained_cfg", None))


def statistics_in(configuration: Any) -> Statistics | None:
    """Return mean and standard deviation in a configuration of timm's, None where it has none for three channels."""
    if not isinstance(configuration, Mapping):
        return None
    found = []
    for name in ("mean", "std"):
        numbers = configuration.get(name)
        if not isinstance(numbers, (list, tuple)) or [*map(type, numbers)] not in ([float] * 3, [int] * 3):
            return None
        found.append((float(numbers[0]), float(numbers[1]), float(numbers[2])))
    mean, std = found
    return (mean, std) if min(std) > 0 else None


@dataclass(frozen=True)
class Choice:
    """What must be known of a strategy before it is opened."""

    builder: str
    """module:function, imported when it is asked for: (context, configuration) -> strategy. A collective."""
    ranks_per_replica: Callable[[StrategyConfig, World], int]
    """How many neighbouring ranks work on one batch together, as one replica: a divisor of the number of ranks."""
    reads_images: Callable[[StrategyConfig, int], bool] = lambda settings, place: True
    """Whether the rank at this place in its replica is the one, or one of those, that keep pixels in memory."""
    takes_any: bool = False
    """Whether its batches that train nothing may have more samples than those that train."""


CHOICES = {
    "replicas": Choice(
        "hvfreeze.strategies.data_parallel:open_data_parallel", lambda settings, world: 1, takes_any=True
    ),
    "shared-trunk": Choice(
        "hvfreeze.strategies.shared_trunk.build:open_shared_trunk",
        lambda settings, world: world.size,
        lambda settings, place: place == 0 or settings.trunk == "whole",
    ),
    "grid": Choice(
        "hvfreeze.strategies.grid.build:open_grid",
        lambda settings, world: settings.grid_parts(world.size),
        lambda settings, place: place == 0 or settings.redeals,
    ),
    "local-sgd": Choice("hvfreeze.strategies.local_sgd:open_local_sgd", lambda settings, world: 1, takes_any=True),
    "stale-ring": Choice(
        "hvfreeze.strategies.stale_ring.build:open_stale_ring",
        lambda settings, world: settings.ring_parts(world.size) - 1,
        lambda settings, place: place == 0,
    ),
    "local-critics": Choice(
        "hvfreeze.strategies.local_critics.build:open_local_critics",
        lambda settings, world: world.size,
        lambda settings, place: place == 0,
    ),
    "subnets": Choice("hvfreeze.strategies.subnets.strategy:open_subnets", lambda settings, world: 1, takes_any=True),
}


def replicas_of(world: World, settings: StrategyConfig) -> int:
    """Return how many replicas the ranks form: each has its own share of the samples.

    Raises:
        UsageError: the number of ranks does not fit --parts or --replicas.
    """
    return world.size // CHOICES[settings.strategy].ranks_per_replica(settings, world)


def reads_images(world: World, settings: StrategyConfig, rank: int) -> bool:
    """Tell whether a rank reads images in every epoch, and should keep their pixels where there is room."""
    choice = CHOICES[settings.strategy]
    return choice.reads_images(settings, rank % choice.ranks_per_replica(settings, world))


def rows_evaluated(config: Config, shape: Sequence[int]) -> int:
    """Return how many samples, of `shape` as the model sees them, a batch that trains nothing has."""
    batch_size = config.optimizer.batch_size
    return rows_at_once(batch_size, shape) if CHOICES[config.strategy.strategy].takes_any else batch_size


HELD_OUT = 0.1
"""Part of the training samples that choose a solution's penalty, and that the guard judges by, before they are
fitted too."""


@dataclass(frozen=True, eq=False)
class StageFactory:
    """Opens stages of one run, one at a time.

    Attributes:
        context: of the run; the chain is the model's own, the feed that of all samples.
        config: the run's.
        blueprint: what the chain was built from.
        trainable: the parameters that no one had frozen when the run began; the others stay as they are in all stages.
    """

    context: BuildContext
    config: Config
    blueprint: Blueprint
    trainable: frozenset[nn.Parameter]

    def open(self, stage: Stage) -> Opened:
        """Open a stage; what another stage has frozen trains again. Collective.

        Raises:
            UsageError: the stage's settings do not fit the model or the world; on all ranks.
        """
        given = self.context
        release_model(given.chain.model, self.trainable)
        chain, feed = raise_on_all_ranks(given.world, lambda: (self.chain(stage), self.feed(stage)), name="stage")
        corpus = replace(given.corpus, plan=feed.plan)
        length = Length(stage.config.optimizer.epochs)
        context = replace(given, chain=chain, feed=feed, corpus=corpus, length=length)
        module, _, function = CHOICES[stage.config.strategy.strategy].builder.partition(":")
        strategy: Strategy = getattr(importlib.import_module(module), function)(context, stage.config)
        return Opened(strategy, feed, chain, length)

    def stages(self) -> tuple[Stage, ...]:
        """Return the one stage of a run, with the steps that --epochs gives it, or one epoch's under a time budget."""
        config, solved = self.config, self.config.head.solved
        if solved:
            self.check_held_out()
        timed = config.run.budget_seconds() is not None
        batches = self.context.feed.plan.batches_per_epoch
        epochs = 1 if timed and not solved else config.optimizer.epochs
        return (single_stage(config, batches_per_epoch=batches, epochs=epochs),)

    def rows(self, config: Config) -> int:
        """Return how many views of samples a head is fitted to, on all ranks."""
        return self.context.feed.plan.samples * max(1, self.augment(config).num_views)

    def chain(self, stage: Stage) -> Chain:
        """Return the chain that a stage works on."""
        chain, head = self.context.chain, stage.config.head
        if not head.solved:
            return chain
        blueprint = self.blueprint
        return solvable_chain(
            chain,
            head,
            classes=blueprint.classes,
            example=torch.zeros(2, *blueprint.image_shape),
            reads_mirrored=self.reads_mirrored(stage.config),
        )

    def feed(self, stage: Stage) -> TrainFeed:
        """Return the samples that a stage sees."""
        feed = self.context.feed
        without = feed.held_out(HELD_OUT) if stage.guarded else None
        feed = feed.shown(self.augment(stage.config), mirrors=self.mirrors(stage.config), without=without)
        return replace(feed, plan=feed.plan.in_batches(stage.config.optimizer.batch_size))

    def augment(self, config: Config) -> Augment:
        """Return the views that the settings ask for."""
        return augment_of(config.data, solved=config.head.solved, mirrors=self.mirrors(config))

    def mirrors(self, config: Config) -> bool:
        """Tell whether the settings ask for mirror images of these samples."""
        return config.data.mirrors(self.context.corpus.train.flips)

    def reads_mirrored(self, config: Config) -> bool:
        """Tell whether a head that is solved with the settings looks at images and mirror images together."""
        return self.mirrors(config) and config.data.mirror == "mean"

    def check_held_out(self) -> None:
        """Raise UsageError where there are too few samples to choose a penalty by."""
        feed = self.context.feed
        try:
            feed.held_out(HELD_OUT)
        except UsageError as error:
            fewest = next(count for count in itertools.count() if round(HELD_OUT * count) > 0)
            raise UsageError(
                f"--head-fit ({self.config.head.head_fit}, as with --freeze auto) cannot choose a penalty from "
                f"{plural(feed.plan.samples, 'training sample')}: a tenth of them, but never a class's only one, is "
                f"held out for that, and here that is none; give {fewest} or more, two of a class among them, or "
                "pass --head-fit sgd and another --freeze"
            ) from error

    def held_out(self, stage: Stage) -> HeldOut:
        """Return this replica's samples that guarded stages leave out, in the views of `stage`, which solves."""
        feed = self.feed(stage)
        return HeldOut(feed.images, feed.every_view(of=feed.held_out(HELD_OUT)))

    def judge(self, stages: Sequence[Stage]) -> Judge:
        """Return what judges a trial of tuning; `stages` solve a head and tune."""
        solving, tuning = (next(stage for stage in stages if stage.solves == solves) for solves in (True, False))
        if tuning.config.data.mirror == "off":
            # Heads are fitted to the samples that blocks are tuned on; held-out ones are seen like these.
            solving = replace(solving, config=without_mirror(solving.config))
        feed, config = self.feed(solving), self.config
        assert isinstance(feed.images, Images), "a text has no head to solve"
        seen = seen_by(feed.plan.samples, in_haste=any(stage.is_in_haste for stage in stages))
        most = max(1, seen[1] // feed.plan.replicas)
        return Judge(
            feed=self.feed(tuning),
            images=feed.images,
            held_out=feed.every_view(of=feed.some_of(feed.held_out(HELD_OUT), most)),
            seen=seen,
            learned_from=(tuning.config.freeze.cut or 0) if tuning.config.freeze.statistics == "batch" else None,
            pool=config.head.pool,
            precision=config.optimizer.precision,
            world=self.context.world,
        )

    def guarded_batches(self) -> int:
        """Return the batches of an epoch without the samples that are held out, 0 where they fill none."""
        feed = self.context.feed
        try:
            return feed.plan.without(feed.held_out(HELD_OUT)).batches_per_epoch
        except UsageError:
            return 0


def without_mirror(config: Config) -> Config:
    """Return the settings without mirror images."""
    return replace(config, data=replace(config.data, mirror="off"))
