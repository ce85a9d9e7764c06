"""`hvfreeze.CachedLoader`: a script's loader, which gives the frozen prefix's output, read where it is cached.

    loader = hvfreeze.CachedLoader(loader, optimizer, directory="cache")
    for activations, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(loader.suffix(activations), labels)
        ...

While nothing is frozen the activations are the inputs, and the suffix is the model. Where a cut has stayed for an
epoch, ranks compute the rows of all samples once, each a share, and every later epoch reads them. The bits are those
that the model would compute.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.file.disk import prepare_directory
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.chain.watched.calls import Inputs
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.own_loop.cached.data_identity import data_identity
from hvfreeze.own_loop.cached.halves import autocast, halves_of, whole
from hvfreeze.own_loop.cached.passes import BatchActivations, Passes
from hvfreeze.own_loop.cached.rows import fingerprint_of, is_steady
from hvfreeze.own_loop.cached.samples import Ids, Samples, Split, inputs_and_labels
from hvfreeze.own_loop.cached.sharing import ranks_that_see
from hvfreeze.own_loop.optimizer import DistributedOptimizer
from hvfreeze.ranks.agreement import together

logger = logging.getLogger("hvfreeze")


class CachedLoader:
    """Yields (`BatchActivations`, labels) for each batch of a loader, and runs what is behind the cut with `suffix`.

    Every rank must begin its epochs together with the others: where a cut has settled, all compute rows for all.

    Attributes:
        loader: the script's own; its sampler goes on to be the script's to set.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        frozen_by: DistributedOptimizer | Freezer,
        *,
        directory: str | Path,
        views: int = 1,
        split: Split = inputs_and_labels,
        data: str | None = None,
        seed: int = 0,
        autocast_dtype: torch.dtype | None = None,
        store: bool = True,
    ) -> None:
        """Look at a few samples, and cache nothing yet.

        Collective: every rank must call this.

        Args:
            loader: over a map-style data set, in batches of one size. The data set must give the same sample for the
                same number, unless there are views.
            frozen_by: what moves the cut.
            directory: where cache files lie, and stay for later runs; that of one file system for the ranks of a host.
            views: with more than one, random draws in the data set become so many fixed views of each sample, one an
                epoch in turn.
            split: takes a batch apart into the model's inputs and the labels; by default the last entry is the labels.
            data: names the data set in fingerprints, in place of its class, settings and files.
            seed: of the views' draws.
            autocast_dtype: as in the script's `torch.autocast("cpu", dtype=...)`, None without.
            store: whether rows are kept; without, all is computed and nothing else changes.

        Raises:
            UsageError: the loader's samples cannot be numbered, or come out differently each time; on all ranks.
            RefusedError: the directory cannot be used; on all ranks.
        """
        self.loader, self._directory = loader, Path(directory)
        self._freezer = frozen_by.freezer if isinstance(frozen_by, DistributedOptimizer) else frozen_by
        self._world, self._chain = self._freezer.world, self._freezer.chain
        self._halves, self._dtype, self._store = halves_of(self._chain), autocast_dtype, store

        def look() -> None:
            self._samples = Samples(loader, split, num_views=views, seed=seed)
            self._data = data_identity(self._samples, name=data)
            if store:
                prepare_directory(self._directory)

        together(self._world, look, name="loader")
        self._group = ranks_that_see(self._directory, self._world) if store else (0, 1)
        self._seed, self._steady = seed, True
        self._moves_before, self._moves_followed = -1, 0
        self._stored, self._passes = False, Passes(self._samples, self._halves, dtype=autocast_dtype)
        self._activations = PrefixActivations(
            run_blocks=self._passes.run,
            load_images=self._passes.load,
            batch_rows=self._samples.batch_rows,
            directory=self._directory,
            shard=f"{self._world.rank}of{self._world.size}",
            shared=True,
            prefix_digest=self._halves.digest,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[BatchActivations, Any]]:
        """Yield the batches of an epoch. Collective: every rank must begin its epochs together."""
        batches = [(ids, np.full_like(ids, self._view_after(0))) for ids in self._samples.epoch()]
        moves, rests = len(self._freezer.cut_history), math.isinf(self._freezer.epochs_until_move())
        settled = self._freezer.cut > 0 and (moves == self._moves_before or rests)
        self._moves_before = moves
        if self._store and settled and not (self._stored and moves == self._moves_followed):
            self._begin()
        elif batches and moves != self._moves_followed:
            self._follow(*batches[0])
        self._samples.expect([pairs for pairs in batches if not self._needs_no_samples(*pairs)])
        self._activations.announce(batches if self._stored else [])
        for ids, views in batches:
            if len(self._freezer.cut_history) != self._moves_followed:
                self._follow(ids, views)
            yield self._batch(ids, views)

    def suffix(self, activations: BatchActivations) -> Any:
        """Return what the model gives for a batch; gradients reach what is behind its cut."""
        if activations.tensor is None:
            return whole(self._chain, activations.inputs)
        return self._halves.after(activations.tensor, activations.inputs, activations.cut)

    def close(self) -> None:
        """Let go of all files; what is stored stays for later runs."""
        self._activations.close()

    @property
    def sampler(self) -> Any:
        """The loader's, for `sampler.set_epoch`."""
        return self.loader.sampler

    @property
    def rows_read(self) -> int:
        """Rows read from the cache so far, in place of being computed."""
        return self._activations.counters.rows_read

    @property
    def exact(self) -> bool:
        """Whether all rows in use have the bits that this run would compute."""
        return self._steady and self._activations.exact

    def _batch(self, ids: Ids, views: Ids) -> tuple[BatchActivations, Any]:
        inputs: Inputs | None = None
        if self._needs_no_samples(ids, views):
            labels = self._passes.labels.get(ids, views)
        else:
            inputs, labels = self._passes.read(ids, views)
        if self._passes.whole:
            return BatchActivations(0, None, inputs), labels
        kept = self._passes.inputs.get(ids, views) if inputs is None else self._halves.kept(inputs)
        self._passes.expect(ids, views, inputs)
        return BatchActivations(self._activations.cut, self._activations.get(ids, views), kept), labels

    def _needs_no_samples(self, ids: Ids, views: Ids) -> bool:
        """Tell whether a batch can be had without reading its samples."""
        return self._passes.remembers(ids, views) and self._activations.is_cached(ids, views)

    def _view_after(self, epochs: int) -> int:
        """Return the view of an epoch, so many after this one."""
        epoch = self._freezer.step // self._freezer.cadence.steps_per_epoch
        return (epoch + epochs) % self._samples.num_views

    def _begin(self) -> None:
        """Keep the rows of this cut, and compute those that nobody has, where they will be read again. Collective."""
        cut, (inputs, _) = self._freezer.cut, self._samples.load(*self._samples.some())
        if not all(self._world.allgather_object(self._can_be_left_at(cut, inputs), name="loader.cut")):
            self._run_whole()
            return
        mark, left = self._mark(cut, inputs), max(1, math.ceil(self._freezer.epochs_left))
        views = sorted({self._view_after(epochs) for epochs in range(left)})
        place, share = self._group
        ids = np.arange(place, len(self._samples), share, dtype=np.int64)
        universe = np.tile(ids, len(views)), np.repeat(np.asarray(views, np.int64), len(ids))
        present = together(self._world, lambda: self._activations.present(mark, universe), name="loader.present")
        there = all(self._world.allgather_object(present.rows == len(universe[0]), name="loader.there"))
        if left <= len(views) and not there:
            self._follow(*self._samples.some())
            return
        self._steady = is_steady(lambda given: self._passes.run(given, 0, cut), inputs)
        self._activations.begin_cut(cut, mark=mark, universe=universe, steady=self._steady)
        self._moves_followed, self._stored, self._passes.whole = len(self._freezer.cut_history), True, False
        self._fill(universe)

    def _fill(self, universe: tuple[Ids, Ids]) -> None:
        """Compute this rank's share of the rows that are missing, and take in the others'. Collective."""
        missing, rows = self._activations.missing(*universe), self._samples.batch_rows
        ids, views = universe[0][missing], universe[1][missing]
        order = np.lexsort((views, ids))
        pieces = [order[first : first + rows] for first in range(0, len(order), rows)]
        self._samples.expect([(np.resize(ids[piece], rows), np.resize(views[piece], rows)) for piece in pieces])
        for piece in pieces:
            # One batch after the other, as in training: blocks inside a forward pass may need a batch's own inputs.
            self._passes.expect(ids[piece], views[piece])
            self._activations.get(ids[piece], views[piece])
        self._activations.publish()
        self._world.barrier(name="loader.filled")
        self._activations.refresh()

    def _follow(self, ids: Ids, views: Ids) -> None:
        """Compute at the freezer's cut from now on, from older rows where they reach. Not a collective."""
        cut = self._freezer.cut
        self._moves_followed, self._stored = len(self._freezer.cut_history), False
        if cut == 0 or not self._can_be_left_at(cut, self._samples.load(ids, views)[0]):
            self._run_whole()
        else:
            self._activations.begin_cut(cut, store=False)
            self._passes.whole = False

    def _run_whole(self) -> None:
        """Let the model run as a whole at this cut."""
        self._moves_followed, self._stored, self._passes.whole = len(self._freezer.cut_history), False, True
        self._activations.begin_cut(0)

    def _can_be_left_at(self, cut: int, inputs: Any) -> bool:
        try:
            with autocast(self._dtype):
                self._halves.check(inputs, cut)
        except UsageError as error:
            logger.warning("nothing is cached at this cut: %s", error)
            return False
        return True

    def _mark(self, cut: int, inputs: Inputs) -> Fingerprint:
        return fingerprint_of(
            self._chain,
            cut,
            prefix=self._halves.digest(cut),
            data=self._data,
            inputs=inputs,
            num_views=self._samples.num_views,
            seed=self._seed,
            precision=self._dtype or torch.float32,
            batch_rows=self._samples.batch_rows,
        )
