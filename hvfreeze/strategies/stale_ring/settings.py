"""The settings of the stale ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from hvfreeze.config.section import Steps, setting
from hvfreeze.config.strategy import Accepted, CutConfig, Parts
from hvfreeze.rules import choice, rule
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class StaleRingConfig(CutConfig):
    """One model cut over a ring of ranks, with gradients that are some steps old."""

    strategy: str = "stale-ring"
    parts: Parts | None = setting(None, "P", "modules that the model is cut into; default: number of ranks + 1")
    stale_after: Steps | None = setting(
        None, "STEPS", "first steps without delayed gradients; default: a tenth of an epoch"
    )
    tied_gradient: Annotated[str, choice("sum", "half")] = setting(
        "sum", "HOW", "gradient of parameters that both ends share: the sum of the two, or half of it"
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
    accepts: ClassVar[Mapping[str, Accepted]] = {
        "freeze": (("none",), "the first module is trained to the end"),
        "shadow": (("none",), "there are no votes"),
        "cache": (("off", "auto"), "no block is frozen, so there is no output to cache"),
        "mixup": ((0.0,), "images and labels are not mixed"),
        "compression": (("none",), "gradients are not exchanged"),
        "accumulate": ((1,), "every batch is one step"),
        "optimizer": (("sgd", "adamw"), "choose sgd or adamw"),
    }

    def modules(self, ranks: int) -> int:
        """Return the number of modules of the model.

        Raises:
            UsageError: --parts does not fit the number of ranks.
        """
        parts = ranks + 1 if self.parts is None else self.parts
        start = f"start {plural(parts - 1, 'rank')}, or " if parts > 1 else ""
        why = f"the first and the last module share a rank; {start}leave --parts out"
        rule(parts == ranks + 1, "parts", parts, f"one more than the number of ranks ({ranks})", why)
        return parts

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks: they are one ring."""
        return self.modules(ranks) - 1

    def reads_images(self, place: int) -> bool:
        """Return True if a rank has the ring's ends."""
        return place == 0

    def unread(self, leaf: str, *, ranks: int, freezes: bool) -> str | None:
        """Return None: one rank has two modules."""
        return None
