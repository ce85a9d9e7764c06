"""The settings of local critics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvfreeze.config.section import Count, CutConfig, Parts, Positive, Refusal, setting


@dataclass(frozen=True, kw_only=True)
class LocalCriticsConfig(CutConfig):
    """Layer groups update at once, by the loss that critics behind them predict."""

    strategy: str = "local-critics"
    parts: Parts = setting(4, "P", "layer groups, on as many ranks or fewer")
    critic_every: Count = setting(1, "K", "critics learn from every K-th batch")
    critic_lr: Positive = setting(3e-4, "LR", "learning rate of the critics' Adam")

    builder = "hvfreeze.strategies.local_critics.build:open_local_critics"
    page = "local-critics"
    defaults: ClassVar[Mapping[str, Any]] = {"model": "resnet20"}
    blocks = "residual"
    batch_statistics = True
    takes_any_labels = False

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks: they are one line."""
        return ranks

    def reads_images(self, place: int) -> bool:
        """Tell whether a rank has the first group."""
        return place == 0

    def refusals(self, config: Any) -> list[Refusal]:
        """Refuse settings that do not go with groups that learn by themselves."""
        optimizer, freeze = config.optimizer, config.freeze
        alone, fits = "no rank has the gradients of another, or of the whole model", freeze.freeze in ("none", "static")
        return [
            ("freeze", freeze.freeze, fits, f"{alone}, to vote by; choose none or static"),
            ("shadow", freeze.shadow, not freeze.shadow_names(), f"no criterion is scored: {alone}"),
            ("mixup", optimizer.mixup, optimizer.mixup == 0, "no rank has both images and labels of pairs"),
            ("compression", optimizer.compression, optimizer.compression == "none", "no gradient travels"),
            ("accumulate", optimizer.accumulate, optimizer.accumulate == 1, "every batch updates at once"),
        ]

    def unread(self, leaf: str, *, ranks: int) -> str | None:
        """Return why nothing is cut into groups, where there is one."""
        return "--parts is 1" if self.parts == 1 and leaf != "parts" else None
