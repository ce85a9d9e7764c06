"""How the chain of blocks is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hvfreeze.config.rules import one_of, setting

STRATEGIES = ("replicas",)


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Which rank runs which blocks, and what ranks exchange."""

    strategy: str = setting("replicas", "NAME", "replicas: every rank has the whole model and a shard of the data")

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
