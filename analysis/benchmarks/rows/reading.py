"""Reading shuffled batches from a cache file against numpy.memmap on the same bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import BATCH_ROWS, Setting
from analysis.benchmarks.ranks import Ranks
from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.data.shards import Ids

SHAPES = {"2k": (512, 1, 1), "64k": (256, 8, 8)}
ROWS = {"2k": 24_576, "64k": 2048}
MIN_PAIRS = 30


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting(world=ranks.world, scratch=scratch)
    for size, shape in SHAPES.items():
        name = f"shuffled_read_{size}"
        if name in wanted:
            folder, num_rows = setting.folder(name), ROWS[size] // (8 if pace.quick else 1)
            activations = filled(folder, shape=shape, num_rows=num_rows)
            cache, memmap = FromCache(activations, num_rows), FromMemmap(folder, num_rows)
            duel = Duel(
                name=name,
                ours="cache",
                reference="memmap",
                bound=1.25,
                what=f"all rows of a cache file in shuffled batches of {BATCH_ROWS} rows of {size.upper()}B, found by "
                "sample id, against numpy.memmap at known row numbers",
            )
            sides = [
                Side("cache", cache.read, prepare=cache.shuffle),
                Side("memmap", memmap.read, prepare=memmap.shuffle),
            ]
            yield from hold(ranks, sides, [duel], pace=pace.at_least(MIN_PAIRS))
            activations.close()


def filled(directory: Path, *, shape: tuple[int, ...], num_rows: int) -> PrefixActivations:
    """Return a cache that holds a file of `num_rows` random rows of this shape."""
    values = torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(0))

    def load(ids: Ids, views: Ids) -> Tensor:
        return values[torch.from_numpy(ids)].contiguous(memory_format=torch.channels_last)

    activations = PrefixActivations(
        run_blocks=lambda x, start, stop: x,
        load_images=load,
        batch_rows=BATCH_ROWS,
        directory=directory,
        shard="0of1",
    )
    ids = np.arange(num_rows, dtype=np.int64)
    activations.begin_cut(1, fingerprint=Fingerprint.of({"cut": 1}), owned_keys=(ids, np.zeros_like(ids)))
    activations.sweep(everything=True)
    activations.publish()
    return activations


class Shuffled:
    """Orders of the rows, the same ones for each side."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._generator = np.random.default_rng(1)

    def next_epoch(self) -> list[Ids]:
        """Return the sample ids of all batches in another order."""
        return np.split(self._generator.permutation(self._num_rows), self._num_rows // BATCH_ROWS)


class FromCache:
    """Reads epochs as training does."""

    def __init__(self, activations: PrefixActivations, num_rows: int) -> None:
        self.activations, self.orders = activations, Shuffled(num_rows)
        self.views = np.zeros(BATCH_ROWS, dtype=np.int64)

    def shuffle(self) -> None:
        """Begin an epoch."""
        self.batches = self.orders.next_epoch()

    def read(self) -> float:
        """Read the epoch; return a number from it."""
        self.activations.announce([(ids, self.views) for ids in self.batches])
        for ids in self.batches:
            batch = self.activations.get(ids, self.views)
        return float(batch[0, 0, 0, 0])


class FromMemmap:
    """Reads epochs at places that were looked up before."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        (path,) = directory.glob("*.h5")
        with h5py.File(path, "r") as opened:
            dataset = opened["activations"]
            self.row_of = np.argsort(opened["sample_ids"][:])
            shape = (num_rows, int(np.prod(dataset.shape[1:])))
            self.mapped = np.memmap(path, "<f4", "r", dataset.id.get_offset(), shape)
        self.orders = Shuffled(num_rows)

    def shuffle(self) -> None:
        """Begin an epoch."""
        self.rows = [self.row_of[ids] for ids in self.orders.next_epoch()]

    def read(self) -> float:
        """Read the epoch; return a number from it."""
        for rows in self.rows:
            batch = torch.from_numpy(self.mapped[rows])
        return float(batch[0, 0])
