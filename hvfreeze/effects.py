"""Finds settings without effect on a run's data, ranks or length, and tells the user.

Settings that no run with the other settings reads are refused before, see `hvfreeze.section.Alternative`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.comm.reducer import UNCOMPRESSED_STEPS
from hvfreeze.config.flags import flag_of
from hvfreeze.config.tree import Config, leaves, settings_of
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.settings import VOTED
from hvfreeze.heads.settings import TRAINED
from hvfreeze.prefix.settings import CACHED
from hvfreeze.wording import plural


def is_cut(config: Config) -> bool:
    """Return True if a run uses the blocks of its model; the last one has the head's learning rate."""
    freeze, head, rates = config.freeze, config.head, config.optimizer.head_lr
    asked = freeze.freeze != "none" or bool(freeze.shadow_names()) or head.head == "multi-level" or rates is not None
    return asked or config.strategy.cuts(config)


@dataclass(frozen=True)
class Stretch:
    """A kind of work that a run may do."""

    config: Config
    steps: int = 0
    """Approximate number of optimizer steps; 0 if a head is fitted."""
    steps_per_epoch: int = 1

    @property
    def solves(self) -> bool:
        """Whether a head is fitted."""
        return self.config.head.solved

    @property
    def epochs(self) -> int:
        """Number of epochs; the last may be incomplete."""
        return -(-self.steps // self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parts of a run's plan that settings may affect."""

    config: Config
    """The resolved settings of the run."""
    asked: Config
    """The settings as given by the user."""
    parts: Sequence[Stretch]
    """The work that the run may do."""
    ranks: int
    replicas: int
    """Number of replicas, which share the samples."""
    flips: bool
    """Whether a horizontally flipped image of the data set still belongs to its class."""
    side: int
    """Shorter side of the images in pixels, as they are read."""
    decodes: bool
    """Whether the data set's images are decoded from files."""
    oblong: bool = False
    """Whether any sampled image is not square."""
    transparent: bool = False
    """Whether any image may have transparent parts."""
    normalises: bool = False
    """Whether a block that is not always frozen has BatchNorm."""
    gives_tokens: bool = False
    """Whether a block gives tokens; looked for where --tokens was given."""

    @property
    def trained(self) -> list[Stretch]:
        """The stretches with optimizer steps."""
        return [part for part in self.parts if not part.solves]

    @property
    def solved(self) -> list[Stretch]:
        """The stretches that fit a head."""
        return [part for part in self.parts if part.solves]

    @property
    def solves_alone(self) -> str:
        """The reason why nothing is trained."""
        config = self.config
        if not config.freeze.auto:
            return "the head is fitted and there are no training steps"
        timed = config.run.budget_seconds() is not None
        limit = "--time-budget leaves time" if timed else f"--epochs ({config.optimizer.epochs}) leaves room"
        return f"{limit} only for fitting the head"

    @property
    def evaluations(self) -> int:
        """Number of evaluations of a run with one stretch."""
        (part,) = self.parts
        epochs = max(1, part.epochs)
        return sum(epoch == epochs - 1 or self.config.run.evaluates(epoch) for epoch in range(epochs))


class InPart(str):
    """The reason why a setting has only a part of its effect."""


Found = str | None
"""None if the plan uses a setting, else the reason why it has no effect."""
Reader = Callable[[Plan, Any], Found]
"""(plan, the setting's value) -> Found."""


def unless(there: bool, why: str) -> Found:
    """Return `why` unless the setting is used."""
    return None if there else why


def steps(plan: Plan, value: Any) -> Found:
    """Check settings of optimizer steps, which need training."""
    return unless(bool(plan.trained), plan.solves_alone)


def epochs(plan: Plan, value: int) -> Found:
    """Check --epochs, which needs something that is repeated."""
    if plan.config.run.budget_seconds() is not None:
        return "--time-budget determines the number of steps"
    if plan.config.freeze.auto:
        return unless(bool(plan.trained) or value == 1, plan.solves_alone)
    return steps(plan, value)


def ranks(plan: Plan, value: Any) -> Found:
    """Check settings of ranks, which need more than one rank."""
    return unless(plan.ranks > 1, "there is only one rank")


def shards(plan: Plan, value: Any) -> Found:
    """Check settings of shards, which need several shards of the training samples."""
    return ranks(plan, value) or unless(plan.replicas > 1, "all ranks train on the same samples")


def order(plan: Plan, value: Any) -> Found:
    """Check settings of the order of samples, which need training or shards."""
    return None if plan.trained else shards(plan, value) and plan.solves_alone


def views(plan: Plan, value: str) -> Found:
    """Check settings of views, which need training or fixed views: hvfreeze auto may fit a head without views."""
    read = bool(plan.trained) or not plan.config.freeze.auto or value.startswith("views")
    return unless(read, "a head is fitted to the original images, or to the fixed views of --augment views:K")


def flips(plan: Plan, value: Any) -> Found:
    """Check --flips, which needs augmented views, or a head that is fitted to each image and its flip."""
    if not plan.flips:
        return f"a flipped image of {plan.config.data.data} may not belong to the same class"
    drawn = any(part.config.data.augment != "none" for part in plan.trained)
    return unless(drawn or bool(plan.solved), "no augmented views are drawn")


def oblong_images(plan: Plan, value: str) -> Found:
    """Check --fit, which needs images that are not square and are made square."""
    sized = plan.config.data.image_size is not None
    return unless(
        sized and plan.oblong, "images keep their shape without --image-size" if not sized else "all images are square"
    )


def background(plan: Plan, value: str) -> Found:
    """Check --background, which needs images with transparent parts, or padding."""
    padded = plan.config.data.fit == "pad" and plan.oblong
    return unless(plan.transparent or padded, "no image is transparent or padded")


def warmup(plan: Plan, value: int) -> Found:
    """Check --lr-warmup, which needs enough steps to end."""
    made = max(part.steps for part in plan.trained)
    return unless(
        value <= made, InPart(f"training has {plural(made, 'step')} and ends at {made / max(value, 1):.2g} of --lr")
    )


def exchange(plan: Plan, value: str) -> Found:
    """Check --compression, which needs an exchange of gradients, and enough steps to start."""
    made = max(part.steps for part in plan.trained)
    begins = value.startswith(("powersgd", "auto"))
    enough = unless(
        not begins or made > UNCOMPRESSED_STEPS,
        f"compression starts after {UNCOMPRESSED_STEPS} steps, and training has {made}",
    )
    return shards(plan, value) or enough


def larger_images(plan: Plan, value: int) -> Found:
    """Check --resize, which needs images that are scaled down before they are cropped."""
    why = f"images of {plural(plan.side, 'pixel')} are not enlarged before they are cropped"
    return unless(value <= plan.side, InPart(why))


def decoding(plan: Plan, value: bool) -> Found:
    """Check --skip-bad, which needs images that are decoded from files."""
    return unless(plan.decodes, f"{plan.config.data.data} has no image files to decode")


def sharing(plan: Plan, value: bool) -> Found:
    """Check --cache-shared, which needs several ranks, or later runs, to share files with."""
    return unless(plan.ranks > 1 or plan.config.cache.cache_dir is not None, "there is only one rank")


def recipe(plan: Plan, value: str) -> Found:
    """Check --recipe, which needs augmented views."""
    drawn = any(part.config.data.augment != "none" and part.config.data.recipe == value for part in plan.parts)
    return unless(drawn, "no augmented views are drawn")


def scored(plan: Plan, *, shadows: bool) -> Found:
    """Return why no criterion is evaluated in training; with `shadows`, shadow criteria count."""
    config = plan.config
    if not plan.trained:
        return plan.solves_alone
    parts = [part for part in plan.trained if part.config.freeze.votes]
    parts += [part for part in plan.trained if shadows and part.config.freeze.shadow_names()]
    if not parts:
        return "there are no votes: " + (
            "--auto-without turns votes off" if config.freeze.auto else f"--freeze is {config.freeze.freeze}"
        )
    found = [(first_vote(part), part.steps) for part in parts]
    first, made = found[0]
    late = f"there are no votes: the first would follow step {first}, and training has {made} steps; "
    late += "lower --freeze-warmup or --interval, or raise --epochs"
    return unless(any(first < made for first, made in found), late)


def first_vote(part: Stretch) -> int:
    """Return the step after which the first vote is due."""
    cadence = Cadence.of(
        part.config.freeze, steps_per_epoch=part.steps_per_epoch, num_epochs=part.config.optimizer.epochs
    )
    return cadence.first_vote


def cadence(plan: Plan, value: int) -> Found:
    """Check settings of the vote schedule, which need votes, which may be too late to be held."""
    why = scored(plan, shadows=True)
    asked = any(part.config.freeze.votes or part.config.freeze.shadow_names() for part in plan.trained)
    return InPart(why) if why and asked else why


def shadows(plan: Plan, value: str) -> Found:
    """Check --shadow, which needs criteria other than the deciding one."""
    others = set(value.split(",")) - {part.config.freeze.freeze for part in plan.trained}
    return scored(plan, shadows=True) or unless(bool(others), f"{value} already decides the votes")


def voters(plan: Plan, value: Any) -> Found:
    """Check settings of the vote count, which need several voters."""
    return scored(plan, shadows=True) or unless(plan.replicas > 1, "there is only one voter")


def signal(plan: Plan, value: Any) -> Found:
    """Check --signal, which needs gradients of a rank that differ from their average, or are clipped."""
    alone = plan.replicas == 1 and plan.config.optimizer.clip_grad is None
    return scored(plan, shadows=True) or unless(not alone, "with one rank, the average is its own gradient")


def cached_rows(plan: Plan, value: Any) -> Found:
    """Check --cache, which needs rows worth storing: output of frozen blocks for views that repeat."""
    if value == "off":
        return None
    config, why = plan.config, "no block is frozen, so there is no output to cache"
    if config.data.shuffle == "global" and not config.cache.cache_shared and plan.replicas > 1:
        return (
            "with --shuffle global each rank trains on samples of other ranks, and the cache is not shared; add "
            "--cache-shared"
        )
    for part in plan.parts:
        freeze = part.config.freeze
        if not part.config.data.cacheable():
            why = "--augment fresh never repeats a view"
        else:
            frozen = freeze.cut or (freeze.votes and first_vote(part) < part.steps)
            if part.solves or config.strategy.has_trunk(config) or frozen:
                return None
    return why


def redealing(plan: Plan, value: str) -> Found:
    """Check --redeal, which needs ranks that become idle because their blocks freeze."""
    frozen = plan.config.freeze.cut or scored(plan, shadows=False) is None
    return unless(value == "off" or bool(frozen), "no block is frozen")


def optional_evaluations(plan: Plan, value: Any) -> Found:
    """Check --evaluate-every, which needs epochs whose evaluation may be skipped."""
    always = 0 if plan.config.freeze.auto else 1
    return unless(sum(part.epochs for part in plan.trained) > always, "every epoch is evaluated anyway")


def patience(plan: Plan, value: int) -> Found:
    """Check --early-stop, which needs enough evaluations."""
    if plan.evaluations == 1:
        return "there is only one evaluation"
    return unless(
        value < plan.evaluations - 1,
        f"there are {plan.evaluations} evaluations, and the first is always the best so far",
    )


FOUND: dict[str, Reader] = {
    "augment": views,
    "auto_without": steps,
    "background": background,
    "blocks": lambda plan, value: unless(is_cut(plan.config), "the model is used as a whole"),
    "cache": cached_rows,
    "cache_shared": sharing,
    "compression": exchange,
    "cut": lambda plan, value: steps(plan, value) if plan.config.freeze.auto else None,
    "early_stop": patience,
    "epochs": epochs,
    "evaluate_every": optional_evaluations,
    "fit": oblong_images,
    "flips": flips,
    "freeze": lambda plan, value: scored(plan, shadows=False) if plan.config.freeze.votes else None,
    "freeze_warmup": cadence,
    "interval": cadence,
    "keep": lambda plan, value: unless(value == "last" or plan.evaluations > 1, "there is only one evaluation"),
    "lr_warmup": warmup,
    "partition": shards,
    "quorum": voters,
    "recipe": recipe,
    "redeal": redealing,
    "resample": lambda plan, value: unless(plan.decodes, "no file of an image is resized"),
    "resize": larger_images,
    "shadow": shadows,
    "shard_sizes": shards,
    "shuffle": order,
    "signal": signal,
    "skip_bad": decoding,
    "statistics": lambda plan, value: unless(plan.normalises, "no trained block has BatchNorm"),
    "tokens": lambda plan, value: unless(plan.gives_tokens, "no block gives tokens"),
    "vote_weight": voters,
}
"""Checks by setting. Other settings always have an effect, or that of their alternatives below."""


def unread(plan: Plan, leaf: str, value: Any) -> Found:
    """Return why a setting has no effect on a run, None if it has."""
    section, field, _ = leaves()[leaf]
    if section == "strategy" and leaf != "strategy":
        found = plan.config.strategy.unread(leaf, ranks=plan.ranks)
        return found or (FOUND[leaf](plan, value) if leaf in FOUND else None)
    alternatives = field.metadata["of"]
    found = steps(plan, value) if TRAINED in alternatives and leaf != "epochs" else None
    found = found or (cached_rows(plan, value) if CACHED in alternatives else None)
    found = found or (scored(plan, shadows=True) if VOTED in alternatives and leaf not in FOUND else None)
    return found or (FOUND[leaf](plan, value) if leaf in FOUND else None)


def without_effect(plan: Plan) -> list[str]:
    """Return a line for each reason why some of the given settings have no effect."""
    values = settings_of(plan.asked)
    found: dict[tuple[bool, str], list[str]] = {}
    for name in leaves():
        if name in plan.asked.given and values.get(name) is not None:
            why = unread(plan, name, values[name])
            if why is not None:
                shown = "" if isinstance(values[name], bool) else f" ({values[name]})"
                found.setdefault((isinstance(why, InPart), why), []).append(flag_of(name) + shown)
    return [
        f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} {'limited' if in_part else 'no'} effect: {why}"
        for (in_part, why), flags in found.items()
    ]
