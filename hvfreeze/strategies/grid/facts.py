"""What all ranks of a grid know of their run from its start, and the settings that do not go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Segment
from hvfreeze.config.sections import VOTE_WEIGHTS
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.strategies.grid.dealing.deal import shorter_lines
from hvfreeze.strategies.grid.line.plan import Plan
from hvfreeze.strategies.normalising import check_rows
from hvfreeze.strategies.strategy import Materials


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What all ranks know of the run."""

    parts: int
    replicas: int
    micro_batches: int
    schedule: str
    cache: str
    """How --cache was given."""
    redeals: bool
    """Whether ranks whose blocks are frozen, or cached, become further lines of the rest."""

    def plan_of(self, segments: tuple[Segment, ...]) -> Plan:
        """Return how batches go through a line that is cut into `segments`."""
        return Plan(segments, self.micro_batches, self.schedule)

    def shape(self) -> dict[str, Any]:
        """Return what the run began with."""
        return {"parts": self.parts, "replicas": self.replicas, "micro_batches": self.micro_batches}

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must have been made with: with the cache ranks are dealt out otherwise."""
        return {**self.shape(), "redeal": f"with --cache {self.cache}" if self.redeals else "off"}


def facts_of(config: Config, materials: Materials) -> Facts:
    """Return the grid's shape.

    Raises:
        UsageError: settings do not fit each other, or the model.
    """
    settings, rows, blocks = config.strategy, config.optimizer.batch_size, len(materials.chain.blocks)
    parts = settings.grid_parts(materials.world.size)
    check_settings(config)
    if parts > blocks:
        raise UsageError(
            f"--parts ({parts}) must be at most {blocks}, the blocks of {config.model.model} with --blocks "
            f"{config.model.blocks}; use fewer parts, or finer --blocks"
        )
    number = settings.micro_batches or default_micro_batches(parts, rows=rows, redeals=settings.redeals)
    if number > rows:
        raise UsageError(f"--micro-batches ({number}) must be at most --batch-size ({rows})")
    asked = f"--micro-batches ({number}) of --batch-size ({rows})"
    check_rows(materials, start=config.freeze.cut or 0, rows=rows // number, asked=asked)
    if settings.redeals and parts > 1 and not shorter_lines(parts, micro_batches=number):
        raise UsageError(
            f"--micro-batches ({number}) must be a multiple of {smallest_factor(parts)} with --redeal on and --parts "
            f"{parts}: so many lines, or more, share a batch by whole micro-batches"
        )
    return Facts(
        parts=parts,
        replicas=materials.world.size // parts,
        micro_batches=number,
        schedule=settings.pipeline or "1f1b",
        cache=config.cache.cache,
        redeals=settings.redeals,
    )


def default_micro_batches(parts: int, *, rows: int, redeals: bool) -> int:
    """Return into how many micro-batches a batch of `rows` samples is divided."""
    if parts == 1:
        return 1
    # Two samples at least: BatchNorm cannot normalise one.
    number = max(1, min(2 * parts, rows // 2))
    # As many lines as there were parts may come to share a batch.
    return max(parts, number // parts * parts) if redeals else number


def smallest_factor(number: int) -> int:
    """Return the smallest factor, above 1, of a number above 1."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def check_settings(config: Config) -> None:
    """Refuse settings of which nothing could come."""
    kind = config.optimizer.compression.partition(":")[0]
    weight, redeals = config.freeze.vote_weight, config.strategy.redeals
    for flag, value, fits, why in (
        ("vote-weight", weight, weight in VOTE_WEIGHTS or not redeals, "with --redeal on other ranks vote"),
        ("mixup", config.optimizer.mixup, config.optimizer.mixup == 0, "no rank has both images and labels of pairs"),
        ("compression", config.optimizer.compression, kind in ("none", "fp16"), "choose fp16 or none"),
        ("optimizer", config.optimizer.optimizer, config.optimizer.optimizer != "lars", "choose sgd or adamw"),
    ):
        if not fits:
            raise UsageError(f"--{flag} ({value}) must be left out with --strategy grid: {why}")


def check_segments(segments: Sequence[Segment], facts: Facts, config: Config, chain: Chain) -> None:
    """Refuse cuts that leave a rank without parameters."""
    if len(segments) < facts.parts:
        raise UsageError(
            f"--cut-at ({config.strategy.cut_at}) must be {facts.parts - 1} numbers with --parts {facts.parts}"
        )
    for start, stop in segments:
        if not chain.named_parameters(start, stop):
            names = ", ".join(block.name for block in chain.blocks[start:stop])
            raise UsageError(
                f"--parts ({facts.parts}): one part, {names}, has no parameters; cut it elsewhere (--cut-at)"
            )
