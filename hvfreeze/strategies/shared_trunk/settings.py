"""The settings of the shared trunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from hvfreeze.config.section import Count, setting
from hvfreeze.config.strategy import Accepted, CutConfig, Parts, Refusal
from hvfreeze.rules import choice, rule


@dataclass(frozen=True, kw_only=True)
class SharedTrunkConfig(CutConfig):
    """Several models on one frozen trunk, which is distributed over all ranks."""

    strategy: str = "shared-trunk"
    heads: Parts | None = setting(
        None, "N", "number of models, each a head on the labels of the data set; default: one per rank"
    )
    tasks: str | None = setting(None, "FILE", "one model per task; a CSV of labels, or YAML with more settings")
    head_blocks: Count = setting(1, "K", "number of last blocks that each model trains itself; 1 is a linear head")
    labels: Annotated[str, choice("ride", "direct", "replay")] = setting(
        "replay",
        "HOW",
        "ride (sent with the activations), direct (sent by rank 0) or replay (each rank derives its own)",
    )
    trunk: Annotated[str, choice("split", "whole")] = setting(
        "split", "HOW", "split (over the ranks) or whole (each rank runs the whole trunk: the baseline)"
    )

    builder = "hvfreeze.strategies.shared_trunk.build:open_shared_trunk"
    page = "shared-trunk"
    many_heads = batch_statistics = True
    takes_any_labels = takes_weights = False
    accepts: ClassVar[Mapping[str, Accepted]] = {
        "freeze": (("none",), "the trunk is always frozen"),
        "shadow": (("none",), "the trunk is always frozen"),
        "compression": (("none",), "gradients are not exchanged"),
        "accumulate": ((1,), "gradients are not exchanged"),
        "mixup": ((0.0,), "features are computed per sample, not per pair"),
        "cache_shared": ((False,), "every rank stores the features of its own heads"),
        "class_weights": (("none",), "set loss: balanced in --tasks FILE"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.heads is None or self.tasks is None
        rule(alone, "heads", self.heads, "left out with --tasks, which lists the models")

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks: they share the trunk."""
        return ranks

    def reads_images(self, place: int) -> bool:
        """Return True if a rank has the trunk's first block."""
        return place == 0 or self.trunk == "whole"

    def refusals(self, config: Any) -> list[Refusal]:
        """Return the learning rates that --tasks excludes."""
        rates = config.optimizer.head_lr
        fits = rates is None or self.tasks is None
        return [("head_lr", rates, fits, "--tasks sets a learning rate for each task")]

    def has_trunk(self, config: Any) -> bool:
        """Return True."""
        return True

    def unread(self, leaf: str, *, ranks: int, freezes: bool) -> str | None:
        """Return why settings of a distributed trunk have no effect."""
        if leaf in ("labels", "cut_by", "cut_at") and self.trunk == "whole":
            return "every rank runs the whole trunk"
        return "there is only one rank" if ranks == 1 and leaf not in ("heads", "tasks", "head_blocks") else None
