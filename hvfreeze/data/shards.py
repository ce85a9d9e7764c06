"""Sharding: the samples of each rank and their order, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvfreeze.config.data import parse_dirichlet
from hvfreeze.errors import UsageError
from hvfreeze.rules import number_list, one_of, rule
from hvfreeze.wording import plural

Ids = NDArray[np.int64]
Bits = NDArray[np.uint64]


def evenly(ids: Ids, most: int) -> Ids:
    """Return at most `most` of the samples, evenly spaced."""
    return ids if len(ids) <= most else ids[np.linspace(0, len(ids) - 1, most).astype(np.int64)]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def _word(value: str | int | Ids) -> Bits:
    # Arrays, not scalars: numpy warns only when a scalar wraps around, and wrap-around is intended.
    if isinstance(value, str):
        return np.array([int.from_bytes(value.encode("ascii"), "little")], dtype=np.uint64)
    if isinstance(value, int):
        return np.array([value % 2**64], dtype=np.uint64)
    return np.atleast_1d(value).astype(np.uint64)


def draw(purpose: str, *words: int | Ids) -> Bits:
    """Return 64 random bits for every row of the broadcast words (splitmix64, one round a word).

    Args:
        purpose: At most eight ASCII letters that make the draws of each use independent.
        words: Integers, or int64 arrays of one common shape (B,).

    Returns:
        (B,) uint64, or (1,) when all words are integers.
    """
    state = _word(purpose)
    for word in words:
        state = (state ^ _word(word)) + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return state


def two_below(bits: Bits, limit: int) -> tuple[Ids, Ids]:
    """Return two independent (B,) int64 arrays of integers in 0..limit-1 (limit below 2**32) from one draw."""
    high = ((bits >> _HALF) * np.uint64(limit)) >> _HALF
    low = ((bits & _LOW_HALF) * np.uint64(limit)) >> _HALF
    return high.astype(np.int64), low.astype(np.int64)


def shuffled(ids: Ids, purpose: str, *words: int) -> Ids:
    """Return the distinct `ids` in random order; adding an id does not change the order of the others."""
    return ids[np.argsort(draw(purpose, *words, ids), kind="stable")]


OWNERS = "there is one shard per rank, per replica with --strategy grid, and for all ranks together with shared-trunk"


def apportion(weights: ArrayLike, total: int) -> Ids:
    """Apportion `total` seats to weights by Sainte-Lague's divisor rule; return the winner of each seat, in order.

    Each range of the result holds every index close to its share; equal weights give 0, 1, ..., n-1, 0, 1, ...
    Integer weights that sum to at least `total` never win more seats than their value.

    Returns:
        (total,) int64 indices into `weights`.
    """
    given = np.asarray(weights, dtype=np.float64)
    # Webster's rule exceeds a share by at most half the number of weights, so these candidates suffice.
    candidates = np.where(given > 0, np.ceil(total * given / max(given.sum(), 1e-300)) + len(given), 0).astype(np.int64)
    owners = np.repeat(np.arange(len(given)), candidates)
    first = np.repeat(np.cumsum(candidates) - candidates, candidates)
    keys = (np.arange(len(owners)) - first + 0.5) / given[owners]
    return owners[np.lexsort((owners, keys))][:total].astype(np.int64)


def _take_per_class(labels: ArrayLike, ids: Ids, quotas: Ids, purpose: str, seed: int) -> Ids:
    known = np.asarray(labels)[ids]
    parts = [shuffled(ids[known == label], purpose, seed)[:quota] for label, quota in enumerate(quotas)]
    return np.sort(np.concatenate(parts))


def stratified_subset(labels: ArrayLike, count: int, *, seed: int) -> Ids:
    """Return the sorted ids of `count` samples that hold every class in its share, and at least once.

    Args:
        labels: (N,) classes 0..C-1.
        count: How many samples to keep.
        seed: The data seed.

    Raises:
        UsageError: `count` is larger than N or smaller than the number of classes.
    """
    counts = np.bincount(np.asarray(labels))
    total, classes = int(counts.sum()), int((counts > 0).sum())
    rule(classes <= count, "train-samples", count, f"at least {classes}, so that no class is left out")
    rule(count <= total, "train-samples", count, f"at most {total}, the size of the training set")
    quotas = np.bincount(apportion(counts, count), minlength=len(counts))
    there = (counts > 0).astype(np.int64)
    if (quotas < there).any():
        # A class too rare to win a seat gets one, and the other seats are apportioned by the remaining samples.
        quotas = there + np.bincount(apportion(counts - there, count - classes), minlength=len(counts))
    return _take_per_class(labels, np.arange(total), quotas, "subset", seed)


def split_held_out(labels: ArrayLike, ids: Ids, *, fraction: float, seed: int) -> tuple[Ids, Ids]:
    """Return the sorted ids of training samples and of held-out samples, `fraction` of every class.

    Args:
        labels: (N,) classes 0..C-1 of the whole set; `ids` are rows of it.
        ids: The samples to divide.
        fraction: at least 0 and below 1. A small one may hold out none; every class keeps at least one sample for
            training.
        seed: The data seed.
    """
    counts = np.bincount(np.asarray(labels)[ids])
    quotas = np.bincount(apportion(counts, round(fraction * len(ids))), minlength=len(counts))
    held = _take_per_class(labels, ids, np.minimum(quotas, np.maximum(counts - 1, 0)), "held", seed)
    return np.setdiff1d(ids, held), held


def _shard_weights(shard_sizes: str | Sequence[float], size: int) -> NDArray[np.float64]:
    if isinstance(shard_sizes, str):
        if shard_sizes == "equal":
            return np.ones(size)
        shard_sizes = number_list("shard-sizes", shard_sizes, also="equal")
    shown = ",".join(f"{entry:g}" for entry in shard_sizes)
    wanted = f"{plural(size, 'number')}, one for each shard"
    rule(len(shard_sizes) == size, "shard-sizes", shown, wanted, OWNERS)
    weights = np.asarray(shard_sizes, dtype=np.float64)
    rule(bool((np.isfinite(weights) & (weights > 0)).all()), "shard-sizes", shown, "positive, finite numbers")
    return weights


def _skewed_table(counts: Ids, sizes: Ids, *, alpha: float, seed: int) -> Ids:
    """Draw the samples per class and rank, (C, R): rows sum to `counts`, columns to `sizes`, shares ~ Dirichlet."""
    generator = np.random.default_rng(seed % 2**64)
    shares = generator.dirichlet(np.full(len(sizes), alpha), size=len(counts))
    # With zero shares the sizes could not be reached.
    table = np.maximum(shares, 1e-9) * np.maximum(counts, 1)[:, None]
    for _ in range(500):
        table *= sizes / table.sum(axis=0)
        table *= (np.maximum(counts, 1) / table.sum(axis=1))[:, None]
    room = sizes.copy()
    rows = []
    for row, count in zip(table, counts, strict=True):
        given = np.minimum(np.bincount(apportion(row, int(count)), minlength=len(sizes)), room)
        given += np.bincount(apportion(room - given, int(count - given.sum())), minlength=len(sizes))
        room = room - given
        rows.append(given)
    return np.stack(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlan:
    """The shards of all ranks for the whole run; the same on every rank."""

    shards: tuple[Ids, ...]
    """Sorted sample ids per rank; with `global` all samples for every rank."""
    batches_per_epoch: int
    """Whole batches of the smallest shard; the same on all ranks."""
    batch_size: int
    """Samples per batch and rank."""
    shuffle: str
    """`shard` or `global`."""
    seed: int
    """The data seed."""

    @property
    def replicas(self) -> int:
        """Number of shards, one per replica."""
        return len(self.shards)

    @property
    def samples(self) -> int:
        """Ids of all ranks' samples, each once."""
        return len(self.shards[0]) if self.shuffle == "global" else sum(map(len, self.shards))

    @property
    def mixes(self) -> bool:
        """Whether ranks exchange samples between epochs."""
        return self.shuffle == "global" and self.replicas > 1

    def owned(self, rank: int) -> Ids:
        """Return the samples that `rank` stores. Each sample belongs to exactly one rank."""
        # With `global`, all samples are in every shard.
        return self.shards[rank][rank :: self.replicas] if self.shuffle == "global" else self.shards[rank]

    def epoch_order(self, epoch: int, rank: int) -> Ids:
        """Return (batches_per_epoch, batch_size) int64 sample ids, row s for batch s; no id repeats within an epoch.

        With `global`, batch s of all ranks together covers the same samples for every size of an equal total batch.
        """
        size = self.replicas
        if self.shuffle == "shard":
            order = shuffled(self.shards[rank], "order", self.seed, epoch, size)
            return order[: self.batches_per_epoch * self.batch_size].reshape(self.batches_per_epoch, self.batch_size)
        order = shuffled(self.shards[rank], "deal", self.seed, epoch)
        dealt = order[: self.batches_per_epoch * size * self.batch_size]
        return np.ascontiguousarray(dealt.reshape(self.batches_per_epoch, size, self.batch_size)[:, rank])

    def in_batches(self, size: int) -> ShardPlan:
        """Return the plan with the same owners and batches of `size` samples, at most the current size."""
        return replace(self, batch_size=size, batches_per_epoch=self.batches_per_epoch * self.batch_size // size)

    def without(self, left_out: NDArray[np.bool_]) -> ShardPlan:
        """Return the plan with the same owners and without some samples.

        `left_out` is a mask of sample ids, (samples,).

        Raises:
            UsageError: the smallest remaining shard fills no batch.
        """
        shards = tuple(shard[~left_out[shard]] for shard in self.shards)
        shared = self.shuffle == "global"
        counts = [len(shard) // (len(shards) if shared else 1) for shard in shards]
        return replace(self, shards=shards, batches_per_epoch=_num_batches(counts, batch_size=self.batch_size))


def _divide(labels: ArrayLike, ids: Ids, *, weights: NDArray[np.float64], alpha: float | None, seed: int) -> list[Ids]:
    known = np.asarray(labels)[ids]
    counts = np.bincount(known)
    by_class = np.concatenate([shuffled(ids[known == label], "shard", seed) for label in range(len(counts))])
    owners = apportion(weights, len(ids))
    if alpha is not None:
        sizes = np.bincount(owners, minlength=len(weights))
        table = _skewed_table(counts, sizes, alpha=alpha, seed=seed)
        owners = np.concatenate([np.repeat(np.arange(len(weights)), row) for row in table])
    return [np.sort(by_class[owners == rank]) for rank in range(len(weights))]


def plan_shards(
    labels: ArrayLike,
    ids: Ids,
    *,
    size: int,
    batch_size: int,
    seed: int,
    shuffle: str = "shard",
    partition: str = "iid",
    shard_sizes: str | Sequence[float] = "equal",
) -> ShardPlan:
    """Divide the samples `ids` among `size` ranks; each sample belongs to exactly one rank.

    Args:
        labels: (N,) classes 0..C-1 of the whole set; `ids` are rows of it.
        ids: The samples to train on.
        size: Number of ranks.
        batch_size: Samples per rank and step.
        seed: The data seed.
        shuffle: `shard`: shards fixed for the run, class-balanced unless skewed. `global`: divided again every epoch.
        partition: `iid`, or `dirichlet:A`: every class is divided among the ranks by Dirichlet(A) shares, scaled so
            that the shard sizes hold; with a small A, ranks see few classes.
        shard_sizes: `equal`, or one relative size per rank, as numbers or as text with commas.

    Raises:
        UsageError: Fewer samples than ranks, a batch larger than the smallest shard, or values that contradict.
    """
    alpha = parse_dirichlet(partition)
    weights = _shard_weights(shard_sizes, size)
    one_of("shuffle", shuffle, ("shard", "global"))
    alike = alpha is None and shard_sizes == "equal"
    remedy = "which divides all samples again every epoch, so shards cannot differ"
    rule(shuffle == "shard" or alike, "shuffle", shuffle, "shard with --partition dirichlet or --shard-sizes", remedy)
    rule(batch_size >= 1, "batch-size", batch_size, "at least 1")
    if len(ids) < size:
        raise UsageError(f"{plural(len(ids), 'training sample')} for {size} shards; use more samples or fewer ranks")
    if shuffle == "global":
        shards, counts = [np.sort(ids)] * size, [len(ids) // size] * size
    else:
        shards = _divide(labels, ids, weights=weights, alpha=alpha, seed=seed)
        counts = [len(shard) for shard in shards]
    batches = _num_batches(counts, batch_size=batch_size)
    return ShardPlan(shards=tuple(shards), batches_per_epoch=batches, batch_size=batch_size, shuffle=shuffle, seed=seed)


def _num_batches(counts: list[int], *, batch_size: int) -> int:
    smallest = min(counts)
    holds = f"shard {counts.index(smallest)} of {len(counts)} has {smallest} of {sum(counts)} samples"
    way_out = f"use --batch-size {smallest} or less" if smallest else "use more samples or less uneven shards"
    rule(batch_size <= smallest, "batch-size", batch_size, "no larger than the smallest shard", f"{holds}, {way_out}")
    return smallest // batch_size
