"""What must be there in a run for a setting to have an effect: each setting names it, and who gave one in vain is told.

A setting says in `read_by`, where it is declared, what reads it. `READERS` knows for each of these names how to find
in a run's plan whether it is there, and what to say where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.comm.reducer import UNCOMPRESSED_STEPS
from hvfreeze.config.flags import flag_of
from hvfreeze.config.rules import parse_mlp
from hvfreeze.config.tree import Config, flat, leaves, to_dict
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.criteria import CRITERIA
from hvfreeze.wording import plural

BY_BATCH = ("shared-trunk", "local-critics", "stale-ring")
"""Strategies whose BatchNorm uses each batch's statistics wherever it trains."""
OWN_PARTS = ("local-critics", "stale-ring")
"""Strategies that cut a model into other numbers of parts than there are ranks."""
WHOLE_MODELS = ("replicas", "local-sgd")
"""Strategies whose ranks have the whole model, and use its blocks only where some are frozen."""


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


def drawn_views(plan: Plan, value: str) -> Found:
    """Look for views that are drawn by --recipe."""
    drawn = (part.config.data for part in plan.parts)
    is_drawn = any(data.augment != "none" and data.recipe == value for data in drawn)
    return unless(is_drawn, "no view is drawn: every sample is shown as it is")


def has_trunk(config: Config) -> bool:
    """Tell whether the strategy freezes all blocks before the heads that it trains."""
    strategy, mlp = config.strategy.strategy, parse_mlp("head", config.head.head)
    return strategy == "shared-trunk" or (strategy == "subnets" and mlp is not None)


def cuts(plan: Plan, value: Any) -> Found:
    """Look for a place at which the model is cut into blocks."""
    config = plan.config
    frozen = any(part.config.freeze.freeze != "none" or part.config.freeze.shadow_names() for part in plan.trained)
    read = any(part.config.head.head == "multi-level" for part in plan.solved)
    # The last block is what has the head's own rate.
    read = read or (bool(plan.trained) and config.optimizer.head_rates() is not None)
    strategy = config.strategy.strategy
    whole = strategy in WHOLE_MODELS or (strategy == "subnets" and not has_trunk(config))
    return unless(frozen or read or not whole, "the model is used as a whole")


def mirror_images(plan: Plan, value: Any) -> Found:
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


def norms(plan: Plan, value: str) -> Found:
    """Look for BatchNorm that trains, and does as it is told."""
    strategy = plan.config.strategy.strategy
    if value == "kept" and strategy in BY_BATCH:
        return f"BatchNorm that trains with --strategy {strategy} uses each batch's statistics"
    return unless(plan.normalises, "no block that trains has BatchNorm")


def exchange(plan: Plan, value: str) -> Found:
    """Look for gradients that travel, and so many that they are compressed."""
    made = max(part.steps for part in plan.trained)
    begins = value.startswith(("powersgd", "auto"))
    enough = unless(
        not begins or made > UNCOMPRESSED_STEPS, f"it begins after {UNCOMPRESSED_STEPS} steps, and training has {made}"
    )
    return shards(plan, value) or enough


def scored(plan: Plan, *, shadows: bool) -> Found:
    """Return why no criterion of training is asked, those without effect among them where `shadows` says so."""
    config = plan.config
    if not plan.trained:
        return plan.solves_alone
    if config.strategy.strategy == "shared-trunk":
        return "the trunk of --strategy shared-trunk is frozen from the start"
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


def criteria(plan: Plan, value: Any) -> Found:
    """Look for votes, or criteria that are scored without effect."""
    return scored(plan, shadows=True)


def shadows(plan: Plan, value: str) -> Found:
    """Look for criteria beside the one that decides."""
    decides = {part.config.freeze.freeze for part in plan.trained}
    others = set(value.split(",")) - decides
    return criteria(plan, value) or unless(bool(others) or value == "none", f"{value} decides, and is logged as that")


def gradients(plan: Plan, value: Any) -> Found:
    """Look for a criterion that looks at the norms of gradients."""
    settings = [part.config.freeze for part in plan.trained]
    asked = {name for each in settings for name in (each.freeze, *each.shadow_names())}
    watched = any(name in CRITERIA and CRITERIA[name].watches == "norms" for name in asked)
    return criteria(plan, value) or unless(watched, "no criterion of the run looks at the norms of gradients")


def gains(plan: Plan, value: Any) -> Found:
    """Look for a criterion that compares what blocks gain."""
    asked = {name for part in plan.trained for name in part.config.freeze.criteria()}
    return criteria(plan, value) or unless("coherence" in asked, "no criterion of the run looks at what blocks gain")


def observed(plan: Plan, value: Any) -> Found:
    """Look for gradients of a rank that are summed for a vote, and that differ from their average or are clipped."""
    if plan.replicas == 1 and plan.config.optimizer.clip_grad is None:
        return "one rank's gradients are their own average"
    weighs = plan.config.freeze.vote_weight == "snr"
    return criteria(plan, value) if weighs else gradients(plan, value)


def tuning(plan: Plan, value: Any) -> Found:
    """Look for a fine-tuning of hvfreeze auto."""
    return unless(bool(plan.trained) or value == "none", plan.solves_alone)


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
            if part.solves or has_trunk(config) or frozen:
                return None
    return why


def line(plan: Plan, value: Any) -> Found:
    """Look for several ranks that pass a batch on to each other."""
    settings = plan.config.strategy
    if settings.trunk == "whole":
        return "every rank runs the whole trunk"
    if settings.strategy in OWN_PARTS:
        return unless(settings.parts != 1, "--parts is 1")
    count = settings.grid_parts(plan.ranks) if settings.strategy == "grid" else plan.ranks
    return ranks(plan, value) or unless(count > 1, "--parts is 1")


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


READERS: dict[str, Reader] = {
    "run": lambda plan, value: None,
    # Rounds after which ranks meet, or are dealt other neurons.
    "rounds": lambda plan, value: None if plan.config.strategy.strategy == "subnets" else ranks(plan, value),
    "background": background,
    "cache": lambda plan, value: unless(plan.config.cache.cache != "off", "--cache is off"),
    "cached-rows": cached_rows,
    "cadence": cadence,
    "criteria": criteria,
    # Blocks that are frozen from the start; in hvfreeze auto, while others are tuned.
    "cut": lambda plan, value: tuning(plan, value) if plan.config.freeze.auto else None,
    "cuts": cuts,
    "decay": lambda plan, value: unless(plan.config.optimizer.weight_decay > 0, "--weight-decay is 0"),
    "decoding": lambda plan, value: unless(
        plan.decodes, f"no image of {plan.config.data.data} is decoded from a file of its own"
    ),
    "drawn-views": drawn_views,
    "epochs": epochs,
    "evaluations": lambda plan, value: unless(value == "last" or plan.evaluations > 1, "there is one evaluation"),
    "exchange": exchange,
    "files": lambda plan, value: unless(plan.config.data.data != "digits", "the digits come with scikit-learn"),
    # Votes, where --freeze names a criterion.
    "freezing": lambda plan, value: scored(plan, shadows=False) if value in CRITERIA else None,
    "gains": gains,
    "gradients": gradients,
    "larger-images": lambda plan, value: unless(
        value <= plan.side, InPart(f"images of {plural(plan.side, 'pixel')} are not enlarged before they are cropped")
    ),
    "kernel": lambda plan, value: unless(
        any(part.config.head.head_fit == "kernel" for part in plan.solved),
        "no head compares samples, as with --head-fit kernel or hvfreeze auto",
    ),
    "line": line,
    "mirror-images": mirror_images,
    "multi-level": lambda plan, value: unless(
        any(part.config.head.head == "multi-level" for part in plan.solved),
        "no head reads every block's map, as --head multi-level does",
    ),
    "norms": norms,
    "oblong-images": oblong_images,
    "observed": observed,
    "optional-evaluations": optional_evaluations,
    "order": order,
    "parts": lambda plan, value: None if plan.config.strategy.strategy in OWN_PARTS else ranks(plan, value),
    "patience": patience,
    "ranks": ranks,
    "redealing": redealing,
    "shards": shards,
    "shadows": shadows,
    "sharing": lambda plan, value: unless(
        plan.ranks > 1 or plan.config.cache.cache_dir is not None, "there is one rank"
    ),
    "steps": steps,
    "trained-weights": lambda plan, value: unless(
        plan.config.model.weights != "none", "without --weights the head starts afresh anyway"
    ),
    "tuning": tuning,
    "views": views,
    "voters": lambda plan, value: unless(plan.replicas > 1, "there is one voter"),
    "warmup": warmup,
}
"""By the names that settings give in `read_by`."""


def without_effect(plan: Plan, given: Collection[str]) -> list[str]:
    """Return a line for each reason for which some of the settings `given`, by flag with underscores, do nothing."""
    values = flat(to_dict(plan.asked), source="configuration")
    told: dict[str, list[str]] = {}
    for name, (_, leaf, _) in leaves().items():
        if name in given and values[name] is not None:
            found = (READERS[reader](plan, values[name]) for reader in leaf.metadata["read_by"].split())
            why = next(filter(None, found), None)
            if why is not None:
                shown = "" if isinstance(values[name], bool) else f" ({values[name]})"
                how = f"{'not the whole' if isinstance(why, InPart) else 'no'} effect of {{flags}}, because {why}"
                told.setdefault(how, []).append(flag_of(name) + shown)
    return [how.replace("{flags}", ", ".join(flags)) for how, flags in told.items()]
