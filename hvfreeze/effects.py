"""Settings that have no effect on a run's data, on its ranks or in its time, of which the user is told.

Settings that no run with the other ones reads are refused before, see `hvfreeze.config.section.Alternative`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.comm.reducer import UNCOMPRESSED_STEPS
from hvfreeze.config.flags import flag_of
from hvfreeze.config.sections import CACHED, TRAINED, VOTED, is_cut
from hvfreeze.config.tree import Config, leaves, settings_of
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.wording import plural


@dataclass(frozen=True)
class Stretch:
    """A kind of work that a run may come to."""

    config: Config
    steps: int = 0
    """Optimizer steps, about; 0 where a head is fitted."""
    steps_per_epoch: int = 1

    @property
    def solves(self) -> bool:
        """Whether a head is fitted."""
        return self.config.head.solved

    @property
    def epochs(self) -> int:
        """Epochs, the last perhaps cut short."""
        return -(-self.steps // self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is going to do, as far as settings may have an effect on it."""

    config: Config
    """The run's, resolved."""
    asked: Config
    """As the user gave it."""
    parts: Sequence[Stretch]
    """What it may come to."""
    ranks: int
    replicas: int
    """Which share the samples."""
    flips: bool
    """Whether a mirrored image of the data set still shows its class."""
    side: int
    """The shorter side of the images in pixels, as they are read."""
    decodes: bool
    """Whether the data set's images are decoded from files, or made by code."""
    oblong: bool = False
    """Whether any image that was looked at is not square."""
    transparent: bool = False
    """Whether any image may have transparent parts."""
    normalises: bool = False
    """Whether a block that is not frozen from the start on has BatchNorm."""
    gives_tokens: bool = False
    """Whether a block gives tokens; looked for where --tokens was given."""

    @property
    def trained(self) -> list[Stretch]:
        """What makes optimizer steps."""
        return [part for part in self.parts if not part.solves]

    @property
    def solved(self) -> list[Stretch]:
        """What fits a head."""
        return [part for part in self.parts if part.solves]

    @property
    def solves_alone(self) -> str:
        """Why nothing is trained."""
        config = self.config
        if not config.freeze.auto:
            return "the head is solved, and no step of training is made"
        timed = config.run.budget_seconds() is not None
        limit = "--time-budget has time" if timed else f"--epochs ({config.optimizer.epochs}) has room"
        return f"{limit} for solving the head alone"

    @property
    def evaluations(self) -> int:
        """How many there are, where one part is all."""
        (part,) = self.parts
        epochs = max(1, part.epochs)
        return sum(epoch == epochs - 1 or self.config.run.evaluates(epoch) for epoch in range(epochs))


class InPart(str):
    """Why a setting has not the whole of its effect."""


Found = str | None
"""None where a plan has what reads a setting, else why the setting has no effect."""
Reader = Callable[[Plan, Any], Found]
"""(plan, the setting's value) -> whether it is read."""


def unless(there: bool, why: str) -> Found:
    """Return `why` where something is not there."""
    return None if there else why


def steps(plan: Plan, value: Any) -> Found:
    """Look for optimizer steps."""
    return unless(bool(plan.trained), plan.solves_alone)


def epochs(plan: Plan, value: int) -> Found:
    """Look for something that is repeated as often as --epochs says."""
    if plan.config.run.budget_seconds() is not None:
        return "--time-budget chooses the steps"
    if plan.config.freeze.auto:
        return unless(bool(plan.trained) or value == 1, plan.solves_alone)
    return steps(plan, value)


def ranks(plan: Plan, value: Any) -> Found:
    """Look for more than one rank."""
    return unless(plan.ranks > 1, "there is one rank")


def shards(plan: Plan, value: Any) -> Found:
    """Look for several shards of the training samples."""
    return ranks(plan, value) or unless(plan.replicas > 1, "all ranks work on the same samples")


def order(plan: Plan, value: Any) -> Found:
    """Look for an order in which samples are met."""
    return None if plan.trained else shards(plan, value) and plan.solves_alone


def views(plan: Plan, value: str) -> Found:
    """Look for training, or for fixed views: hvfreeze auto solves a head on each sample as it is without them."""
    read = bool(plan.trained) or not plan.config.freeze.auto or value.startswith("views")
    return unless(read, "a head is solved on each sample as it is, or on fixed views, as with --augment views:K")


def flips(plan: Plan, value: Any) -> Found:
    """Look for mirror images: among views that are drawn, or beside every sample that a head is solved on."""
    if not plan.flips:
        return f"the mirror image of a sample of {plan.config.data.data} need not show its class"
    drawn = any(part.config.data.augment != "none" for part in plan.trained)
    return unless(drawn or bool(plan.solved), "no view is drawn: every sample is shown as it is")


def oblong_images(plan: Plan, value: str) -> Found:
    """Look for images that are not square, and are made so."""
    sized = plan.config.data.image_size is not None
    return unless(sized and plan.oblong, "no image is made square" if not sized else "images are square already")


def background(plan: Plan, value: str) -> Found:
    """Look for images with transparent parts, or such that are padded."""
    padded = plan.config.data.fit == "pad" and plan.oblong
    return unless(plan.transparent or padded, "no image has transparent parts, and none is padded")


def warmup(plan: Plan, value: int) -> Found:
    """Look for steps enough for a warm-up to end."""
    made = max(part.steps for part in plan.trained)
    return unless(
        value <= made, InPart(f"training has {plural(made, 'step')}, and ends at {made / max(value, 1):.2g} of --lr")
    )


def exchange(plan: Plan, value: str) -> Found:
    """Look for gradients that travel, and so many that they are compressed."""
    made = max(part.steps for part in plan.trained)
    begins = value.startswith(("powersgd", "auto"))
    enough = unless(
        not begins or made > UNCOMPRESSED_STEPS, f"it begins after {UNCOMPRESSED_STEPS} steps, and training has {made}"
    )
    return shards(plan, value) or enough


def larger_images(plan: Plan, value: int) -> Found:
    """Look for images that are scaled down before they are cropped."""
    why = f"images of {plural(plan.side, 'pixel')} are not enlarged before they are cropped"
    return unless(value <= plan.side, InPart(why))


def decoding(plan: Plan, value: bool) -> Found:
    """Look for images that are decoded from files."""
    return unless(plan.decodes, f"no image of {plan.config.data.data} is decoded from a file of its own")


def sharing(plan: Plan, value: bool) -> Found:
    """Look for ranks, or later runs, to share files with."""
    return unless(plan.ranks > 1 or plan.config.cache.cache_dir is not None, "there is one rank")


def recipe(plan: Plan, value: str) -> Found:
    """Look for views that are drawn."""
    drawn = any(part.config.data.augment != "none" and part.config.data.recipe == value for part in plan.parts)
    return unless(drawn, "no view is drawn: every sample is shown as it is")


def scored(plan: Plan, *, shadows: bool) -> Found:
    """Return why no criterion of training is asked, those without effect among them where `shadows` says so."""
    config = plan.config
    if not plan.trained:
        return plan.solves_alone
    parts = [part for part in plan.trained if part.config.freeze.votes]
    parts += [part for part in plan.trained if shadows and part.config.freeze.shadow_names()]
    if not parts:
        return "nothing is voted on: " + (
            "--auto-without leaves votes out" if config.freeze.auto else f"--freeze is {config.freeze.freeze}"
        )
    found = [(first_vote(part), part.steps) for part in parts]
    first, made = found[0]
    late = f"no vote is held: the first would be after step {first}, and training has {made}; "
    late += "lower --freeze-warmup or --interval, or raise --epochs"
    return unless(any(first < made for first, made in found), late)


def first_vote(part: Stretch) -> int:
    """Return the step after which the first vote is due."""
    cadence = Cadence.of(
        part.config.freeze, steps_per_epoch=part.steps_per_epoch, num_epochs=part.config.optimizer.epochs
    )
    return cadence.first_vote


def cadence(plan: Plan, value: int) -> Found:
    """Look for votes, which may be too late to be held."""
    why = scored(plan, shadows=True)
    asked = any(part.config.freeze.votes or part.config.freeze.shadow_names() for part in plan.trained)
    return InPart(why) if why and asked else why


def shadows(plan: Plan, value: str) -> Found:
    """Look for criteria beside the one that decides."""
    others = set(value.split(",")) - {part.config.freeze.freeze for part in plan.trained}
    return scored(plan, shadows=True) or unless(bool(others), f"{value} decides, and is logged as that")


def voters(plan: Plan, value: Any) -> Found:
    """Look for several voters."""
    return scored(plan, shadows=True) or unless(plan.replicas > 1, "there is one voter")


def signal(plan: Plan, value: Any) -> Found:
    """Look for gradients of a rank that differ from their average, or are clipped."""
    alone = plan.replicas == 1 and plan.config.optimizer.clip_grad is None
    return scored(plan, shadows=True) or unless(not alone, "one rank's gradients are their own average")


def cached_rows(plan: Plan, value: Any) -> Found:
    """Look for rows that are worth keeping: output of frozen blocks, of views that come again."""
    if value == "off":
        return None
    config, why = plan.config, "no block is ever frozen whose output could be kept"
    if config.data.shuffle == "global" and not config.cache.cache_shared and plan.replicas > 1:
        return "with --shuffle global ranks meet each other's samples, and rows are not shared: pass --cache-shared"
    for part in plan.parts:
        freeze = part.config.freeze
        if not part.config.data.cacheable():
            why = "with --augment fresh no view comes again"
        else:
            frozen = freeze.cut or (freeze.votes and first_vote(part) < part.steps)
            if part.solves or config.strategy.has_trunk(config) or frozen:
                return None
    return why


def redealing(plan: Plan, value: str) -> Found:
    """Look for ranks that run out of work, because their blocks freeze."""
    frozen = plan.config.freeze.cut or scored(plan, shadows=False) is None
    return unless(value == "off" or bool(frozen), "no block is ever frozen")


def optional_evaluations(plan: Plan, value: Any) -> Found:
    """Look for epochs after which an evaluation may be left out."""
    always = 0 if plan.config.freeze.auto else 1
    return unless(sum(part.epochs for part in plan.trained) > always, "every epoch is evaluated that there is")


def patience(plan: Plan, value: int) -> Found:
    """Look for evaluations enough to find nothing better so many times in a row."""
    if plan.evaluations == 1:
        return "there is one evaluation"
    return unless(
        value < plan.evaluations - 1,
        f"there are {plan.evaluations} evaluations, of which the first is always the best so far",
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
    "keep": lambda plan, value: unless(value == "last" or plan.evaluations > 1, "there is one evaluation"),
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
    "statistics": lambda plan, value: unless(plan.normalises, "no block that trains has BatchNorm"),
    "tokens": lambda plan, value: unless(plan.gives_tokens, "no block gives tokens"),
    "vote_weight": voters,
}
"""By setting. What is not here has an effect wherever it is known, or what its alternatives say below."""


def unread(plan: Plan, leaf: str, value: Any) -> Found:
    """Return why a setting has no effect on a run."""
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
    """Return a line for each reason for which some of the settings that were given do nothing."""
    values = settings_of(plan.asked)
    told: dict[str, list[str]] = {}
    for name in leaves():
        if name in plan.asked.given and values.get(name) is not None:
            why = unread(plan, name, values[name])
            if why is not None:
                shown = "" if isinstance(values[name], bool) else f" ({values[name]})"
                how = f"{'not the whole' if isinstance(why, InPart) else 'no'} effect of {{flags}}, because {why}"
                told.setdefault(how, []).append(flag_of(name) + shown)
    return [how.replace("{flags}", ", ".join(flags)) for how, flags in told.items()]
