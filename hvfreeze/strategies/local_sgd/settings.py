"""The settings of local SGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvfreeze.config.section import setting
from hvfreeze.config.strategy import Accepted, Round, StrategyConfig


@dataclass(frozen=True, kw_only=True)
class LocalSgdConfig(StrategyConfig):
    """Replicas train alone for some steps, then average."""

    strategy: str = "local-sgd"
    local_steps: Round = setting(10, "J", "optimizer steps between two averages of the models")

    builder = "hvfreeze.strategies.local_sgd.strategy:open_local_sgd"
    page = "local-sgd"
    reads_text = evaluates_more = True
    accepts: ClassVar[Mapping[str, Accepted]] = {
        "freeze": (("none", "static"), "replicas differ between averages, so they cannot vote; choose none or static"),
        "shadow": (("none",), "replicas differ between averages, so they cannot vote"),
        "compression": (("none",), "gradients are not exchanged"),
    }

    def cuts(self, config: Any) -> bool:
        """Return False."""
        return False
