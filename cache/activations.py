"""Returns the output of the frozen prefix: from the cache if it is stored, else computed and stored.

Every forward pass of the prefix has the same number of rows, because the bits of a row depend on it. Shorter batches
are padded with repeated rows, which are neither stored nor counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.format import Keys, is_dense, pack_keys, unpack_keys
from hvfreeze.cache.fingerprint import Fingerprint, bytes_of
from hvfreeze.cache.index import Mask
from hvfreeze.cache.levels import Levels
from hvfreeze.cache.prefetch import Found, Prefetcher, Request, requests_for
from hvfreeze.cache.store import Store
from hvfreeze.errors import UsageError

logger = logging.getLogger(__name__)

RunBlocks = Callable[[Tensor, int, int], Tensor]
LoadImages = Callable[[Keys, Keys], Tensor]
Pairs = tuple[Keys, Keys]
"""Sample ids and views, (rows,) each."""
Phase = Callable[[str], AbstractContextManager[None]]


@dataclass
class Counters:
    """Counts rows without padding, forward passes of `batch_rows` rows, and seconds that training waited."""

    batches: int = 0
    """Rows requested at a cut above 0."""
    rows_read: int = 0
    rows_written: int = 0
    rows_advanced: dict[int, int] = field(default_factory=dict)
    """Rows read at each shallower cut and computed from there to the current cut."""
    forwards: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(frozen=True)
class Shares:
    """For each epoch, the share of its samples whose rows are cached."""

    present: tuple[float, ...]
    """Shares cached at the requested cut."""
    rows_to_complete: int
    """Rows in this process's own incomplete file, which are rewritten when it is completed."""
    source_share: float
    """Share over all epochs cached at the deepest shallower cut, from which the rows would be computed."""
    source_cut: int
    """The deepest shallower cut, 0 if there is none."""


class PrefixActivations:
    """Reads the prefix's output at the current cut, or computes it from the deepest cached rows.

    Attributes:
        failed: why the cache was given up; None while it is in use.
        counters: totals of all calls.
    """

    def __init__(
        self,
        *,
        run_blocks: RunBlocks,
        load_images: LoadImages,
        batch_rows: int,
        directory: Path | None = None,
        shard: str = "0of1",
        stored: torch.dtype | None = None,
        shared: bool = False,
        private: bool = True,
        on_failure: Literal["recompute", "stop"] = "recompute",
        budget: Budget | None = None,
        owner: str = "",
        phase: Phase | None = None,
        prefix_digest: Callable[[int], str] | None = None,
    ) -> None:
        """Create the object without opening files.

        Args:
            run_blocks: (x, start, stop) -> output of blocks start..stop-1, with the prefix in evaluation mode.
            load_images: (sample ids, views) -> float images (rows, C, H, W).
            batch_rows: rows of a training batch, and of every prefix forward.
            directory: directory of the cache files; None if no rows are stored at any cut.
            shard: "RofN": rank R of N.
            stored: narrower type of the rows; None is the type that the prefix computes, which is lossless.
            shared: also read rows that other ranks have published.
            private: refuse files of other users.
            on_failure: whether a damaged file or a full disk ends the use of the cache, or the run.
            budget: limit of all files of this process.
            owner: the run's name; only files of the same owner are ever removed.
            phase: called with "cache_read" or "cache_write" around reads and writes that training waits for.
            prefix_digest: cut -> `digest_tensors` of that prefix; guards old rows when the cut changes.
        """

        def open_store(fingerprint: Fingerprint, owned_keys: Keys) -> Store:
            assert directory is not None, "a cache of rows must have a directory"
            return Store(
                directory,
                fingerprint,
                owned_keys,
                shard=shard,
                batch_rows=batch_rows,
                stored=stored,
                shared=shared,
                private=private,
                budget=budget,
                owner=owner,
            )

        self.batch_rows = batch_rows
        self.counters = Counters()
        self.failed: str | None = None
        self._all_exact = True
        self._run_blocks, self._load_images = run_blocks, load_images
        self._stored, self._stops, self._batch_invariant = stored, on_failure == "stop", True
        self._phase = phase or (lambda name: nullcontext())
        self._levels = Levels(open_store, lossy=stored is not None, prefix_digest=prefix_digest)
        self._prefetcher = Prefetcher(self._levels)

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self._levels.cut

    @property
    def exact(self) -> bool:
        """Whether all rows in use, and all rows read so far, have the bits that this run would compute."""
        return self._stored is None and self._all_exact and self._levels.exact

    @property
    def stored_bytes(self) -> int:
        """Bytes of this process's rows at the current cut."""
        return self._levels.current.stored_bytes if self._levels.current else 0

    def begin_cut(
        self,
        cut: int,
        *,
        fingerprint: Fingerprint | None = None,
        owned_keys: Pairs | None = None,
        store: bool = True,
        batch_invariant: bool = True,
    ) -> None:
        """Use the first `cut` blocks as the prefix; rows of shallower cuts serve until those of this cut are complete.

        Args:
            cut: number of frozen blocks.
            fingerprint: fingerprint of the rows at this cut; None if there is nothing to store or to round.
            owned_keys: (sample ids, views) that this process may store, each (rows,).
            store: whether rows are stored at this cut; if not, old rows still save a part of the forward pass.
            batch_invariant: a row's bits do not depend on its place in a batch, see `permuted_batch_is_exact`.

        Raises:
            CacheFault: a file with this fingerprint cannot be used, and failures stop the run.
        """
        self._prefetcher.forget()
        keys = pack_keys(*owned_keys) if store and cut > 0 and self.failed is None and owned_keys is not None else None
        with self._guard():
            self._levels.move(cut, fingerprint=fingerprint, owned_keys=keys)
            self._batch_invariant = batch_invariant
            self._compare_files()

    def store_of(self, fingerprint: Fingerprint, owned_keys: Pairs) -> Store:
        """Return the store of these rows, (sample ids, views), at a cut with this fingerprint; to look up what it has.

        Raises:
            CacheFault: a file with this fingerprint cannot be used.
        """
        return self._levels.store_of(fingerprint, pack_keys(*owned_keys))

    def shares(self, fingerprint: Fingerprint, cut: int, epochs: Sequence[Pairs]) -> Shares:
        """Return the cached share of each of `epochs`, (sample ids, views), at a cut with this fingerprint.

        Raises:
            CacheFault: a file with this fingerprint cannot be used.
        """
        ids, views = (np.concatenate(column) for column in zip(*epochs, strict=True))
        keys = [pack_keys(*pairs) for pairs in epochs]
        store, wanted = self.store_of(fingerprint, (ids, views)), np.concatenate(keys)
        sources = self._levels.sources_of(fingerprint, cut)
        return Shares(
            present=tuple(1.0 - _mean(store.missing(own)) for own in keys),
            rows_to_complete=store.rows_to_complete,
            source_share=1.0 - _mean(sources[-1].missing(wanted)) if sources and len(wanted) else 0.0,
            source_cut=sources[-1].cut if sources else 0,
        )

    def announce(self, batches: Sequence[Pairs]) -> None:
        """Announce the next (sample ids, views), in order; they are prefetched if reading is slow.

        Rows that another job was writing are looked up again.
        """
        if self._levels.current is not None and self._levels.current.waiting:
            self.refresh()
        self._prefetcher.announce(requests_for(batches, pad=self._pad))

    def is_cached(self, sample_ids: Keys, views: Keys) -> bool:
        """Return True if `get` will need no images for this batch."""
        return self._levels.locate(pack_keys(sample_ids, views)) is not None

    def missing(self, sample_ids: Keys, views: Keys) -> Mask:
        """Return for each of these rows, (rows,) each, whether it is missing at the current cut."""
        return self._levels.missing(pack_keys(sample_ids, views))

    def get(self, sample_ids: Keys, views: Keys, *, counted: int | None = None) -> Tensor:
        """Return the output of the prefix for these samples and views, each (rows,); the images at cut 0.

        Args:
            sample_ids: at most `batch_rows` ids.
            views: one per sample.
            counted: number of rows at the front that are not padding; None is all.

        Returns:
            (rows, ...) in the type and with the strides that the prefix computes.
        """
        if self.cut == 0:
            return self._load_images(sample_ids, views)
        self.counters.batches += 1
        request = self._prefetcher.next_for(sample_ids, views) or self._request(sample_ids, views)
        found = self._read(request)
        if found is not None and found[0].cut == self.cut:
            self.counters.rows_read += len(sample_ids) if counted is None else counted
            return found[1] if len(sample_ids) == self.batch_rows else found[1][: len(sample_ids)]
        return self._compute(request, found)[: len(sample_ids)]

    def sweep(self, *, everything: bool = False) -> int:
        """Compute missing rows of the announced batches if that saves forward passes; return how many were stored.

        A batch with one missing row is computed as a whole. Missing rows of several batches together need fewer forward
        passes; those cached at a shallower cut are computed from there.

        Args:
            everything: compute all owned rows instead, whatever the cost.
        """
        before = self.counters.rows_written
        for _ in self.sweeping(everything=everything):
            pass
        return self.counters.rows_written - before

    def sweeping(self, *, everything: bool = False) -> Iterator[None]:
        """Do as `sweep`, and yield after each forward pass; the caller must exhaust the iterator."""
        store, batches = self._levels.fillable, [request.keys for request in self._prefetcher.upcoming]
        chunks = self._chunks_to_sweep(store, batches, everything=everything) if store is not None else []
        if store is None or not chunks:
            return
        for chunk in chunks:
            if self.failed is None and not store.waiting:
                request = self._request(*unpack_keys(chunk))
                self._compute(request, self._read(request), at=store)
                yield
        self._prefetcher.forget()
        self._prefetcher.look_up()

    def publish(self) -> None:
        """Make the rows stored so far readable for other processes, even if more will follow."""
        self._prefetcher.forget()
        if self._levels.current is not None:
            with self._guard():
                self._levels.current.publish()

    def refresh(self) -> None:
        """Open files that other processes have published meanwhile."""
        self._prefetcher.forget()
        if self._levels.current is not None:
            with self._guard():
                self._levels.current.refresh()
                self._compare_files()

    def verify_share(self, rank: int, size: int) -> dict[str, str]:
        """Verify this rank's share of shared files; return their names and digests for `accept`."""
        verified: dict[str, str] = {}
        if self._levels.current is not None:
            with self._guard():
                verified = self._levels.current.verify_share(rank, size)
        return verified

    def accept(self, verified: Mapping[str, str]) -> None:
        """Mark files as verified that `verify_share` of other ranks has returned."""
        if self._levels.current is not None:
            self._levels.current.accept(verified)

    def disable(self, reason: str, *, told: bool = False) -> None:
        """Continue without a cache: unpublished files are removed, published ones stay.

        Args:
            reason: for the user.
            told: another process logs it.
        """
        if self.failed is None:
            self.failed = reason
            logger.log(logging.INFO if told else logging.WARNING, "continuing without the activation cache: %s", reason)
        self._prefetcher.forget()
        self._levels.discard()

    def close(self) -> None:
        """Publish the rows stored at the current cut, and close all files.

        Raises:
            CacheFault: they could not be written, and failures stop the run.
        """
        self._prefetcher.close()
        with self._guard():
            self._levels.close()

    @contextmanager
    def _guard(self, phase: Literal["cache_read", "cache_write"] | None = None) -> Iterator[None]:
        """Time the block; on a fault of the cache, end the use of the cache or the run."""
        start = time.perf_counter()
        with self._phase(phase) if phase else nullcontext():
            try:
                yield
            except CacheFault as fault:
                if self._stops:
                    self._levels.discard()
                    raise
                self.disable(str(fault))
        if phase == "cache_read":
            self.counters.read_seconds += time.perf_counter() - start
        elif phase == "cache_write":
            self.counters.write_seconds += time.perf_counter() - start

    def _pad(self, keys: Keys) -> Keys:
        """Return `keys`, repeated up to the batch size."""
        if not 0 < len(keys) <= self.batch_rows:
            raise ValueError(
                f"the batch has {len(keys)} rows; it must have 1 to {self.batch_rows}, the training batch size"
            )
        return keys if len(keys) == self.batch_rows else np.resize(keys, self.batch_rows)

    def _request(self, sample_ids: Keys, views: Keys) -> Request:
        """Return a request for a batch, (rows,) each, that was not announced."""
        return requests_for([(sample_ids, views)], pad=self._pad)[0]

    def _read(self, request: Request) -> Found | None:
        """Return the cached rows of a request; None if a row is missing, or the cache was given up."""
        with self._guard("cache_read"):
            found = self._prefetcher.take(request)
            if found is not None:
                # It stays False after their store is removed: training has used these rows.
                self._all_exact = self._all_exact and found[0].exact
            return found
        return None

    def _run(self, x: Tensor, start: int, stops: Sequence[int]) -> Tensor:
        """Return blocks start..stops[-1]-1 of `x`: (batch_rows, ...), dense, and rounded after each of `stops`."""
        with torch.no_grad():
            for stop in stops:
                x = self._run_blocks(x, start, stop)
                x = x if is_dense(x.shape, x.stride()) else x.contiguous()
                x = x if self._stored in (None, x.dtype) else self._rounded(x, cut=stop)
                start = stop
        return x

    def _rounded(self, x: Tensor, *, cut: int) -> Tensor:
        """Return `x` rounded to the stored type; raises UsageError if a value exceeds its range."""
        assert self._stored is not None, "rows are rounded only if the stored type differs from the computed type"
        rounded = x.to(self._stored)
        if rounded.isinf().any() and x.isfinite().all():
            name, most = str(self._stored).removeprefix("torch."), torch.finfo(self._stored).max
            raise UsageError(
                f"--cache-dtype {name} holds values up to {most:.5g}, but block {cut} computes larger ones (up to "
                f"{float(x.abs().max()):.4g}); use bfloat16 or native"
            )
        return rounded.to(x.dtype)

    def _compute(self, request: Request, found: Found | None, *, at: Store | None = None) -> Tensor:
        """Return the output (batch_rows, ...) for a request; missing rows are queued for writing.

        Args:
            request: the batch.
            found: rows of a shallower cut to start from; None starts from images.
            at: an older cut whose output is returned; None is the current one.
        """
        if found is None:
            start, exact, x = 0, True, self._load_images(*unpack_keys(request.keys))
        else:
            start, exact, x = found[0].cut, found[0].exact, found[1]
            advanced = self.counters.rows_advanced
            advanced[start] = advanced.get(start, 0) + len(request.sample_ids)
        self.counters.forwards += 1
        output = self._run(x, start, self._levels.stops(start, end=at.cut if at else None))
        with self._guard("cache_write"):
            self.counters.rows_written += self._levels.append(request.keys, output, exact=exact, at=at)
        return output

    def _chunks_to_sweep(self, store: Store, batches: Sequence[Keys], *, everything: bool) -> list[Keys]:
        """Return the keys of each forward pass, (rows,) of at most a batch, that stores missing rows at `store`.

        The list is empty if they would save none of the forward passes of `batches`. The cost of a forward pass is its
        number of blocks: without a clock, the choice is the same in every run.
        """
        cut = self.cut
        if store.complete or store.waiting or not (everything or batches):
            return []
        wanted = store.owned_keys if everything else np.unique(np.concatenate(batches))
        missing: Keys = wanted[store.missing_owned(wanted)]
        # Rows that start from the same stored cut come together, the deepest cut first.
        depths = np.zeros(len(missing), np.int64)
        for source in self._levels.below(store):
            depths[~source.missing(missing)] = source.cut
        ordered = missing[np.argsort(-depths, kind="stable")]
        chunks = [ordered[first : first + self.batch_rows] for first in range(0, len(ordered), self.batch_rows)]
        if not everything and chunks:
            waiting = [batch for batch in batches if store.missing(batch).any()]
            swept = sum(store.cut - start for start in self._starts(chunks)) + len(waiting) * (cut - store.cut)
            if swept >= sum(cut - start for start in self._starts(waiting)):
                return []
        return chunks

    def _starts(self, batches: Sequence[Keys]) -> list[int]:
        """Return the cut that a forward pass of each of `batches` starts at; 0 is the images."""
        return [0 if found is None else found[0].cut for found in self._levels.locate_batches(batches)]

    def _compare_files(self) -> None:
        """Compare a few rows of every newly opened file with computed ones; CacheFault if they differ."""
        store = self._levels.current
        while store is not None and len(keys := store.to_compare()):
            images = self._load_images(*unpack_keys(self._pad(keys)))
            store.compare(self._run(images, 0, self._levels.stops(0)), batch_invariant=self._batch_invariant)


def _mean(mask: Mask) -> float:
    return float(mask.mean()) if len(mask) else 0.0


def permuted_batch_is_exact(run_prefix: Callable[[Any], Tensor], inputs: Any) -> bool:
    """Return True if a row keeps its bits when the rows of a batch are permuted, which caching needs.

    Args:
        run_prefix: the frozen prefix in evaluation mode; returns (rows, ...).
        inputs: a batch of the training shape, in the training memory format: images, (rows, C, H, W), or tensors of
            (rows, ...) in any nesting.
    """

    def moved(leaf: Any) -> Any:
        return torch.index_select(leaf, 0, order, out=torch.empty_like(leaf)) if isinstance(leaf, Tensor) else leaf

    with torch.no_grad():
        straight = run_prefix(inputs)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(straight)))
        expected = straight.index_select(0, order)
        return torch.equal(bytes_of(expected), bytes_of(run_prefix(tree_map(moved, inputs))))


def rows_are_independent(run_prefix: Callable[[Any], Tensor], inputs: Any, whole: Tensor) -> bool:
    """Return True if a row does not depend on the other rows of its batch, except for rounding.

    It does behind a BatchNorm without running statistics, for example. Arguments are those of
    `permuted_batch_is_exact`, and `whole`, the prefix's output for `inputs`.
    """
    with torch.no_grad():
        rows, half = len(whole), len(whole) // 2
        order = torch.cat([torch.arange(half), torch.arange(rows - half) % max(1, half)])

        def other_half(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows
            if not is_batch:
                return leaf
            other = torch.index_select(leaf, 0, order, out=torch.empty_like(leaf))
            if leaf.is_floating_point():
                # Changes the batch's statistics a lot.
                other[half:] *= 3.0
            return other

        if not half:
            return True
        other, largest = run_prefix(tree_map(other_half, inputs))[:half], float(whole.abs().max())
        # Rows that keep their places should keep their bits, so this is generous.
        return torch.allclose(whole[:half], other, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)
