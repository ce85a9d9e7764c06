"""A stage, and which stages a run has: one, or with --freeze auto the head's solution, tuning, and another solution.

Solving first and tuning afterwards: Kumar et al., "Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution" (ICLR 2022). A head on every block's features: Evci et al., "Head2Toe" (ICML 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvfreeze.chain.blocks import Chain
from hvfreeze.config.model import HeadConfig
from hvfreeze.config.tree import SOLVED, Config

SOLVE, TUNE, TRAIN = "solve", "tune", "train"
MOST_FROZEN = 0.03
"""Of all parameters, the part that may lie in front of the cut at which tuning begins: front blocks hold few
parameters, which fit most tasks as they are, and take the most time for each."""
SOLVING = 0.15
"""What solving takes beside the features' forward pass, as a part of it."""
BACKWARD = 3.0
"""What the backward pass and the update take, in forward passes of the same blocks, as measured."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run, for which one chain of the model is opened, and whose epochs are all made alike."""

    name: str
    """`train`, or with --freeze auto `solve` or `tune`."""
    config: Config
    """What its strategy is opened with."""
    steps: int
    """Optimizer steps, or those that a solution stands for; the last epoch may be cut short."""
    batches_per_epoch: int
    """Of every replica."""
    guarded: bool = False
    """Whether samples are held out of it, by which the guard judges; a solution holds them out by itself."""
    is_followed: bool = False
    """Whether another stage judges what comes of it, so that it ends without an evaluation of its own."""
    shown_cut: int | None = None
    """How the run calls the cut of a stage that freezes all blocks but the head; None where it is the stage's own."""

    @property
    def title(self) -> str:
        """What the user is told when it begins."""
        what = (
            "the head is solved"
            if self.config.head.solved
            else f"{self.steps} steps, freeze {self.config.freeze.freeze}"
        )
        return f"stage {self.name}: {what}"

    @property
    def solves(self) -> bool:
        """Whether an epoch is a solution of the head."""
        return self.config.head.solved

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.config.optimizer.steps_per_epoch(self.batches_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs, the last perhaps cut short."""
        return -(-self.steps // self.steps_per_epoch)

    def batches(self, steps: int) -> int:
        """Return how many batches of every replica the first `steps` steps are made of."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.batches_per_epoch + min(self.batches_per_epoch, rest * self.config.optimizer.accumulate)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the parts of a run cost, in forward passes of a sample through the whole network; no clock is asked."""

    views: int
    """Of each sample, that a solution is fitted to."""
    frozen: float
    """Part of the forward pass in front of the cut at which tuning begins."""

    @property
    def full_step(self) -> float:
        """Of a step of full fine-tuning, for each of its samples."""
        return 1 + BACKWARD

    @property
    def tuning_step(self) -> float:
        """Of a step behind the cut, whose frozen blocks are computed."""
        return 1 + BACKWARD * (1 - self.frozen)

    @property
    def solution(self) -> float:
        """Of a solution, for each sample of an epoch."""
        return self.views * (1 + SOLVING)


def tuning_cut(chain: Chain, asked: int | None) -> int:
    """Return the cut at which tuning begins: the one asked for, else the deepest that freezes few parameters."""
    if asked is not None:
        return asked
    sizes = [sum(p.numel() for _, p in chain.named_parameters(b, b + 1)) for b in range(len(chain.blocks))]
    return max(cut for cut in range(len(sizes)) if sum(sizes[:cut]) <= MOST_FROZEN * sum(sizes))


def stages_of(
    config: Config, *, batches_per_epoch: int, guarded_batches: int, cut: int, deepest: int, costs: Costs | None
) -> tuple[Stage, ...]:
    """Return a run's stages, in order.

    Args:
        config: the run's, resolved.
        batches_per_epoch: of all samples.
        guarded_batches: of an epoch without the samples that are held out; 0 where they fill no batch.
        cut: at which tuning begins.
        deepest: the cut of a network that is frozen but for its head.
        costs: what --epochs is counted in; None where a time budget chooses the steps, all stages are then there.
    """
    settings = config.optimizer
    if not config.freeze.auto:
        steps = settings.steps_per_epoch(batches_per_epoch) * (settings.epochs if costs or config.head.solved else 1)
        return (Stage(name=TRAIN, config=config, steps=steps, batches_per_epoch=batches_per_epoch),)
    solve = Stage(
        name=SOLVE,
        config=solving(config),
        steps=batches_per_epoch,
        batches_per_epoch=batches_per_epoch,
        shown_cut=deepest,
    )
    last_solve = config.freeze.has("last-solve")
    # Without a solution behind it, tuning has nothing that the guard could compare.
    guarded = last_solve and config.freeze.has("guard")
    batches = guarded_batches if guarded else batches_per_epoch
    steps = settings.steps_per_epoch(batches)
    if costs is not None:
        room = settings.epochs * costs.full_step - (1 + last_solve) * costs.solution
        steps = settings.steps_per_epoch(max(0, int(room * batches_per_epoch / costs.tuning_step)))
    if batches == 0 or steps < settings.steps_per_epoch(batches):
        return (solve,)
    epochs = -(-steps // settings.steps_per_epoch(batches))
    tune = Stage(
        name=TUNE,
        config=tuning(config, cut, epochs=epochs),
        steps=steps,
        batches_per_epoch=batches,
        guarded=guarded,
        is_followed=last_solve,
    )
    return (solve, tune, solve) if last_solve else (solve, tune)


def solving(config: Config) -> Config:
    """Return the settings with which stages solve the head: fixed views for fresh draws, no pairs, no groups."""
    criterion, cut = SOLVED
    data = config.data if config.data.cacheable() else replace(config.data, augment="none", recipe="crop")
    return replace(
        config,
        data=data,
        optimizer=replace(config.optimizer, epochs=1, mixup=0.0, accumulate=1),
        freeze=replace(config.freeze, freeze=criterion, cut=cut, auto_without="none"),
    )


def tuning(config: Config, cut: int, *, epochs: int) -> Config:
    """Return the settings with which a run of stages tunes the model behind `cut`, under the model's own last layer."""
    votes = config.freeze.has("votes")
    freeze = "gradient-norm" if votes else "static" if cut else "none"
    return replace(
        config,
        head=HeadConfig(),
        optimizer=replace(config.optimizer, epochs=epochs),
        freeze=replace(config.freeze, freeze=freeze, cut=cut or None, auto_without="none"),
        cache=config.cache if config.data.cacheable() else replace(config.cache, cache="off"),
    )


def first_step(stages: Sequence[Stage], number: int) -> int:
    """Return the steps that are made when stage `number` begins."""
    return sum(stage.steps for stage in stages[:number])


def first_epoch(stages: Sequence[Stage], number: int) -> int:
    """Return the epochs that are made when stage `number` begins."""
    return sum(stage.epochs for stage in stages[:number])


def with_steps(stages: Sequence[Stage], steps: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages with other numbers of steps, one for each; 0 leaves a stage out."""
    return tuple(lasting(stage, count) for stage, count in zip(stages, steps, strict=True))


def lasting(stage: Stage, steps: int) -> Stage:
    """Return the stage with another number of steps; its settings tell the epochs that these take."""
    changed = replace(stage, steps=steps)
    if stage.solves:
        return changed
    optimizer = replace(stage.config.optimizer, epochs=max(1, changed.epochs))
    return replace(changed, config=replace(stage.config, optimizer=optimizer))
