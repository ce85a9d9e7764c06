"""Words of messages."""

from __future__ import annotations


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, as in 1 rank, 2 ranks."""
    return f"{count} {one if count == 1 else many or one + 's'}"
