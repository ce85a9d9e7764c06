"""Batches that are cached: found, and read ahead of time where that is worth a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvfreeze.cache.compute import Pairs
from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.serving.giving_up import GivingUp
from hvfreeze.cache.serving.meter import Meter
from hvfreeze.cache.serving.prefetch import Found, Prefetcher, Request, requests_for


class Reader:
    """Reads batches from the deepest cut at which all their rows are cached."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        giving_up: GivingUp,
        meter: Meter,
        *,
        pad: Callable[[Keys], Keys],
    ) -> None:
        """Read nothing yet.

        Args:
            prefetcher: reads ahead of time.
            giving_up: told of what cannot be read.
            meter: times it.
            pad: keys -> keys, repeated up to a batch.
        """
        self._prefetcher, self._giving_up, self._meter, self._pad = prefetcher, giving_up, meter, pad

    def announce(self, batches: Sequence[Pairs]) -> None:
        """Expect these (sample ids, views) next, in this order."""
        self._prefetcher.announce(requests_for(batches, pad=self._pad))

    @property
    def upcoming(self) -> list[Keys]:
        """Keys (batch_rows,) of each batch that was announced and not read yet."""
        return [request.keys for request in self._prefetcher.upcoming]

    def look_up_again(self) -> None:
        """Find the announced batches anew: more of them may be cached."""
        self._prefetcher.forget()
        self._prefetcher.look_up()

    def announced(self, sample_ids: Keys, views: Keys) -> Request:
        """Return the request for a batch, (rows,) each: the next of the announced ones, if it is that."""
        return self._prefetcher.next_for(sample_ids, views) or self.request(sample_ids, views)

    def request(self, sample_ids: Keys, views: Keys) -> Request:
        """Return a request for a batch, (rows,) each, beside the announced ones."""
        return requests_for([(sample_ids, views)], pad=self._pad)[0]

    def read(self, request: Request) -> Found | None:
        """Return what is cached for a request; None when a row is missing, or the cache was given up."""
        with self._meter.reading(), self._giving_up.guard():
            return self._prefetcher.take(request)
        return None
