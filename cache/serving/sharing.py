"""Rows of the current cut that processes have in common: published, taken in, and verified once for all."""

from __future__ import annotations

from collections.abc import Mapping

from hvfreeze.cache.serving.filling import Filler
from hvfreeze.cache.serving.giving_up import GivingUp
from hvfreeze.cache.serving.prefetch import Prefetcher
from hvfreeze.cache.store.levels import Levels


class Sharing:
    """Publishes and takes in rows; does nothing where none are kept."""

    def __init__(self, levels: Levels, prefetcher: Prefetcher, filler: Filler, giving_up: GivingUp) -> None:
        """Share nothing yet.

        Args:
            levels: where rows are stored.
            prefetcher: forgets what it has found, whenever files come and go.
            filler: compares rows of others with its own.
            giving_up: told of files that cannot be used.
        """
        self._levels, self._prefetcher, self._filler, self._giving_up = levels, prefetcher, filler, giving_up

    def publish(self) -> None:
        """Make the rows stored so far readable for other processes, even if more are to come."""
        self._prefetcher.forget()
        if self._levels.current is not None:
            with self._giving_up.guard():
                self._levels.current.store.publish()

    def refresh(self) -> None:
        """Take in rows that other processes have published."""
        self._prefetcher.forget()
        if self._levels.current is not None:
            with self._giving_up.guard():
                self._levels.current.store.refresh()
                self._filler.compare_files()

    def verify_share(self, rank: int, size: int) -> dict[str, str]:
        """Verify this rank's share of shared files; return their names with the digests that `accept` asks for."""
        verified: dict[str, str] = {}
        if self._levels.current is not None:
            with self._giving_up.guard():
                verified = self._levels.current.store.published.verify_share(rank, size)
        return verified

    def accept(self, verified: Mapping[str, str]) -> None:
        """Take files for verified that `verify_share` of other ranks has returned."""
        if self._levels.current is not None:
            self._levels.current.store.published.accept(verified)
