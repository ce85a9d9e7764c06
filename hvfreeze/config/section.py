"""How settings are declared: bounds, alternatives that some of them belong to, sections, and what a strategy says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, NamedTuple

from typing_extensions import Self

from hvfreeze.config.rules import Must, at_least, between, check_bounds, choice, number_list, rule, typed, types_of
from hvfreeze.errors import UsageError

MOST_PARTS = 4096
MOST_THREADS = 4096

# Not in the classes: annotations are read late, and a lambda in one would not find what this module imports.
Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0, "steps")]
Parts = Annotated[int, between(1, MOST_PARTS)]
Window = Annotated[int, Must(lambda size: 2 <= size <= 4096, "in 2..4096 characters")]
Seed = Annotated[int, Must(lambda seed: 0 <= seed < 2**63, "in 0..2^63-1")]
Threads = Annotated[int, Must(lambda count: 1 <= count <= MOST_THREADS, f"at least 1 and at most {MOST_THREADS}")]
Positive = Annotated[float, Must(lambda number: 0 < number < math.inf, "a positive number")]
Bound = Annotated[float, Must(lambda number: number > 0, "a positive number (inf for no bound)")]
Decay = Annotated[float, Must(lambda number: 0 <= number < math.inf, "0 or a positive number")]
Part = Annotated[float, Must(lambda part: 0 <= part < 1, "in [0, 1)")]
Quorum = Annotated[float, Must(lambda part: 0 < part <= 1, "in (0, 1]")]
Mixup = Annotated[float, Must(lambda alpha: 0 <= alpha <= 100, "in 0..100; 0.2 is usual, 0 is none")]


class Alternative(NamedTuple):
    """One of several ways. Settings that belong to it are unknown to a configuration that has chosen another."""

    flags: str
    """What chooses it."""
    holds: Callable[[Any], bool]
    """(configuration) -> whether it is chosen."""


class By(dict[str, Any]):
    """A default that depends on another setting of the section: `By("optimizer", sgd=0.1)`."""

    def __init__(self, leaf: str, **defaults: Any) -> None:
        super().__init__(defaults)
        self.leaf = leaf

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def setting(
    default: Any, metavar: str, text: str, *, brief: str = "", of: Alternative | tuple[Alternative, ...] = ()
) -> Any:
    """Return a dataclass field that is also a flag; the help names its value `metavar` and says `text`.

    The help of `hvfreeze auto` shows the flags that have a `brief` text, which fits a line. A setting is known where
    all alternatives that it is `of` are chosen.
    """
    alternatives = of if type(of) is tuple else (of,)
    return field(default=default, metadata={"metavar": metavar, "help": text, "brief": brief, "of": alternatives})


@dataclass(frozen=True, kw_only=True)
class Section:
    """Settings that belong together. Raises UsageError, whoever makes one, where a value is not as its type says."""

    def __new__(cls, **given: Any) -> Self:
        """Remember which settings were given, whatever their values."""
        new = super().__new__(cls)
        object.__setattr__(new, "_given", frozenset(given))
        return new

    def __post_init__(self) -> None:
        section: type = type(self)
        kinds, bounds = (types_of(section, include_extras=extras) for extras in (False, True))
        for leaf in fields(self):
            value = getattr(self, leaf.name)
            if isinstance(value, By):
                # Of another value than its own one, which is refused where its turn comes.
                value = value.get(str(getattr(self, value.leaf)), next(iter(value.values())))
            # None may stand for a default that depends on other settings.
            if value is not None or leaf.default is not None:
                known = typed(leaf.name, value, kinds[leaf.name], source=type(self).__name__)
                object.__setattr__(self, leaf.name, known)
                check_bounds(leaf.name, known, bounds[leaf.name])


def given_to(section: Section) -> frozenset[str]:
    """Return the settings that a section was made of, whatever their values."""
    given: frozenset[str] = vars(section)["_given"]
    return given


Refusal = tuple[str, object, bool, str]
"""A setting's flag, its value, whether it goes with a strategy, and why not."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """What a strategy has to say before it is opened; its settings are the fields of a class of its own."""

    strategy: str = setting("", "NAME", "which rank runs which blocks, and what ranks exchange:")

    builder: ClassVar[str]
    """module:function, imported when it is asked for: (context, configuration) -> strategy. A collective."""
    page: ClassVar[str]
    """The file of its guide in docs/strategies."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of settings in other sections."""
    blocks: ClassVar[str] = "stage"
    """What --blocks auto is."""
    reads_text: ClassVar[bool] = False
    """Whether it trains on windows of a text."""
    many_heads: ClassVar[bool] = False
    """Whether --head-lr may have a rate for each of several heads."""
    batch_statistics: ClassVar[bool] = False
    """Whether BatchNorm uses each batch's statistics wherever it trains."""
    takes_any_labels: ClassVar[bool] = True
    """Whether its models may answer several labels a sample, or numbers."""
    evaluates_more: ClassVar[bool] = False
    """Whether its batches that train nothing may have more samples than those that train."""

    @property
    def tasks(self) -> str | None:
        """A file with the labels of several models; None where they are the data set's."""
        return None

    def refusals(self, config: Any) -> list[Refusal]:
        """Return settings of other sections that do not go with it."""
        return []

    def ranks_per_replica(self, ranks: int) -> int:
        """Return how many neighbouring ranks work on one batch together: a divisor of the number of ranks.

        Raises:
            UsageError: the number of ranks does not fit the settings.
        """
        return 1

    def reads_images(self, place: int) -> bool:
        """Tell whether the rank at this place in its replica is one of those that keep pixels in memory."""
        return True

    def cuts(self, config: Any) -> bool:
        """Tell whether it uses the blocks of a model, also where none is frozen."""
        return True

    def has_trunk(self, config: Any) -> bool:
        """Tell whether all blocks before the heads that it trains are frozen."""
        return False

    def unread(self, leaf: str, *, ranks: int) -> str | None:
        """Return why a setting of its own has no effect on so many ranks, None where it has."""
        return "there is only one rank" if ranks == 1 else None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the settings of this strategy in a configuration that has chosen it."""
        settings = config.strategy
        assert isinstance(settings, cls)
        return settings


def check_refusals(config: Any) -> None:
    """Raise UsageError where a setting does not go with the strategy."""
    strategy, statistics = config.strategy, config.freeze.statistics
    why = "BatchNorm that trains uses the statistics of each batch"
    batches: Refusal = ("statistics", statistics, not strategy.batch_statistics or statistics != "kept", why)
    for flag, value, fits, why in [*strategy.refusals(config), batches]:
        if not fits:
            raise UsageError(f"--{flag} ({value}) must be left out with --strategy {strategy.strategy}: {why}")


GIVEN = Alternative("--cut-by given", lambda config: config.strategy.cut_by == "given")


@dataclass(frozen=True, kw_only=True)
class CutConfig(StrategyConfig):
    """A strategy that cuts the model into segments."""

    cut_by: Annotated[str, choice("compute", "params", "count", "given")] = setting(
        "compute", "HOW", "what segments share evenly: compute, params, count, or given with --cut-at"
    )
    cut_at: str | None = setting(None, "LIST", "the blocks at which segments begin, as in 2,4", of=GIVEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        together = (self.cut_by == "given") == (self.cut_at is not None)
        rule(together, "cut-at", self.cut_at, "given together with --cut-by given, and only then")
        self.starts()

    def starts(self) -> list[int]:
        """Return the blocks at which segments begin, but for the first."""
        if self.cut_at is None:
            return []
        starts = number_list("cut-at", self.cut_at)
        rule(all(start == start // 1 for start in starts), "cut-at", self.cut_at, "whole numbers separated by commas")
        return [int(start) for start in starts]
