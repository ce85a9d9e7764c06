"""The stores of a run, one per cut: rows of a deeper cut are computed from those of a shallower one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from hvfreeze.cache.faults import CacheFull
from hvfreeze.cache.file.format import Keys
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.cache.index import Mask
from hvfreeze.cache.store import RowLocation, Store


def via_of(fingerprint: Fingerprint | None) -> tuple[int, ...]:
    """Return the cuts after which rows of a fingerprint were rounded; empty if there is none."""
    found = fingerprint.fields.get("via", ()) if fingerprint is not None else ()
    return tuple(cut for cut in found if isinstance(cut, int)) if isinstance(found, (list, tuple)) else ()


class Levels:
    """The store of the current cut, if it has one, and those of shallower cuts until that one is complete.

    `locate` may be called from any thread, everything else from one.
    """

    def __init__(
        self,
        open_store: Callable[[Fingerprint, Keys], Store],
        *,
        lossy: bool,
        prefix_digest: Callable[[int], str] | None,
    ) -> None:
        """Create the object without opening files.

        Args:
            open_store: (fingerprint, owned keys) -> its store.
            lossy: rows are rounded, so only rows rounded at the same cuts may be used to compute others.
            prefix_digest: cut -> current digest of the prefix; rows of a changed prefix are dropped.
        """
        self.cut = 0
        self.current: Store | None = None
        self._via: tuple[int, ...] = ()
        self._sources: tuple[Store, ...] = ()
        self._open_store, self._lossy, self._prefix_digest = open_store, lossy, prefix_digest

    @property
    def exact(self) -> bool:
        """Whether everything in use has the bits that this run would compute."""
        return all(store.exact for store in self._all())

    @property
    def fillable(self) -> Store | None:
        """The store to which rows may be added: that of the current cut, else the deepest one that is being written."""
        writing = [store for store in self._sources if store.writing]
        return self.current or (writing[-1] if writing else None)

    def below(self, store: Store) -> tuple[Store, ...]:
        """Return the stores of shallower cuts than that of `store`, shallowest first."""
        return tuple(source for source in self._sources if source.cut < store.cut)

    def sources_of(self, fingerprint: Fingerprint, cut: int) -> tuple[Store, ...]:
        """Return the stores from which rows at `cut` would be computed, shallowest first."""
        via = via_of(fingerprint)
        return tuple(store for store in self._all() if store.cut < cut and self._is_valid(store, via=via))

    def missing(self, keys: Keys) -> Mask:
        """Return for each of `keys` (rows,) whether its row is missing at the current cut."""
        return self.current.missing(keys) if self.current else np.ones(len(keys), dtype=bool)

    def store_of(self, fingerprint: Fingerprint, owned_keys: Keys) -> Store:
        """Return the store of a fingerprint: that of the current cut, or another, which is not kept.

        Raises:
            CacheFault: a file with this fingerprint cannot be used.
        """
        if self.current is not None and self.current.fingerprint.digest == fingerprint.digest:
            return self.current
        return self._open_store(fingerprint, owned_keys)

    def move(self, cut: int, *, fingerprint: Fingerprint | None, owned_keys: Keys | None) -> None:
        """Change to `cut`; with a fingerprint and owned keys its rows are stored.

        Deeper rows are removed. An open store of this very fingerprint stays in use.

        Raises:
            CacheFault: a file with this fingerprint cannot be used.
        """
        levels = self._all()
        self.cut, self._via = cut, via_of(fingerprint)
        self.current, self._sources = None, ()
        for store in levels:
            if fingerprint is not None and store.fingerprint.digest == fingerprint.digest:
                self.current = store
            elif store.cut < cut and self._is_valid(store, via=self._via):
                self._sources = (*self._sources, store)
            else:
                store.delete()
        if fingerprint is not None and owned_keys is not None and self.current is None:
            self.current = self._open_store(fingerprint, owned_keys)
        self._drop_sources_if_complete()

    def stops(self, start: int, *, end: int | None = None) -> list[int]:
        """Return the cuts after which a forward pass from `start` rounds, `end` last; None is the current cut."""
        end = self.cut if end is None else end
        between = [cut for cut in self._via if start < cut < end] if self._lossy else []
        return [*between, end]

    def locate(self, keys: Keys) -> tuple[Store, RowLocation] | None:
        """Return the deepest cached activations that contain all of `keys`; valid until the next `move`."""
        return self.locate_batches([keys])[0]

    def locate_batches(self, batches: Sequence[Keys]) -> list[tuple[Store, RowLocation] | None]:
        """Return the result of `locate` for each of `batches`, in one lookup."""
        found: list[tuple[Store, RowLocation] | None] = [None] * len(batches)
        for store in self._all() if batches else ():
            for position, place in enumerate(store.locate_batches(batches)):
                found[position] = (store, place) if place is not None else found[position]
        return found

    def append(self, keys: Keys, batch: Tensor, *, exact: bool, at: Store | None = None) -> int:
        """Store the missing rows of `keys`, and return how many; older cuts make room, and are removed when complete.

        Args:
            keys: (rows,) keys of `batch`, a whole forward pass (batch_rows, ...).
            batch: rows beyond those of `keys` are padding.
            exact: the rows have the bits that this run would compute.
            at: the store of an older cut that the rows belong to; None is the current one.

        Raises:
            CacheFault: the file cannot be written.
        """
        store = at or self.current
        if store is None:
            return 0
        try:
            count = store.append(keys, batch, exact=exact)
        except CacheFull:
            if store is not self.current or not self._sources:
                raise
            self._drop_sources()
            count = store.append(keys, batch, exact=exact)
        self._drop_sources_if_complete()
        return count

    def discard(self) -> None:
        """Remove unpublished files, and close all stores."""
        for store in self._all():
            store.discard()
        self.current, self._sources = None, ()

    def close(self) -> None:
        """Publish the rows of the current cut, and remove those of older ones; CacheFault if that fails."""
        self._drop_sources()
        store, self.current = self.current, None
        if store is not None:
            store.close()

    def _all(self) -> tuple[Store, ...]:
        """Return all stores, shallowest first."""
        return (*self._sources, self.current) if self.current else self._sources

    def _is_valid(self, store: Store, *, via: tuple[int, ...]) -> bool:
        fingerprint = store.fingerprint
        if self._lossy and (store.cut not in via or via_of(fingerprint) != tuple(c for c in via if c < store.cut)):
            return False
        return self._prefix_digest is None or self._prefix_digest(store.cut) == fingerprint.fields.get("prefix")

    def _drop_sources_if_complete(self) -> None:
        if self._sources and self.current is not None and self.current.complete:
            self._drop_sources()

    def _drop_sources(self) -> None:
        dropped, self._sources = self._sources, ()
        for store in dropped:
            store.delete()
