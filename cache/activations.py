"""What the training loop asks for the frozen prefix's output: read if it is cached, computed and kept if it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.compute import LoadImages, PaddedPrefix, Pairs, RunBlocks
from hvfreeze.cache.file.disk import Budget, Disk
from hvfreeze.cache.file.names import Present, find_present
from hvfreeze.cache.file.rows import Keys, pack_keys
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.cache.serving.filling import Filler
from hvfreeze.cache.serving.giving_up import GivingUp
from hvfreeze.cache.serving.meter import Meter, Phase
from hvfreeze.cache.serving.prefetch import Prefetcher
from hvfreeze.cache.serving.reading import Reader
from hvfreeze.cache.serving.sharing import Sharing
from hvfreeze.cache.store.index import Mask
from hvfreeze.cache.store.levels import Levels
from hvfreeze.cache.store.shares import Shares, shares_of
from hvfreeze.cache.store.store import Store


class PrefixActivations:
    """Reads what is cached at the current cut, and otherwise computes from the deepest rows that are there."""

    def __init__(
        self,
        *,
        run_blocks: RunBlocks,
        load_images: LoadImages,
        batch_rows: int,
        directory: Path,
        shard: str,
        stored: torch.dtype | None = None,
        shared: bool = False,
        private: bool = True,
        on_failure: Literal["recompute", "stop"] = "recompute",
        budget: Budget | None = None,
        owner: str = "",
        disk: Disk | None = None,
        prefetch: int = 2,
        phase: Phase | None = None,
        prefix_digest: Callable[[int], str] | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            run_blocks: (x, start, stop) -> output of blocks start..stop-1, with the prefix in evaluation mode.
            load_images: (sample ids, views) -> float images (rows, C, H, W).
            batch_rows: rows of a training batch, and of every prefix forward.
            directory: where cache files lie.
            shard: "RofN": rank R of N.
            stored: narrower type of the rows; None is the type that the prefix computes, which loses nothing.
            shared: also read rows that other ranks have published.
            private: refuse files that are not this user's own.
            on_failure: what a damaged file or a full disk means: go on without the cache, or raise.
            budget: pays for all files of this process.
            owner: names the run; only files of the same owner are ever removed.
            disk: stands in for the real one.
            prefetch: batches read ahead.
            phase: called with "cache_read" or "cache_write" around what training waits for.
            prefix_digest: cut -> `digest_tensors` of that prefix; guards old rows when the cut moves.
        """
        open_store = partial(
            Store,
            directory,
            shard=shard,
            batch_rows=batch_rows,
            stored=stored,
            shared=shared,
            private=private,
            budget=budget,
            owner=owner,
            disk=disk,
        )
        meter = Meter(phase)
        self.counters = meter.counters
        self.directory, self._shard, self._private = directory, shard, private
        self._load_images, self._prefix = load_images, PaddedPrefix(run_blocks, batch_rows=batch_rows, stored=stored)
        self._levels = Levels(open_store, lossy=stored is not None, prefix_digest=prefix_digest)
        self._prefetcher = Prefetcher(self._levels, depth=prefetch)
        self._giving_up = GivingUp(self._levels, self._prefetcher, stops=on_failure == "stop")
        self._reader = Reader(self._prefetcher, self._giving_up, meter, pad=self._prefix.pad)
        self._filler = Filler(self._prefix, load_images, self._levels, self._reader, self._giving_up, meter)
        self._sharing = Sharing(self._levels, self._prefetcher, self._filler, self._giving_up)

    @property
    def failed(self) -> str | None:
        """Why the cache was given up; None while it is in use."""
        return self._giving_up.reason

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self._levels.cut

    @property
    def exact(self) -> bool:
        """Whether all rows in use have the bits that this run would compute."""
        return self._prefix.stored is None and self._levels.exact

    @property
    def stored_bytes(self) -> int:
        """Bytes of this process's rows that are cached at the current cut."""
        return self._levels.current.store.stored_bytes if self._levels.current else 0

    @property
    def complete(self) -> bool:
        """Whether every row of the universe is cached at the current cut."""
        return self._levels.current is not None and self._levels.current.store.complete

    def begin_cut(
        self,
        cut: int,
        *,
        mark: Fingerprint | None = None,
        universe: Pairs | None = None,
        store: bool = True,
        steady: bool = True,
    ) -> None:
        """Take the first `cut` blocks for the prefix; rows of shallower cuts serve until this cut's are complete.

        Args:
            cut: number of frozen blocks.
            mark: fingerprint of the rows at this cut; None when there is nothing to store or to round.
            universe: (sample ids, views) that this process may store, each (rows,).
            store: whether rows are cached at this cut; without, old rows still save a part of the forward.
            steady: a row's bits do not depend on its place in a batch, see `permuted_batch_is_exact`.

        Raises:
            CacheFault: a file of this fingerprint cannot be used, and failures are to stop the run.
        """
        self._prefetcher.forget()
        wanted = store and cut > 0 and self.failed is None and mark is not None and universe is not None
        keys = pack_keys(*universe) if wanted and universe is not None else None
        with self._giving_up.guard():
            self._levels.move(cut, mark=mark, universe=keys)
            self._filler.steady = steady
            self._filler.compare_files()

    def present(self, mark: Fingerprint, universe: Pairs) -> Present:
        """Return which rows of `universe`, (sample ids, views), could be read at a cut with the fingerprint `mark`.

        Raises:
            CacheFault: a file of this fingerprint cannot be used.
        """
        keys = pack_keys(*universe)
        found = self._levels.present(mark, keys)
        return found or find_present(self.directory, mark, keys, shard=self._shard, private=self._private)

    def shares(self, mark: Fingerprint, cut: int, epochs: Sequence[Pairs]) -> Shares:
        """Return how much of each of `epochs`, (sample ids, views), is there for a cut with the fingerprint `mark`.

        Raises:
            CacheFault: a file of this fingerprint cannot be used.
        """
        ids, views = (np.concatenate(column) for column in zip(*epochs, strict=True))
        keys = [pack_keys(*pairs) for pairs in epochs]
        return shares_of(keys, self.present(mark, (ids, views)), self._levels.sources_of(mark, cut))

    def announce(self, batches: Sequence[Pairs]) -> None:
        """Expect these (sample ids, views) next, in this order; they are read ahead when reading is slow.

        Rows that another job was found to be building are looked for again.
        """
        if self._levels.waiting:
            self.refresh()
        self._reader.announce(batches)

    def is_cached(self, sample_ids: Keys, views: Keys) -> bool:
        """Tell whether `get` will need no images for this batch."""
        return self._levels.locate(pack_keys(sample_ids, views)) is not None

    def missing(self, sample_ids: Keys, views: Keys) -> Mask:
        """Tell for each of these rows, (rows,) each, whether it is not cached at the current cut."""
        return self._levels.missing(pack_keys(sample_ids, views))

    def sweep(self, *, everything: bool = False) -> int:
        """Compute missing rows of the announced batches, if that saves forwards of them; return how many were stored.

        Args:
            everything: the whole universe instead, whatever it takes; see `sweep_of`.
        """
        return self._filler.sweep(everything=everything)

    def get(self, sample_ids: Keys, views: Keys, *, counted: int | None = None) -> Tensor:
        """Return the prefix's output for these samples and views, each (rows,); with cut 0 the images.

        Args:
            sample_ids: at most `batch_rows` of them.
            views: one per sample.
            counted: the first rows, which are not padding; None is all.

        Returns:
            (rows, ...) in the type and with the strides that the prefix computes.
        """
        if self.cut == 0:
            return self._load_images(sample_ids, views)
        self.counters.batches += 1
        request = self._reader.announced(sample_ids, views)
        found = self._reader.read(request)
        if found is not None and found[0].cut == self.cut:
            self.counters.rows_read += len(sample_ids) if counted is None else counted
            return found[1] if len(sample_ids) == self._prefix.batch_rows else found[1][: len(sample_ids)]
        return self._filler.compute(request, found)[: len(sample_ids)]

    def publish(self) -> None:
        """Make the rows stored so far readable for other processes, even if more are to come."""
        self._sharing.publish()

    def verify_share(self, rank: int, size: int) -> dict[str, str]:
        """Verify this rank's share of shared files; return what `accept` of all ranks needs, joined."""
        return self._sharing.verify_share(rank, size)

    def accept(self, verified: Mapping[str, str]) -> None:
        """Take files for verified that other ranks have, see `Published.accept`."""
        self._sharing.accept(verified)

    def refresh(self) -> None:
        """Take in rows that other processes have published."""
        self._sharing.refresh()

    def disable(self, reason: str, *, told: bool = False) -> None:
        """Go on without a cache: what is not published is removed, what is stays for others.

        Args:
            reason: for the user.
            told: another process says it.
        """
        self._giving_up.give_up(reason, told=told)

    def close(self) -> None:
        """Publish what was stored at the current cut and let go of all files.

        Raises:
            CacheFault: it could not be written, and failures are to stop the run.
        """
        self._prefetcher.close()
        with self._giving_up.guard():
            self._levels.close()
