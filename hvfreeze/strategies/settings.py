"""The settings of data parallelism, which has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvfreeze.config.section import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig(StrategyConfig):
    """Every rank has the whole model and a shard of the data."""

    strategy: str = "replicas"

    builder = "hvfreeze.strategies.data_parallel:open_data_parallel"
    page = "data-parallel"
    reads_text = evaluates_more = True

    def cuts(self, config: Any) -> bool:
        """Return False."""
        return False
