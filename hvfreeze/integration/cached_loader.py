"""`hvfreeze.CachedLoader`: wraps a script's loader and yields the frozen prefix's output, from the cache if possible.

    loader = hvfreeze.CachedLoader(loader, optimizer, directory="cache")
    for activations, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(loader.suffix(activations), labels)
        ...

While no block is frozen, the activations are the inputs, and the suffix is the model. Once a cut has not changed for an
epoch, ranks compute the rows of all samples once, each a share, and later epochs read them. They have the bits that the
model would compute.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from hvfreeze.cache.activations import PrefixActivations, permuted_batch_is_exact, rows_are_independent
from hvfreeze.cache.file.disk import prepare_directory
from hvfreeze.cache.fingerprint import JSON, Fingerprint, activation_fingerprint
from hvfreeze.comm.agreement import raise_on_all_ranks, synchronize_in_rounds
from hvfreeze.comm.world import World
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.files import cache_folder
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.integration.batch_activations import BatchActivations
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.integration.samples import (
    Ids,
    Remembered,
    Samples,
    Split,
    check_unchanged,
    data_identity,
    inputs_and_labels,
)
from hvfreeze.integration.script_world import log
from hvfreeze.integration.split_forward import halves_of
from hvfreeze.integration.split_model import Halves, autocast
from hvfreeze.model.traced import Inputs, call
from hvfreeze.prefix.operations import operations_digest


class Passes:
    """Reads samples for training and for the frozen blocks, and runs the frozen blocks.

    Attributes:
        whole: whether the model runs as a whole, without a cut.
        labels: labels of the samples read at a cut so far, if their rows may be stored.
        inputs: their inputs that the part behind the current cut uses.
    """

    def __init__(self, samples: Samples, halves: Halves, *, dtype: torch.dtype | None, store: bool) -> None:
        self.whole, self._store = True, store
        self.labels, self.inputs = (Remembered(len(samples), samples.num_views) for _ in range(2))
        self._samples, self._halves, self._dtype = samples, halves, dtype
        self._given: Inputs | None = None
        self._pairs: tuple[Ids, Ids] | None = None

    def read(self, ids: Ids, views: Ids) -> tuple[Inputs, Any]:
        """Return the inputs and labels of these samples, and store what will be needed behind a cut."""
        inputs, labels = self._samples.load(ids, views)
        # Checked from the first batch on, but not kept while all samples are read anyway: they may be large.
        self.labels.check(ids, labels)
        if self._store and not self.whole and not self._halves.needs_inputs:
            self.labels.put(ids, views, labels)
            self.inputs.put(ids, views, self._halves.kept(inputs))
        return inputs, labels

    def remembers(self, ids: Ids, views: Ids) -> bool:
        """Return True if only the prefix's output of these samples is missing."""
        if self.whole or self._halves.needs_inputs or self.labels.get(ids, views) is None:
            return False
        return self.inputs.get(ids, views) is not None

    def expect(self, ids: Ids, views: Ids, inputs: Inputs | None = None) -> None:
        """Make this the current batch, with its inputs if they have been read."""
        self._given, self._pairs = inputs, (ids, views)

    def load(self, ids: Ids, views: Ids) -> Any:
        """Return the inputs of a padded batch; those of the current batch if it is the same."""
        pairs = self._pairs
        these = pairs is not None and np.array_equal(pairs[0], ids) and np.array_equal(pairs[1], views)
        if self._given is None or not these:
            self._given, _ = self.read(ids, views)
        self._pairs = (ids, views)
        return self._given

    def run(self, x: Any, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, a batch's inputs if start is 0."""
        inputs: Any = x if start == 0 else None
        if start > 0 and self._halves.runs_inside and self._pairs is not None:
            ids, views = self._pairs
            inputs = self.load(np.resize(ids, len(x)), np.resize(views, len(x)))
        with torch.no_grad(), autocast(self._dtype):
            return self._halves.before(x, start, stop, inputs)


def ranks_that_share(directory: Path, world: World, *, data: JSON) -> tuple[int, int]:
    """Return this rank's index among the ranks that share its rows in `directory`, and their number.

    They have the same `data`, and see the same files: either all ranks do, or those of each host are assumed to.
    Collective: every rank of `world` must call this.

    Raises:
        RefusedError: rank 0 cannot write there.
    """
    name = world.broadcast_object(f".seen-{secrets.token_hex(8)}", name="loader.token")
    path = directory / name

    def leave_token() -> None:
        try:
            if world.rank == 0:
                path.touch(mode=0o600)
        except OSError as error:
            raise RefusedError(f"cache directory {directory} cannot be used ({error.strerror}); {WAY_OUT}") from error

    raise_on_all_ranks(world, leave_token, name="loader.token")
    host = socket.gethostname()
    found = world.allgather_object((name in os.listdir(directory), host, data), name="loader.seen")
    if world.rank == 0:
        path.unlink(missing_ok=True)
    everywhere = all(seen for seen, *_ in found)
    sharing = [
        rank for rank, (_, other, theirs) in enumerate(found) if theirs == data and (everywhere or other == host)
    ]
    return sharing.index(world.rank), len(sharing)


WAY_OUT = "choose another with directory="
BATCHWISE = (
    "blocks up to {} normalise with batch statistics (BatchNorm without running statistics), so a sample's output "
    "depends on its batch; freeze fewer blocks, or use layers with running statistics"
)
_told: set[Path] = set()
"""Default directories that have been logged."""


def _agreed_directory(world: World, given: str | Path | None, *, told: bool) -> Path:
    """Return the script's directory, or rank 0's default, which is logged once. Collective."""
    named = world.allgather_object(given is not None, name="loader.named")
    if given is not None and all(named):
        return Path(given)
    if any(named):
        raise UsageError("directory= must be given on all ranks, or on none").on_all_ranks()
    found = raise_on_all_ranks(
        world,
        lambda: cache_folder("activations", way_out="pass directory= to CachedLoader") if world.rank == 0 else Path(),
        name="loader.default",
    )
    common = world.broadcast_object(found, name="loader.directory")
    if told and common not in _told:
        _told.add(common)
        log(
            world,
            "activations are cached in %s until 'hvfreeze cache rm' removes them; choose another place with directory=",
            common,
        )
    return common


class CachedLoader:
    """Yields (`BatchActivations`, labels) for each batch of a loader, and runs the blocks behind the cut with `suffix`.

    All ranks must start their epochs together, because they compute rows for each other. Ranks with different data sets
    compute their own rows.

    Attributes:
        loader: the script's own loader, whose sampler the script sets as before.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        frozen_by: DistributedOptimizer | Freezer,
        *,
        directory: str | Path | None = None,
        views: int = 1,
        split: Split = inputs_and_labels,
        data: str | None = None,
        seed: int = 0,
        autocast_dtype: torch.dtype | None = None,
        store: bool = True,
    ) -> None:
        """Read a few samples to identify the data set; nothing is cached yet.

        Collective: every rank must call this.

        Args:
            loader: a loader of a map-style data set, in batches of one size. The data set must return the same sample
                for the same number, unless `views` is above 1.
            frozen_by: the optimizer or freezer that changes the cut.
            directory: directory of the cache files, which stay for later runs; shared by the ranks of a host. None is
                rank 0's user cache directory, which is logged.
            views: with more than one, the random draws of the data set give this many fixed views of each sample, one
                per epoch in turn.
            split: divides a batch into the model's inputs and the labels; by default the last entry is the labels.
            data: name of the data set for fingerprints, in place of its class, settings and files.
            seed: seed of the views.
            autocast_dtype: `dtype` of the script's `torch.autocast("cpu", dtype=...)`; None without autocast.
            store: whether to store rows. If not, all rows are computed; nothing else differs.

        Raises:
            UsageError: the loader's samples cannot be numbered, or differ each time; on all ranks.
            RefusedError: the directory cannot be used; on all ranks.
        """
        self.loader = loader
        self._freezer = frozen_by.freezer if isinstance(frozen_by, DistributedOptimizer) else frozen_by
        self._world, self._dtype, self._store = self._freezer.world, autocast_dtype, store
        self._directory = _agreed_directory(self._world, directory, told=store)

        def look() -> None:
            self._samples = Samples(loader, split, num_views=views, seed=seed)
            self._data = data_identity(self._samples, name=data)
            if store:
                prepare_directory(self._directory, way_out=WAY_OUT)

        raise_on_all_ranks(self._world, look, name="loader")
        self._group = ranks_that_share(self._directory, self._world, data=self._data) if store else (0, 1)
        self._seed, self._batch_invariant = seed, True
        steps = max(1, -(-len(loader) // self._freezer.reducer.backward_passes_per_step))
        self._steps_per_epoch = self._world.broadcast_object(steps, name="loader.steps")
        if isinstance(frozen_by, DistributedOptimizer):
            frozen_by.follow_epochs(self._steps_per_epoch)
        # Whether the cut has not moved since the last epoch began, and whether rows are computed at it.
        self._rested = self._follows = False
        self._stored = False
        self._told = set[str]()
        self._take_chain()
        self._freezer.prefix.on_move(self._note_move)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[BatchActivations, Any]]:
        """Yield the batches of an epoch. Collective: every rank must start its epochs together with the others."""
        batches = [(ids, np.full_like(ids, self._view_after(0))) for ids in self._samples.epoch()]
        settled = self._freezer.cut > 0 and (self._rested or math.isinf(self._freezer.epochs_until_move()))
        self._rested = True
        if self._store and settled:
            raise_on_all_ranks(
                self._world,
                lambda: check_unchanged(self._samples, self._data, seed=self._freezer.step),
                name="loader.unchanged",
            )
        if self._store and settled and not (self._stored and self._follows):
            self._begin()
        elif batches and not self._follows:
            self._follow(*batches[0])
        self._samples.expect([pairs for pairs in batches if not self._needs_no_samples(*pairs)])
        self._activations.announce(batches if self._stored else [])
        for ids, views in batches:
            if not self._follows:
                self._follow(ids, views)
            yield self._batch(ids, views)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def suffix(self, activations: BatchActivations) -> Any:
        """Return the model's output for a batch; gradients reach the blocks behind its cut."""
        if not isinstance(activations, BatchActivations):
            kind = type(activations).__name__
            raise UsageError(f"suffix() takes rows from a batch of a CachedLoader, not a {kind}")
        rows, inputs = activations.for_suffix()
        if rows is None:
            return call(self._chain.model, inputs)
        return self._halves.after(rows, inputs, activations.cut)

    def close(self) -> None:
        """Close all files; stored rows stay for later runs."""
        self._activations.close()

    def __getattr__(self, name: str) -> Any:
        """Return the loader's own attribute: `dataset`, `batch_size`, `sampler` for `set_epoch`, and others."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def rows_read(self) -> int:
        """Rows read from the cache so far instead of being computed."""
        return self._activations.counters.rows_read

    @property
    def exact(self) -> bool:
        """Whether all rows in use have the bits that this run would compute."""
        return self._batch_invariant and self._activations.exact

    def _batch(self, ids: Ids, views: Ids) -> tuple[BatchActivations, Any]:
        inputs: Inputs | None = None
        if self._freezer.probing:
            # A probe: the backward pass must reach the frozen blocks.
            inputs, labels = self._passes.read(ids, views)
            return BatchActivations.of(0, None, inputs, count=len(ids)), labels
        if self._needs_no_samples(ids, views):
            labels = self._passes.labels.get(ids, views)
        else:
            inputs, labels = self._passes.read(ids, views)
        if self._passes.whole:
            return BatchActivations.of(0, None, inputs, count=len(ids)), labels
        kept = self._passes.inputs.get(ids, views) if inputs is None else self._halves.kept(inputs)
        self._passes.expect(ids, views, inputs)
        rows = self._activations.get(ids, views)
        return BatchActivations.of(self._activations.cut, rows, kept, count=len(ids)), labels

    def _needs_no_samples(self, ids: Ids, views: Ids) -> bool:
        """Return True if a batch is available without reading its samples."""
        return self._passes.remembers(ids, views) and self._activations.is_cached(ids, views)

    def _view_after(self, epochs: int) -> int:
        """Return the view of the epoch that comes `epochs` epochs after this one."""
        steps = self._freezer.cadence.steps_per_epoch or self._steps_per_epoch
        return (self._freezer.step // steps + epochs) % self._samples.num_views

    def _note_move(self) -> None:
        self._rested = self._follows = False
        if self._chain is not self._freezer.chain:
            self._activations.close()
            self._take_chain()

    def _take_chain(self) -> None:
        """Prepare for the freezer's blocks, which may be found only in the first step."""
        self._chain = self._freezer.chain
        self._halves = halves_of(self._chain)
        self._passes = Passes(self._samples, self._halves, dtype=self._dtype, store=self._store)
        self._activations = PrefixActivations(
            run_blocks=self._passes.run,
            load_images=self._passes.load,
            batch_rows=self._samples.batch_rows,
            directory=self._directory,
            shard=f"{self._world.rank}of{self._world.size}",
            shared=True,
            prefix_digest=self._halves.digest,
        )

    def _begin(self) -> None:
        """Store the rows of this cut, and compute missing ones if they will be read again. Collective."""
        cut, (inputs, _) = self._freezer.cut, self._samples.load(*self._samples.some())
        refusals = self._world.allgather_object(self._refusal_at(cut, inputs), name="loader.cut")
        if any(refusals):
            self._run_whole(next(filter(None, refusals)))
            return
        fingerprint, ahead = self._fingerprint(cut, inputs), self._freezer.epochs_left
        left = sys.maxsize if math.isinf(ahead) else max(1, math.ceil(ahead))
        views = sorted({self._view_after(epochs) for epochs in range(min(left, self._samples.num_views))})
        place, share = self._group
        ids = np.arange(place, len(self._samples), share, dtype=np.int64)
        owned_keys = np.tile(ids, len(views)), np.repeat(np.asarray(views, np.int64), len(ids))
        present = raise_on_all_ranks(
            self._world, lambda: self._activations.store_of(fingerprint, owned_keys), name="loader.present"
        )
        there = all(self._world.allgather_object(present.num_present == len(owned_keys[0]), name="loader.there"))
        if left <= len(views) and not there:
            self._follow(*self._samples.some())
            return
        self._batch_invariant = permuted_batch_is_exact(lambda given: self._passes.run(given, 0, cut), inputs)
        self._activations.begin_cut(
            cut, fingerprint=fingerprint, owned_keys=owned_keys, batch_invariant=self._batch_invariant
        )
        self._follows, self._stored, self._passes.whole = True, True, False
        self._fill(owned_keys)

    def _fill(self, owned_keys: tuple[Ids, Ids]) -> None:
        """Compute this rank's share of the missing rows, and read the others'. Collective."""
        missing, rows = self._activations.missing(*owned_keys), self._samples.batch_rows
        ids, views = owned_keys[0][missing], owned_keys[1][missing]
        order = np.lexsort((views, ids))
        pieces = [order[first : first + rows] for first in range(0, len(order), rows)]
        self._samples.expect([(np.resize(ids[piece], rows), np.resize(views[piece], rows)) for piece in pieces])

        def filling() -> Iterator[None]:
            for piece in pieces:
                # One batch at a time, as in training: blocks inside a forward pass may need the inputs of their batch.
                self._passes.expect(ids[piece], views[piece])
                self._activations.get(ids[piece], views[piece])
                yield

        synchronize_in_rounds(self._world, filling(), name="loader")
        self._activations.publish()
        self._world.barrier(name="loader.filled")
        self._activations.refresh()

    def _follow(self, ids: Ids, views: Ids) -> None:
        """Compute at the freezer's cut from now on, from older rows if possible. Not a collective."""
        cut = self._freezer.cut
        self._follows, self._stored = True, False
        refusal = self._refusal_at(cut, self._samples.load(ids, views)[0]) if cut > 0 else ""
        if cut == 0 or refusal:
            self._run_whole(refusal)
        else:
            self._activations.begin_cut(cut, store=False)
            self._passes.whole = False

    def _run_whole(self, refusal: str) -> None:
        """Run the model as a whole at this cut; log the reason once, if there is one."""
        if refusal and refusal not in self._told:
            log(self._world, "no activations are cached at this cut: %s", refusal, level=logging.WARNING)
            self._told.add(refusal)
        self._follows, self._stored, self._passes.whole = True, False, True
        self._activations.begin_cut(0)

    def _refusal_at(self, cut: int, inputs: Any) -> str:
        """Return why the forward pass cannot be left at a cut, "" if it can."""
        try:
            with autocast(self._dtype):
                self._halves.check(inputs, cut)
        except UsageError as error:
            return str(error)

        def run(given: Inputs) -> Tensor:
            return self._passes.run(given, 0, cut)

        alone = rows_are_independent(run, inputs, run(inputs))
        return "" if alone else BATCHWISE.format(self._chain.blocks[cut - 1].name)

    def _fingerprint(self, cut: int, inputs: Inputs) -> Fingerprint:
        """Return the fingerprint of rows at `cut`; of the inputs, it includes types, shapes and strides."""
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        num_views = self._samples.num_views
        return activation_fingerprint(
            prefix=self._halves.digest(cut),
            operations=operations_digest(self._chain, cut),
            cut=cut,
            data=self._data,
            # The mode that containers compute in.
            split="train" if self._chain.model.training else "eval",
            transform=[[str(leaf.dtype), list(leaf.shape[1:]), list(leaf.stride())] for leaf in leaves],
            data_seed=self._seed,
            augment="none" if num_views == 1 else f"views:{num_views}",
            dtype="native",
            input_shape=list(leaves[0].shape[1:]),
            memory_format=str(list(leaves[0].stride())),
            precision=str(self._dtype or torch.float32).removeprefix("torch."),
            batch_rows=self._samples.batch_rows,
            threads=torch.get_num_threads(),
        )
