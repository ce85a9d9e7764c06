"""Types and bounds of settings, and how they are checked."""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from hvfreeze.errors import UsageError

types_of = cache(typing.get_type_hints)
"""Types of a class's attributes by name. Evaluating them is the slowest part of checking a configuration."""


IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
"""Types of settings in messages."""


class Must(NamedTuple):
    """A bound in the type of a setting, such as `Annotated[int, at_least(1)]`: a test of its value, and what to say."""

    holds: Callable[[Any], bool]
    wanted: str


def choice(*names: str) -> Must:
    """Return the bound that a value is one of `names`."""
    return Must(lambda value: value in names, "one of " + ", ".join(names))


def at_least(least: int, unit: str = "") -> Must:
    """Return the bound that a value is `least` or more of a unit."""
    return Must(lambda value: value >= least, f"{f'at least {least}' if least else '0 or more'} {unit}".rstrip())


def between(least: int, most: int) -> Must:
    """Return the bound that a value is from `least` to `most`."""
    return Must(lambda value: least <= value <= most, f"in {least}..{most}")


def reads(parse: Callable[[Any], object]) -> Must:
    """Return the bound that `parse` accepts a value; it raises UsageError otherwise."""
    return Must(lambda value: (parse(value), True)[1], "")


def typed(leaf: str, value: Any, kind: Any, *, source: str) -> Any:
    """Return `value` as the leaf's type.

    A text may be given as a number, a list or a path, and a number as a scalar of NumPy or torch. Where a leaf has no
    text, on and off are booleans, and a text such as 1e-3 is a number.

    Raises:
        UsageError: `value` has another type.
    """
    options = typing.get_args(kind) or (kind,)
    if value is None and type(None) in options:
        return None
    plain = value
    with suppress(TypeError, ValueError, RuntimeError):
        plain = value.item() if hasattr(value, "item") else os.fspath(value)
    if float in options and isinstance(plain, int) and not isinstance(plain, bool):
        # An integer beyond the range of float is checked as infinity.
        return float(plain) if abs(plain) < 2**1023 else math.inf * (1 if plain > 0 else -1)
    if type(plain) is str and str not in options:
        # YAML reads these as text, although flags of the same form are numbers.
        if int in options and re.fullmatch(r"[-+]?0[0-9]+", plain):
            return int(plain)
        if bool in options and plain.lower() in ("on", "off"):
            return plain.lower() == "on"
        if float in options and re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+", plain):
            return float(plain)
    if str in options and not isinstance(plain, bool):
        if isinstance(plain, (list, tuple)) and all(isinstance(entry, (int, float, str)) for entry in plain):
            return ",".join(str(entry) for entry in plain)
        if isinstance(plain, (int, float)):
            return str(plain)
    if type(plain) is str and str in options and "\0" in plain:
        raise UsageError(f"{source}: {leaf} ({value!r}) must be text without NUL characters, which no path may have")
    for option in options:
        if type(plain) is option:
            return plain
    names = " or ".join(IN_WORDS.get(option, option.__name__) for option in options if option is not type(None))
    quotes = f"; put {leaf} in quotes where it is text such as yes" if str in options and type(plain) is bool else ""
    raise UsageError(f"{source}: {leaf} ({value!r}) must be {names}{quotes}")


def rule(ok: bool, flag: str, value: object, wanted: str, remedy: str = "") -> None:
    """Raise UsageError naming the flag, its value, the rule and the way out unless `ok`."""
    if not ok:
        # A flag without a value, and a setting that was not given.
        shown = "" if value is True or value is None else f" ({value})"
        raise UsageError(f"--{flag}{shown} must be {wanted}" + (f"; {remedy}" if remedy else ""))


def check_bounds(leaf: str, value: object, kind: Any) -> None:
    """Raise UsageError unless `value` is None or within the bounds of the leaf's type `kind`, which may be optional."""
    bounds = [must for option in (kind, *typing.get_args(kind)) for must in getattr(option, "__metadata__", ())]
    for must in bounds:
        rule(value is None or must.holds(value), leaf.replace("_", "-"), value if value != "" else "''", must.wanted)


def one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    rule(value in choices, flag, value, "one of " + ", ".join(choices))


def float_or_nan(text: str) -> float:
    """Return `text` as a number, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_list(flag: str, text: str, *, each: str = "rank", also: str = "") -> list[float]:
    """Return the numbers in `text`, which commas separate.

    Args:
        flag: name of the flag.
        text: its value.
        each: noun for what each number belongs to.
        also: other values of the flag, for the message.

    Raises:
        UsageError: an entry is no number.
    """
    numbers = [float_or_nan(entry) for entry in text.split(",")]
    wanted = (also + ", or " if also else "") + f"numbers separated by commas, one per {each}"
    rule(not any(math.isnan(n) for n in numbers), flag, text, wanted)
    return numbers


def parse_parts(flag: str, text: str, choices: tuple[str, ...]) -> frozenset[str]:
    """Return the names in `text`, which commas separate; none for `none`.

    Raises:
        UsageError: one is not among `choices`.
    """
    names = [] if text == "none" else text.split(",")
    for name in names:
        rule(name in choices, flag, name, "none or a list out of " + ", ".join(choices))
    return frozenset(names)
