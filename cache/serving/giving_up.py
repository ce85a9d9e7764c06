"""What becomes of a cache that fails while it is in use: the run goes on without it, or ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.serving.prefetch import Prefetcher
from hvfreeze.cache.store.levels import Levels

logger = logging.getLogger(__name__)


class GivingUp:
    """Whether a cache is still in use.

    Attributes:
        reason: why it is not; None while it is.
    """

    def __init__(self, levels: Levels, prefetcher: Prefetcher, *, stops: bool) -> None:
        """Take the cache for usable.

        Args:
            levels: let go of what they hold when the cache is given up.
            prefetcher: forgets what it has read by then.
            stops: a fault ends the run.
        """
        self.reason: str | None = None
        self._levels, self._prefetcher, self._stops = levels, prefetcher, stops

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Let what goes wrong with the cache inside end its use, or the run.

        Raises:
            CacheFault: something does, and it ends the run.
        """
        try:
            yield
        except CacheFault as fault:
            if self._stops:
                self._levels.discard()
                raise
            self.give_up(str(fault))

    def give_up(self, reason: str, *, told: bool = False) -> None:
        """Go on without a cache: what is not published is removed, what is stays for others.

        Args:
            reason: for the user.
            told: another process says it.
        """
        if self.reason is None:
            self.reason = reason
            logger.log(logging.INFO if told else logging.WARNING, "going on without the activation cache: %s", reason)
        self._prefetcher.forget()
        self._levels.discard()
