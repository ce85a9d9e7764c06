"""The settings of subnets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvfreeze.config.head import parse_mlp
from hvfreeze.config.section import setting
from hvfreeze.config.strategy import Accepted, Round, StrategyConfig


@dataclass(frozen=True, kw_only=True)
class SubnetsConfig(StrategyConfig):
    """The neurons of an MLP are dealt to the ranks, which train theirs alone for some steps."""

    strategy: str = "subnets"
    local_steps: Round = setting(10, "J", "optimizer steps that a rank trains alone in a round")

    builder = "hvfreeze.strategies.subnets.strategy:open_subnets"
    page = "subnets"
    # No momentum: it would belong to other neurons.
    defaults: ClassVar[Mapping[str, Any]] = {"model": "mlp", "momentum": 0.0}
    evaluates_more = batch_statistics = True
    accepts: ClassVar[Mapping[str, Accepted]] = {
        "freeze": (("none", "static"), "all blocks before the MLP are always frozen"),
        "shadow": (("none",), "there are no votes"),
        "compression": (("none",), "gradients are not exchanged"),
        "optimizer": (("sgd",), "neurons change ranks, but optimizer state stays; choose sgd"),
    }

    def has_trunk(self, config: Any) -> bool:
        """Return True if the MLP is the head of another model."""
        return parse_mlp("head", config.head.head) is not None

    def cuts(self, config: Any) -> bool:
        """Return True if the MLP is the head of another model."""
        return self.has_trunk(config)

    def unread(self, leaf: str, *, ranks: int, freezes: bool) -> str | None:
        """Return None: neurons are dealt on a single rank too."""
        return None
