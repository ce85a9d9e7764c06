"""Finds settings that have no effect because of a run's data, ranks or length.

Settings that do not apply to any run with the other settings are refused earlier: see
`hvfreeze.config.section.Alternative`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hvfreeze.comm.reducer import UNCOMPRESSED_STEPS
from hvfreeze.config.cache import CACHED
from hvfreeze.config.flags import flag_of
from hvfreeze.config.freeze import GAINS, NORMS, SEEN, VOTED
from hvfreeze.config.head import TRAINED
from hvfreeze.config.optimizer import UNWEIGHTED
from hvfreeze.config.section import Alternative
from hvfreeze.config.tree import Config, fields_of, leaves, settings_of
from hvfreeze.freezing.cadence import Cadence
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
    obstacle: str = ""
    """Why hvfreeze auto cannot fine-tune the network; empty if it can."""
    gives_tokens: bool = False
    """Whether a block gives tokens; looked for where --tokens was given."""

    @property
    def trained(self) -> list[Stretch]:
        """The stretches with optimizer steps."""
        return [part for part in self.parts if not part.solves]

    @property
    def solves_alone(self) -> str:
        """The reason why nothing is trained."""
        config = self.config
        if not config.freeze.auto:
            return "the head is fitted and there are no training steps"
        if self.obstacle:
            return self.obstacle
        timed = config.run.budget_seconds() is not None
        limit = "--time-budget leaves time" if timed else f"--epochs ({config.optimizer.epochs}) leaves room"
        return f"{limit} only for fitting the head"

    @property
    def epochs(self) -> int:
        """Number of epochs of a run with one stretch."""
        (part,) = self.parts
        return part.epochs

    @property
    def evaluations(self) -> list[int]:
        """Epochs after which a run with one stretch is evaluated, from 0."""
        return [epoch for epoch in range(self.epochs) if epoch == self.epochs - 1 or self.config.run.evaluates(epoch)]


Finding = tuple[Iterable[str], str, str]
"""Settings; "no" or "limited", the effect that they have; the reason."""


def settings_in(*alternatives: Alternative) -> list[str]:
    """Return the settings that belong to one of these alternatives."""
    return [name for name, (_, leaf, _) in leaves().items() if set(alternatives) & set(leaf.metadata["of"])]


def findings(plan: Plan) -> Iterator[Finding]:
    """Yield the cases in which settings have no effect. The first case of a setting counts."""
    config, asked, trained = plan.config, plan.asked, plan.trained
    data, freeze = asked.data, config.freeze
    made = max((part.steps for part in trained), default=0)
    # A strategy's settings.
    freezes = bool(freeze.cut) or missing_votes(plan, shadows=False) is None
    for leaf in fields_of(type(config.strategy)):
        why = None if leaf == "strategy" else config.strategy.unread(leaf, ranks=plan.ranks, freezes=freezes)
        if why:
            yield [leaf], "no", why
    # Training.
    if not trained:
        fresh = freeze.auto and not data.augment.startswith("views")
        of_training = [leaf for leaf in settings_in(TRAINED, VOTED, GAINS, NORMS, SEEN) if leaf != "epochs"]
        of_order = ["shuffle"] if plan.replicas == 1 else []
        of_views = ["augment", "recipe"] if fresh else []
        yield ["auto_without", "cut", "shadow", *of_training, *of_order, *of_views], "no", plan.solves_alone
        yield ["epochs"], "limited", plan.solves_alone
    elif (warmup := asked.optimizer.lr_warmup) > made:
        reached = f"training has {plural(made, 'step')} and ends at {made / warmup:.2g} of --lr"
        yield ["lr_warmup"], "limited", reached
    if trained and not freeze.auto:
        if plan.epochs == 1:
            yield ["evaluate_every"], "no", "there is only one epoch"
        count, equal = len(plan.evaluations), asked.optimizer.class_weights == "none"
        counted = sum(equal or epoch + 1 > UNWEIGHTED * plan.epochs for epoch in plan.evaluations[1:])
        if (asked.run.early_stop or 0) >= counted:
            why = "there is only one evaluation"
            if count > 1:
                why = f"there are {count} evaluations, and the first is always the best so far"
            if count > counted + 1:
                why = f"of {count} evaluations, {counted} are made once class weights apply"
            yield ["early_stop", *(["keep"] if count == 1 else [])], "no", why
    # Several ranks, several replicas.
    if plan.replicas == 1:
        why = "there is only one rank" if plan.ranks == 1 else "all ranks train on the same samples"
        clipped = config.optimizer.clip_grad is not None
        shared = plan.ranks > 1 or asked.cache.cache_dir is not None
        rest = [*([] if clipped else ["signal"]), *([] if shared else ["cache_shared"])]
        yield ["partition", "shard_sizes", "compression", "quorum", "vote_weight", *rest], "no", why
    if asked.optimizer.compression.startswith(("powersgd", "auto")) and made <= UNCOMPRESSED_STEPS:
        why = f"compression starts after {UNCOMPRESSED_STEPS} steps, and training has {made}"
        yield ["compression"], "no", why
    # Votes.
    if freeze.votes and (why := missing_votes(plan, shadows=False)):
        yield ["freeze"], "no", why
    if trained and (why := missing_votes(plan, shadows=True)):
        yield ["interval", "freeze_warmup"], "limited", why
        yield ["shadow", *settings_in(VOTED, GAINS, NORMS, SEEN)], "no", why
    # Frozen blocks.
    if config.cache.cache != "off" and (why := missing_rows(plan)):
        yield ["cache", *settings_in(CACHED)], "no", why
    if not is_cut(config):
        yield ["blocks"], "no", "the model is used as a whole"
    if not plan.normalises:
        yield ["statistics"], "no", "no trained block has BatchNorm"
    if not plan.gives_tokens:
        yield ["tokens"], "no", "no block gives tokens"
    # Images.
    if not plan.flips:
        yield ["flips"], "no", f"a flipped image of {data.data} may not belong to the same class"
    if not plan.oblong:
        yield ["fit"], "no", "all images are square"
    if not plan.transparent and not (data.fit == "pad" and plan.oblong):
        yield ["background"], "no", "no image is transparent or padded"
    if not plan.decodes:
        yield ["skip_bad", "resample"], "no", f"{data.data} has no image files to decode"
    if data.resize is not None and data.resize > plan.side:
        why = f"images of {plural(plan.side, 'pixel')} are not enlarged before they are cropped"
        yield ["resize"], "limited", why


def missing_votes(plan: Plan, *, shadows: bool) -> str | None:
    """Return why no criterion is evaluated in training, None if one is; with `shadows`, shadow criteria count."""
    parts = [part for part in plan.trained if part.config.freeze.votes]
    parts += [part for part in plan.trained if shadows and part.config.freeze.shadow_names()]
    found = [(first_vote(part), part.steps) for part in parts]
    if not found:
        return "there are no votes"
    if any(first < made for first, made in found):
        return None
    first, made = found[0]
    late = f"there are no votes: the first would follow step {first}, and training has {made} steps"
    return f"{late}; lower --freeze-warmup or --interval, or raise --epochs"


def first_vote(part: Stretch) -> int:
    """Return the step after which the first vote is due."""
    cadence = Cadence.of(
        part.config.freeze, steps_per_epoch=part.steps_per_epoch, num_epochs=part.config.optimizer.epochs
    )
    return cadence.first_vote


def missing_rows(plan: Plan) -> str | None:
    """Return why no rows are worth caching, None if some are: output of frozen blocks for views that repeat."""
    config = plan.config
    if config.data.shuffle == "global" and not config.cache.cache_shared and plan.replicas > 1:
        return (
            "with --shuffle global each rank trains on samples of other ranks, and the cache is not shared; add "
            "--cache-shared"
        )
    repeated = [part for part in plan.parts if part.config.data.cacheable()]
    for part in repeated:
        freeze = part.config.freeze
        frozen = freeze.cut or (freeze.votes and first_vote(part) < part.steps)
        if part.solves or config.strategy.has_trunk(config) or frozen:
            return None
    fresh = len(repeated) < len(plan.parts)
    return "--augment fresh never repeats a view" if fresh else "no block is frozen, so there is no output to cache"


def without_effect(plan: Plan) -> list[str]:
    """Return a line for each reason why some of the given settings have no effect."""
    values, found = settings_of(plan.asked), dict[str, tuple[str, str]]()
    for names, effect, why in findings(plan):
        for name in names:
            found.setdefault(name, (effect, why))
    flags: dict[tuple[str, str], list[str]] = {}
    for name in leaves():
        if name in found and name in plan.asked.given and values.get(name) is not None:
            shown = "" if isinstance(values[name], bool) else f" ({values[name]})"
            flags.setdefault(found[name], []).append(flag_of(name) + shown)
    return [
        # A reason may name the setting again.
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} {effect} effect: {why.replace(names[0], 'it')}"
        for (effect, why), names in flags.items()
    ]
