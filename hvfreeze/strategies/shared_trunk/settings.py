"""The settings of the shared trunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from hvfreeze.config.rules import between, choice, rule
from hvfreeze.config.section import Count, CutConfig, Refusal, setting


@dataclass(frozen=True, kw_only=True)
class SharedTrunkConfig(CutConfig):
    """Several models on one frozen trunk, which lies on all ranks."""

    strategy: str = "shared-trunk"
    heads: Annotated[int, between(1, 4096)] | None = setting(
        None, "N", "models, each with a head on the data's own labels; default: one per rank"
    )
    tasks: str | None = setting(None, "FILE", "one model a task instead; a CSV of labels, or YAML that says more")
    head_blocks: Count = setting(1, "K", "the last K blocks are each model's own; 1 is a linear head")
    labels: Annotated[str, choice("ride", "direct", "replay")] = setting(
        "replay", "HOW", "ride (with the activations), direct (from rank 0) or replay (each rank's own)"
    )
    trunk: Annotated[str, choice("split", "whole")] = setting(
        "split", "HOW", "split (over the ranks), or whole (each rank runs all of it: the baseline)"
    )

    builder = "hvfreeze.strategies.shared_trunk.build:open_shared_trunk"
    page = "shared-trunk"
    many_heads = batch_statistics = True

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.heads is None or self.tasks is None
        rule(alone, "heads", self.heads, "left out with --tasks, which names the models")

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks: they share the trunk."""
        return ranks

    def reads_images(self, place: int) -> bool:
        """Tell whether a rank has the trunk's first block."""
        return place == 0 or self.trunk == "whole"

    def refusals(self, config: Any) -> list[Refusal]:
        """Refuse settings that do not go with a shared trunk."""
        optimizer, freeze, shared = config.optimizer, config.freeze, config.cache.cache_shared
        rates, weights = config.optimizer.head_lr, config.optimizer.class_weights
        return [
            ("freeze", freeze.freeze, freeze.freeze == "none", "the trunk is frozen from the start, and stays so"),
            ("shadow", freeze.shadow, freeze.shadow == "none", "the trunk is frozen from the start"),
            ("compression", optimizer.compression, optimizer.compression == "none", "no gradient travels"),
            ("accumulate", optimizer.accumulate, optimizer.accumulate == 1, "no gradient travels"),
            ("mixup", optimizer.mixup, optimizer.mixup == 0, "the line computes features of samples, not of pairs"),
            ("cache-shared", shared, not shared, "every rank keeps the features of its own heads"),
            ("class-weights", weights, weights == "none", "say loss: balanced in --tasks FILE"),
            ("head-lr", rates, rates is None or self.tasks is None, "--tasks has a rate for each task"),
        ]

    def has_trunk(self, config: Any) -> bool:
        """Return True."""
        return True

    def unread(self, leaf: str, *, ranks: int) -> str | None:
        """Return why the trunk does not lie on several ranks."""
        if leaf in ("labels", "cut_by", "cut_at") and self.trunk == "whole":
            return "every rank runs the whole trunk"
        return "there is one rank" if ranks == 1 and leaf not in ("heads", "tasks", "head_blocks") else None
