"""The samples behind a script's DataLoader: the identity of its data, and its batches by sample number."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvfreeze.cache.fingerprint import JSON, bytes_of, canonical, digest_tensors
from hvfreeze.data.shards import evenly
from hvfreeze.errors import UsageError
from hvfreeze.model.traced import Inputs
from hvfreeze.prefix.operations import Description

Ids = NDArray[np.int64]
Split = Callable[[Any], tuple[Inputs, Any]]
"""(a batch of the loader) -> the model's inputs, and the rest, e.g. labels."""


def inputs_and_labels(batch: Any) -> tuple[Inputs, Any]:
    """Return the inputs and the labels of a batch: all entries except the last, and the last.

    Raises:
        UsageError: the batch is not a sequence of at least two entries.
    """
    if not isinstance(batch, Sequence) or len(batch) < 2:
        raise UsageError(
            f"a batch is a {type(batch).__name__}; pass split=, a function that returns the model's inputs and the "
            "labels of a batch"
        )
    return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]


class Samples:
    """The samples of a loader, by sample number and view.

    Args:
        loader: over a map-style data set, with batches of one size.
        split: divides a batch into inputs and labels.
        num_views: views of each sample; random draws in the data set depend only on the sample and its view.
        seed: seed of these draws.

    Raises:
        UsageError: the loader has no batches of numbered samples.
    """

    def __init__(self, loader: DataLoader[Any], split: Split, *, num_views: int, seed: int) -> None:
        rows = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or not isinstance(rows, int):
            raise UsageError(
                "CachedLoader needs a map-style data set, and batch_size= or a batch_sampler with a fixed batch size"
            )
        try:
            len(loader)
        except TypeError as error:
            raise UsageError(f"CachedLoader needs a sampler with a length, one epoch long ({error})") from error
        self.loader, self.batch_rows, self.num_views = loader, rows, num_views
        self._split, self._numbered = split, _Numbered(loader.dataset, seed if num_views > 1 else None)
        self._expected: list[list[tuple[int, int]]] = []
        self._reading: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._numbered)

    def epoch(self) -> list[Ids]:
        """Return the samples of each batch of an epoch, with the random draws that the loader itself would make.

        Raises:
            UsageError: the sampler yields more than its length, perhaps without end.
        """
        torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        assert self.loader.batch_sampler is not None
        batches = [
            np.asarray(batch, dtype=np.int64) for batch in islice(self.loader.batch_sampler, len(self.loader) + 1)
        ]
        if len(batches) > len(self.loader):
            raise UsageError(
                f"the sampler yields more batches than its length of {len(self.loader)}; CachedLoader needs a "
                "sampler that ends with the epoch"
            )
        return batches

    def some(self) -> tuple[Ids, Ids]:
        """Return one batch of samples, those with the lowest numbers, in their first view."""
        ids = np.resize(np.arange(len(self), dtype=np.int64), self.batch_rows)
        return ids, np.zeros_like(ids)

    def expect(self, batches: Sequence[tuple[Ids, Ids]]) -> None:
        """Read these (samples, views) next, in this order, with as many workers as the loader has."""
        self._expected = [[*zip(ids.tolist(), views.tolist())] for ids, views in batches]
        loader, self._reading = self.loader, None
        if self._expected and loader.num_workers:
            self._reading = iter(
                DataLoader(
                    self._numbered,
                    batch_sampler=list(self._expected),
                    num_workers=loader.num_workers,
                    collate_fn=loader.collate_fn,
                    timeout=loader.timeout,
                    worker_init_fn=loader.worker_init_fn,
                    multiprocessing_context=loader.multiprocessing_context,
                    generator=torch.Generator(),
                )
            )

    def load(self, ids: Ids, views: Ids) -> tuple[Inputs, Any]:
        """Return the inputs and the rest of these samples in these views; global random state is restored."""
        wanted = [*zip(ids.tolist(), views.tolist())]
        with own_draws():
            if self._reading is not None and self._expected and self._expected[0] == wanted:
                self._expected.pop(0)
                batch = next(self._reading)
                inputs, labels = self._split(batch)
                return _plain(inputs), _plain(labels)
            return self.assemble([self._numbered[pair] for pair in wanted])

    def read(self, ids: Ids, view: int, *, seed: int) -> list[Any]:
        """Return these samples from the data set; their random draws depend on `seed`."""
        with own_draws(seed):
            return [self._numbered[sample, view] for sample in ids.tolist()]

    def assemble(self, samples: list[Any]) -> tuple[Inputs, Any]:
        """Return the inputs and the rest of a batch of these samples."""
        inputs, labels = self._split(self.loader.collate_fn(samples))
        return _plain(inputs), _plain(labels)


def _plain(value: Any) -> Any:
    """Return the same with every mapping as a dict, because PyTorch takes others, such as a tokenizer's, for leaves."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


class _Numbered(Dataset[Any]):
    """A data set indexed by (sample, view)."""

    def __init__(self, samples: Any, seed: int | None) -> None:
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, pair: tuple[int, int]) -> Any:
        if self._seed is None:
            return self._samples[pair[0]]
        with own_draws(self._seed, *pair):
            return self._samples[pair[0]]


@contextmanager
def own_draws(*seed: int) -> Iterator[None]:
    """Restore the random states of torch, numpy and Python after the context; inside, `seed` sets them if given."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            if seed:
                words = np.random.SeedSequence(seed).generate_state(3)
                torch.default_generator.manual_seed(int(words[0]))
                random.seed(int(words[1]))
                np.random.seed(int(words[2]))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


class Remembered:
    """Small tensors of each sample and view, kept in memory: labels, tokens."""

    def __init__(self, num_samples: int, num_views: int) -> None:
        self._views, self._known = num_views, torch.zeros(num_samples * num_views, dtype=torch.bool)
        self._columns: list[Tensor] = []
        self._spec: TreeSpec | None = None
        self._shapes: list[torch.Size] = []

    def check(self, ids: Ids, values: Any) -> list[Tensor]:
        """Return the tensors of these samples: (B, ...) in any nesting.

        Raises:
            UsageError: some are not tensors, or their shapes differ from those of other batches.
        """
        leaves, spec = tree_flatten(values)
        if not all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(ids) for leaf in leaves):
            raise UsageError("labels and inputs must be tensors with one row per sample; pass split= to select them")
        if self._spec is None:
            self._spec, self._shapes = spec, [leaf.shape[1:] for leaf in leaves]
        if spec != self._spec:
            raise UsageError(
                f"labels or inputs have the structure {spec}, but {self._spec} in the previous batch; "
                "pass split= to return the same structure for every batch"
            )
        if any(shape != leaf.shape[1:] for shape, leaf in zip(self._shapes, leaves, strict=True)):
            raise UsageError("labels or inputs have another shape than in the previous batch; pad them to one length")
        return leaves

    def put(self, ids: Ids, views: Ids, values: Any) -> None:
        """Store the tensors of these rows; raises like `check`."""
        leaves, rows = self.check(ids, values), self._rows(ids, views)
        if not self._columns:
            self._columns = [torch.empty(len(self._known), *leaf.shape[1:], dtype=leaf.dtype) for leaf in leaves]
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[rows] = leaf
        self._known[rows] = True

    def get(self, ids: Ids, views: Ids) -> Any:
        """Return what `put` stored, None if a row is unknown."""
        rows = self._rows(ids, views)
        if self._spec is None or not bool(self._known[rows].all()):
            return None
        return tree_unflatten([column[rows] for column in self._columns], self._spec)

    def _rows(self, ids: Ids, views: Ids) -> Tensor:
        return torch.from_numpy(ids * self._views + views)


SAMPLES_SHOWN = 16
LOOKS = 64
"""Batches, in other orders and with other draws, that test whether a row depends only on its sample. A change of every
tenth batch is missed once in 850 times, one of every second batch never."""
DRAWS = 3
"""Reads of each of 32 samples. A change of every tenth sample is missed once in 20,000 times."""

BATCHWISE = (
    "a row depends on its batch: collate_fn (or split=) combines samples or draws random numbers, so activations "
    "cannot be cached by sample. Draw and pad in the data set, and mix the rows of CachedLoader, as in rows, "
    "labels = v2.MixUp(num_classes=N)(rows, labels)"
)
DRAWN = "the data set returns a different sample when the same one is read twice, so activations cannot be cached; "
WITHOUT_VIEWS = "pass views=K to draw K fixed views of each sample"
WITH_VIEWS = "views=K fixes draws from torch, numpy and random, but not from the data set's own generators"


def data_identity(samples: Samples, *, name: str | None) -> dict[str, JSON]:
    """Return the identity of a data set, which must match before its rows may be used.

    Args:
        samples: the loader's samples.
        name: the user's name of the data set; None uses its class, code and settings, and the sizes and times of the
            files that these name.

    Raises:
        UsageError: a row does not depend on its sample alone.
    """
    described: JSON = name if name is not None else description_of(samples.loader.dataset)
    check_rows(samples)
    return {"size": len(samples), "described": described, "samples": _look(samples, seed=1)}


def check_rows(samples: Samples) -> None:
    """Check that rows depend on their samples alone: not on the rest of the batch, nor on random draws.

    Raises:
        UsageError: some do.
    """
    size = min(samples.batch_rows, SAMPLES_SHOWN)
    pool = evenly(np.arange(len(samples)), 2 * size)
    rng = np.random.default_rng(0)
    for view in range(min(samples.num_views, 2)):
        read = [samples.read(pool, view, seed=seed) for seed in range(DRAWS)]
        known: dict[int, list[Tensor]] = {}
        for look in range(LOOKS):
            order = rng.permutation(len(pool))[:size]
            with own_draws(look):
                batch = samples.assemble([_copy_of(read[0][place]) for place in order])
            for row, place in enumerate(order.tolist()):
                local = _row_of(batch, row, size=len(order))
                if not _same(known.setdefault(place, local), local):
                    raise UsageError(BATCHWISE)
        for again in read[1:]:
            for first in range(0, len(pool), size):
                pair = [samples.assemble(of[first : first + size]) for of in (read[0], again)]
                if _digest(pair[0]) != _digest(pair[1]):
                    raise UsageError(DRAWN + (WITH_VIEWS if samples.num_views > 1 else WITHOUT_VIEWS))


def check_unchanged(samples: Samples, identity: Mapping[str, JSON], *, seed: int) -> None:
    """Compare a few samples of the data set with its `identity` from `data_identity`, with draws by `seed`.

    Raises:
        UsageError: they have changed, e.g. because a script passes the epoch to its data set.
    """
    if len(samples) != identity["size"] or _look(samples, seed=seed) != identity["samples"]:
        raise UsageError(
            "the data set has changed since its CachedLoader was created, so cached activations would be wrong; "
            "pass store=False, or create another CachedLoader after each change"
        )


def description_of(dataset: Any) -> str:
    """Return a digest of a data set's class, code and settings, and of size and time of each file they name."""
    return hashlib.sha256(canonical(_DataDescription({}).of(dataset)).encode()).hexdigest()


class _DataDescription(Description):
    """Describes a data set by all of its attributes; tensors by their contents, handles by their class."""

    def of(self, value: Any) -> JSON:
        """Return the description of `value`; for a file name, that of the file too."""
        if not isinstance(value, (str, os.PathLike)):
            return super().of(value)
        name = os.fspath(value)
        shown = name if isinstance(name, str) else name.hex()
        try:
            status = os.stat(name)
        except (OSError, ValueError):
            return shown
        # Not of folders: the script may write files there.
        return ["file", shown, status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else shown

    def _described(self, value: Any) -> JSON:
        if isinstance(value, Dataset) and not isinstance(value, torch.nn.Module):
            held = {name: inner for name, inner in sorted(vars(value).items()) if not name.startswith("__")}
            return ["data", self.of(type(value)), self.of(held)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = {part.name: getattr(value, part.name, None) for part in dataclasses.fields(value)}
            return ["data", self.of(type(value)), self.of(held)]
        return super()._described(value)


def _look(samples: Samples, *, seed: int) -> str:
    """Return a digest of a few samples spread over the data set; their random draws depend on `seed`."""
    ids = evenly(np.arange(len(samples)), min(samples.batch_rows, SAMPLES_SHOWN))
    with own_draws(seed):
        return _digest(samples.load(ids, np.zeros_like(ids)))


def _digest(batch: Any) -> str:
    leaves = [leaf for part in batch for leaf in tree_leaves(part)]
    return digest_tensors([(str(i), leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])


def _copy_of(sample: Any) -> Any:
    """Return a copy, because a collate_fn may change its input; the object itself if it cannot be copied.

    `copy.deepcopy` copies a tensor with its whole storage, which for a row of a `TensorDataset` is the whole data set.
    """
    try:
        rows = {id(leaf): leaf.clone() for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)}
        return copy.deepcopy(sample, rows)
    except Exception:  # the user's objects may fail in any way
        return sample


def _row_of(batch: Any, row: int, *, size: int) -> list[Tensor]:
    """Return one row of each tensor of a batch, as bytes."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [bytes_of(leaf[row].contiguous()) for leaf in leaves if leaf.dim() and len(leaf) == size]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))
