"""The settings of the stale ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from hvfreeze.config.rules import choice, rule
from hvfreeze.config.section import CutConfig, Parts, Refusal, Steps, setting
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class StaleRingConfig(CutConfig):
    """One model cut over a ring of ranks, whose gradients are some steps old."""

    strategy: str = "stale-ring"
    parts: Parts | None = setting(None, "P", "modules; default: one more than ranks")
    stale_after: Steps | None = setting(
        None, "STEPS", "steps at the start whose gradients are all new; default: a tenth of an epoch"
    )
    tied_gradient: Annotated[str, choice("sum", "half")] = setting(
        "sum", "HOW", "of parameters that both ends use, the gradients' sum or half of it"
    )

    builder = "hvfreeze.strategies.stale_ring.build:open_stale_ring"
    page = "stale-ring"
    defaults: ClassVar[Mapping[str, Any]] = {
        "data": "text",
        "model": "tiny-lm",
        "epochs": 1,
        "batch_size": 32,
        "optimizer": "adamw",
    }
    reads_text = batch_statistics = True

    def modules(self, ranks: int) -> int:
        """Return into how many modules the model is cut.

        Raises:
            UsageError: --parts does not fit the number of ranks.
        """
        parts = ranks + 1 if self.parts is None else self.parts
        start = plural(max(1, parts - 1), "rank")
        why = f"the first and the last module share a rank; start {start}, or leave it out"
        rule(parts == ranks + 1, "parts", parts, f"one more than the number of ranks ({ranks})", why)
        return parts

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks: they are one ring."""
        return self.modules(ranks) - 1

    def reads_images(self, place: int) -> bool:
        """Tell whether a rank has the ring's ends."""
        return place == 0

    def refusals(self, config: Any) -> list[Refusal]:
        """Refuse settings that do not go with gradients that are some steps old."""
        optimizer, freeze = config.optimizer, config.freeze
        return [
            ("freeze", freeze.freeze, freeze.freeze == "none", "the first module trains to the end, with the last one"),
            ("shadow", freeze.shadow, not freeze.shadow_names(), "no criterion is scored"),
            ("cache", config.cache.cache, config.cache.cache != "on", "nothing is frozen whose output could be kept"),
            ("mixup", optimizer.mixup, optimizer.mixup == 0, "samples come in as they are"),
            ("compression", optimizer.compression, optimizer.compression == "none", "no gradient travels"),
            ("accumulate", optimizer.accumulate, optimizer.accumulate == 1, "every batch goes around the ring alone"),
            ("optimizer", optimizer.optimizer, optimizer.optimizer != "lars", "choose sgd or adamw"),
        ]

    def unread(self, leaf: str, *, ranks: int) -> str | None:
        """Return None: one rank has two modules."""
        return None
