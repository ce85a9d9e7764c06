"""How settings are declared: sections of settings, their bounds, and the alternatives that they belong to. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from typing_extensions import Self

from hvfreeze.rules import Must, at_least, check_bounds, typed, types_of

# Not in the classes: annotations are evaluated late, and a lambda in one would not find the names of this module.
Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0, "steps")]
Positive = Annotated[float, Must(lambda number: 0 < number < math.inf, "a positive number")]
Part = Annotated[float, Must(lambda part: 0 <= part < 1, "at least 0 and below 1")]


class Alternative(NamedTuple):
    """One of several alternatives. Its settings are unknown in a configuration that has chosen another one."""

    flags: str
    """The flags that choose it."""
    holds: Callable[[Any], bool]
    """(configuration) -> True if it is chosen."""


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
    """Return a dataclass field that is also a flag, with `metavar` and `text` for its help.

    A `brief` text, of one line, shows the flag in the help of `hvfreeze auto`. The setting is known if all alternatives
    in `of` are chosen.
    """
    alternatives = of if type(of) is tuple else (of,)
    return field(default=default, metadata={"metavar": metavar, "help": text, "brief": brief, "of": alternatives})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings. The constructor raises UsageError if a value does not have its type or is out of bounds."""

    def __new__(cls, **given: Any) -> Self:
        """Record the names of the given settings, whatever their values."""
        new = super().__new__(cls)
        object.__setattr__(new, "_given", frozenset(given))
        return new

    def __post_init__(self) -> None:
        section: type = type(self)
        kinds, bounds = (types_of(section, include_extras=extras) for extras in (False, True))
        for leaf in fields(self):
            value = getattr(self, leaf.name)
            if isinstance(value, By):
                # An unknown value of the other setting is refused when it is checked itself.
                value = value.get(str(getattr(self, value.leaf)), next(iter(value.values())))
            # A default of None depends on other settings.
            if value is not None or leaf.default is not None:
                known = typed(leaf.name, value, kinds[leaf.name], source=type(self).__name__)
                object.__setattr__(self, leaf.name, known)
                check_bounds(leaf.name, known, bounds[leaf.name])


def given_to(section: Section) -> frozenset[str]:
    """Return the names of the settings that a section was constructed with."""
    given: frozenset[str] = vars(section)["_given"]
    return given
