"""Images that are damaged or cannot be read: all of them in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hvfreeze.errors import RefusedError

T = TypeVar("T")
MOST_LISTED = 10


class BrokenImagesError(RefusedError):
    """Images that are damaged or cannot be read; `reasons` has a message for each."""

    def __init__(self, reasons: Sequence[str] | str) -> None:
        self.reasons = [reasons] if isinstance(reasons, str) else list(reasons)
        if isinstance(reasons, str):
            super().__init__(reasons)
            return
        what = self.reasons[0] if len(reasons) == 1 else f"{len(reasons)} images cannot be used: {listed(reasons)}"
        super().__init__(f"{what}; --skip-bad leaves out such images")


def listed(reasons: Sequence[str]) -> str:
    """Return the first of many messages about images, without what to do about each, and how many more there are."""
    more = len(reasons) - MOST_LISTED
    shown = "; ".join(reason.partition(";")[0] for reason in reasons[:MOST_LISTED])
    return shown + (f"; and {more} more" if more > 0 else "")


def all_loaded(*loads: Callable[[], T]) -> list[T]:
    """Return what each load gives.

    Raises:
        BrokenImagesError: images of some are damaged or cannot be read; names those of all.
    """
    loaded, broken = [], []
    for load in loads:
        try:
            loaded.append(load())
        except BrokenImagesError as error:
            broken += error.reasons
    if broken:
        raise BrokenImagesError(broken)
    return loaded
