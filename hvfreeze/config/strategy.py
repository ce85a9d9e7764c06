"""The base class of the settings of strategies, and the settings of data parallelism. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import Self

from hvfreeze.config.section import Alternative, Section, setting
from hvfreeze.rules import between, choice, number_list, rule

Parts = Annotated[int, between(1, 4096)]
"""A number of parts, replicas or models."""
Round = Annotated[int, between(1, 2**31 - 1)]
"""A number of steps that ranks train alone."""

Accepted = tuple[tuple[object, ...], str]
"""The values of a setting that go with a strategy, and the reason why others do not."""
Refusal = tuple[str, object, bool, str]
"""A setting, its value, whether it goes with a strategy, and the reason why not."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """The description of a strategy before it is opened. The fields of a subclass are its settings."""

    strategy: str = setting("", "NAME", "which rank runs which blocks, and what ranks exchange:")

    builder: ClassVar[str]
    """module:function, imported on first use: (context, configuration) -> strategy. A collective."""
    page: ClassVar[str]
    """The file of its guide in docs/strategies."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of settings in other sections."""
    accepts: ClassVar[Mapping[str, Accepted]] = {}
    """Settings of other sections, with the values that it accepts."""
    blocks: ClassVar[str] = "stage"
    """The value that --blocks auto stands for."""
    reads_text: ClassVar[bool] = False
    """Whether it can train on windows of a text."""
    many_heads: ClassVar[bool] = False
    """Whether --head-lr may have a rate for each of several heads."""
    batch_statistics: ClassVar[bool] = False
    """Whether BatchNorm uses each batch's statistics wherever it trains."""
    takes_any_labels: ClassVar[bool] = True
    """Whether its models can predict several labels per sample, or numbers."""
    takes_weights: ClassVar[bool] = True
    """Whether samples can have weights in its training loss."""
    evaluates_more: ClassVar[bool] = False
    """Whether evaluation batches may have more samples than training batches."""

    @property
    def tasks(self) -> str | None:
        """A file with the labels of several models; None for the labels of the data set."""
        return None

    def refusals(self, config: Any) -> list[Refusal]:
        """Return the settings whose values go with some of its own values only."""
        return []

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of neighbouring ranks that share a batch: a divisor of the number of ranks.

        Raises:
            UsageError: the number of ranks does not fit the settings.
        """
        return 1

    def reads_images(self, place: int) -> bool:
        """Return True if the rank at this place in its replica reads images."""
        return True

    def cuts(self, config: Any) -> bool:
        """Return True if it uses the blocks of a model even when none is frozen."""
        return True

    def has_trunk(self, config: Any) -> bool:
        """Return True if all blocks before the trained heads are frozen."""
        return False

    def unread(self, leaf: str, *, ranks: int, freezes: bool) -> str | None:
        """Return why a setting of this class has no effect on so many ranks, None if it has; `freezes`: blocks do."""
        return "there is only one rank" if ranks == 1 else None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the settings of this strategy from a configuration that has chosen it."""
        settings = config.strategy
        assert isinstance(settings, cls)
        return settings


GIVEN = Alternative("--cut-by given", lambda config: config.strategy.cut_by == "given")


@dataclass(frozen=True, kw_only=True)
class CutConfig(StrategyConfig):
    """A strategy that cuts the model into segments."""

    cut_by: Annotated[str, choice("compute", "params", "count", "given")] = setting(
        "compute", "HOW", "how segments are balanced: compute, params, count, or given with --cut-at"
    )
    cut_at: str | None = setting(None, "LIST", "the blocks at which segments begin, as in 2,4", of=GIVEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        there = self.cut_by != "given" or self.cut_at is not None
        rule(there, "cut-at", self.cut_at, "given together with --cut-by given")
        self.starts()

    def starts(self) -> list[int]:
        """Return the blocks at which segments begin, without the first."""
        if self.cut_at is None:
            return []
        starts = number_list("cut-at", self.cut_at, each="segment after the first")
        rule(all(start == start // 1 for start in starts), "cut-at", self.cut_at, "whole numbers separated by commas")
        return [int(start) for start in starts]


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
