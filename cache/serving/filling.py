"""Batches of which a row is missing: computed, from older rows where they reach, and stored."""

from __future__ import annotations

from torch import Tensor

from hvfreeze.cache.compute import LoadImages, PaddedPrefix
from hvfreeze.cache.file.rows import unpack_keys
from hvfreeze.cache.planning.sweeping import sweep_of
from hvfreeze.cache.serving.giving_up import GivingUp
from hvfreeze.cache.serving.meter import Meter
from hvfreeze.cache.serving.prefetch import Found, Request
from hvfreeze.cache.serving.reading import Reader
from hvfreeze.cache.store.levels import Level, Levels


class Filler:
    """Computes rows in forwards of one shape, and stores those that are missing.

    Attributes:
        steady: whether a row's bits do not depend on its place in a batch.
    """

    def __init__(
        self,
        prefix: PaddedPrefix,
        load_images: LoadImages,
        levels: Levels,
        reader: Reader,
        giving_up: GivingUp,
        meter: Meter,
    ) -> None:
        """Compute nothing yet.

        Args:
            prefix: runs the frozen blocks.
            load_images: (sample ids, views) -> float images (rows, C, H, W).
            levels: where rows are stored.
            reader: finds rows of shallower cuts to compute on from, and knows what is asked for next.
            giving_up: told of what cannot be stored.
            meter: counts forwards and rows, and times storing.
        """
        self.steady = True
        self._prefix, self._load_images = prefix, load_images
        self._levels, self._reader, self._giving_up = levels, reader, giving_up
        self._meter, self._counters = meter, meter.counters

    def compute(self, request: Request, found: Found | None, *, at: Level | None = None) -> Tensor:
        """Return the output (batch_rows, ...) for a request; missing rows are on their way to the disk.

        Args:
            request: the batch.
            found: rows of a shallower cut to compute on from; None is from images.
            at: an older cut, whose output it is then; None is the current one.
        """
        if found is None:
            start, exact, x = 0, True, self._load_images(*unpack_keys(request.keys))
        else:
            start, exact, x = found[0].cut, found[0].store.exact, found[1]
            advanced = self._counters.rows_advanced
            advanced[start] = advanced.get(start, 0) + len(request.sample_ids)
        self._counters.forwards += 1
        output = self._prefix.run(x, start, self._levels.stops(start, end=at.cut if at else None))
        with self._meter.writing(), self._giving_up.guard():
            self._counters.rows_written += self._levels.append(request.keys, output, exact=exact, at=at)
        return output

    def sweep(self, *, everything: bool) -> int:
        """Compute missing rows of the announced batches, or all, where `sweep_of` finds it worth it; return how many.

        Args:
            everything: the whole universe, whatever it takes.
        """
        batches, rows = self._reader.upcoming, self._prefix.batch_rows
        sweep = sweep_of(self._levels, batches, batch_rows=rows, everything=everything)
        if sweep is None:
            return 0
        before = self._counters.rows_written
        for chunk in sweep.chunks:
            if self._giving_up.reason is None and not sweep.level.store.waiting:
                request = self._reader.request(*unpack_keys(chunk))
                self.compute(request, self._reader.read(request), at=sweep.level)
        self._reader.look_up_again()
        return self._counters.rows_written - before

    def compare_files(self) -> None:
        """Compute a few rows of every file that has come into use.

        Raises:
            CacheFault: a file holds others.
        """
        store = self._levels.current.store if self._levels.current else None
        while store is not None and len(keys := store.published.to_compare()):
            self._counters.comparisons += 1
            images = self._load_images(*unpack_keys(self._prefix.pad(keys)))
            store.published.compare(self._prefix.run(images, 0, self._levels.stops(0)), steady=self.steady)
