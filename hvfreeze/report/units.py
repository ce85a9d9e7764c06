"""Numbers as a person reads them: with units, and with as many digits as they are worth."""

from __future__ import annotations

import math
from collections.abc import Callable

from hvfreeze.report.comparison import Spread


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction as a percentage, a dash where it is not known."""
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f} %"


def seconds(value: float) -> str:
    """Return seconds with three significant digits, and no more than one decimal from 10 s on."""
    return f"{value:.0f} s" if value >= 1000 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def megabytes(value: float) -> str:
    """Return bytes as megabytes (10^6 bytes)."""
    return f"{value / 1e6:.0f} MB" if value >= 1e8 or value == 0 else f"{value / 1e6:.1f} MB"


def factor(value: float) -> str:
    """Return a ratio."""
    return f"{value:.2f}x"


def number(value: float) -> str:
    """Return a count or a rate with about three significant digits."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def shown(value: Spread, unit: Callable[[float], str]) -> str:
    """Return a mean, with lowest and highest in brackets where they differ."""
    low, high = (unit(end).rstrip(" %sxMB") for end in (value.low, value.high))
    return unit(value.mean) if low == high else f"{unit(value.mean)} ({low} to {high})"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"
