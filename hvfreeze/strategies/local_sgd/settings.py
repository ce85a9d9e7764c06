"""The settings of local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from hvfreeze.rules import between
from hvfreeze.section import setting
from hvfreeze.strategies.settings import Refusal, StrategyConfig

Round = Annotated[int, between(1, 2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class LocalSgdConfig(StrategyConfig):
    """Replicas train alone for some steps, then average."""

    strategy: str = "local-sgd"
    local_steps: Round = setting(10, "J", "optimizer steps between two averages of the models")

    builder = "hvfreeze.strategies.local_sgd.strategy:open_local_sgd"
    page = "local-sgd"
    reads_text = evaluates_more = True

    def cuts(self, config: Any) -> bool:
        """Return False."""
        return False

    def refusals(self, config: Any) -> list[Refusal]:
        """Return the settings that need an exchange in every step."""
        freeze, compression = config.freeze, config.optimizer.compression
        return [
            (
                "freeze",
                freeze.freeze,
                not freeze.votes,
                "replicas differ between averages, so they cannot vote; choose none or static",
            ),
            ("shadow", freeze.shadow, freeze.shadow == "none", "replicas differ between averages, so they cannot vote"),
            ("compression", compression, compression == "none", "gradients are not exchanged"),
        ]
