"""The settings of local critics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvfreeze.config.section import Count, Positive, setting
from hvfreeze.config.strategy import Accepted, CutConfig, Parts


@dataclass(frozen=True, kw_only=True)
class LocalCriticsConfig(CutConfig):
    """Layer groups update at once with the loss that critics behind them predict."""

    strategy: str = "local-critics"
    parts: Parts = setting(4, "P", "layer groups; at least one per rank")
    critic_every: Count = setting(1, "K", "train the critics on every K-th batch")
    critic_lr: Positive = setting(3e-4, "LR", "learning rate of the critics' Adam")

    builder = "hvfreeze.strategies.local_critics.build:open_local_critics"
    page = "local-critics"
    defaults: ClassVar[Mapping[str, Any]] = {"model": "resnet20"}
    blocks = "residual"
    batch_statistics = True
    takes_any_labels = False
    accepts: ClassVar[Mapping[str, Accepted]] = {
        "freeze": (
            ("none", "static"),
            "no rank has the gradients of the whole model to vote on; choose none or static",
        ),
        "shadow": (("none",), "no rank has the gradients of the whole model to score"),
        "mixup": ((0.0,), "no rank has both the images and the labels of a batch"),
        "compression": (("none",), "gradients are not exchanged"),
        "accumulate": ((1,), "each layer group is updated after every batch"),
    }

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks: they are one pipeline."""
        return ranks

    def reads_images(self, place: int) -> bool:
        """Return True if a rank has the first group."""
        return place == 0

    def unread(self, leaf: str, *, ranks: int, freezes: bool) -> str | None:
        """Return why settings of critics have no effect with a single group."""
        return "--parts is 1" if self.parts == 1 and leaf != "parts" else None
