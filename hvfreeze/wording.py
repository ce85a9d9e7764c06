"""Helpers for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, as in 1 rank, 2 ranks."""
    return f"{count} {one if count == 1 else many or one + 's'}"


MOST_NAMED = 8
"""Number of entries of a list that a message names."""


def first_few(names: Sequence[str], *, between: str = ", ", most: int = MOST_NAMED) -> str:
    """Return the first `most` names of a list and the number of the others."""
    more = len(names) - most
    return between.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def in_time(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, as in 14 s, 21 min, 3.2 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def on_one_line(text: str) -> str:
    """Return text on one line: line ends and other control characters are escaped as in Python."""
    return "".join(c if c.isprintable() or "\ud800" <= c <= "\udfff" else repr(c)[1:-1] for c in text)


def reason_in_a_line(error: Exception) -> str:
    """Return the start of a library's error message, which may have many lines, else the name of its class."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def did_you_mean(word: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return a hint at the closest known word, else at the first of `others`, or ""."""
    close = [*difflib.get_close_matches(word, list(known), n=1), *others]
    return f"; did you mean '{close[0]}'?" if close else ""
