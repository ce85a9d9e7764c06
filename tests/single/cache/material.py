"""Small stores, files and a frozen network for the tests of the activation cache."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.file.format import Keys, pack_keys
from hvfreeze.cache.file.reader import MappedRows
from hvfreeze.cache.fingerprint import Fingerprint, activation_fingerprint, bytes_of, digest_tensors
from hvfreeze.cache.store import Store

BATCH_ROWS = 16

FIELDS: dict[str, Any] = {
    "prefix": "p" * 64,
    "operations": "o" * 64,
    "cut": 2,
    "data": {"name": "digits", "pixels": "d" * 64},
    "split": "train",
    "transform": {"mean": [0.5], "std": [0.25]},
    "data_seed": 0,
    "augment": "none",
    "dtype": "native",
    "input_shape": (3, 8, 8),
    "memory_format": "channels_last",
    "precision": "float32",
    "batch_rows": BATCH_ROWS,
    "threads": 1,
}


def make_fingerprint(**changes: Any) -> Fingerprint:
    return activation_fingerprint(**(FIELDS | changes))


def make_keys(num_samples: int, *, views: int = 1, first: int = 0) -> Keys:
    ids, view_numbers = np.meshgrid(np.arange(first, first + num_samples), np.arange(views))
    return np.sort(pack_keys(ids.ravel(), view_numbers.ravel()))


def make_rows(num_rows: int, *, shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def open_store(directory: Path, keys: Keys, **changes: Any) -> Store:
    options: dict[str, Any] = {"fingerprint": make_fingerprint(), "shard": "0of1", "batch_rows": BATCH_ROWS}
    return Store(directory, owned_keys=keys, **(options | changes))


def fill(store: Store, keys: Keys, rows: Tensor) -> int:
    """Append `rows` in whole batches, the last one padded; return the number of new rows."""
    added = 0
    for first in range(0, len(keys), BATCH_ROWS):
        batch = rows[first : first + BATCH_ROWS]
        padded = torch.cat([batch, torch.full((BATCH_ROWS - len(batch), *rows.shape[1:]), 9.0, dtype=rows.dtype)])
        strided = torch.empty_strided(padded.shape, rows[:BATCH_ROWS].stride(), dtype=rows.dtype).copy_(padded)
        added += store.append(keys[first : first + BATCH_ROWS], strided)
    return added


def write_file(
    directory: Path, *, num_rows: int = 40, first: int = 0, shape: tuple[int, ...] = (4,), **changes: Any
) -> Path:
    """A published, complete file with the rows `make_rows(num_rows, shape=shape)`, of samples from `first` on."""
    keys = make_keys(num_rows, first=first)
    store = open_store(directory, keys, **changes)
    fill(store, keys, make_rows(num_rows, shape=shape))
    store.close()
    return store.path


def read(store: Store, keys: Keys) -> Tensor | None:
    """The activations (rows, ...) of `keys`, or None when a row is missing."""
    place = store.locate(keys)
    return None if place is None else store.read_at(place)


class FrozenNet:
    """Four convolutional blocks in evaluation mode; `calls` records every forward as (start, stop, rows)."""

    def __init__(self, *, channels_last: bool = True) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8)) for k in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.ReLU(inplace=True)) for block in blocks).eval()
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.blocks.to(memory_format=self.format)
        self.pixels = torch.rand(400, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        self.calls: list[tuple[int, int, int]] = []
        self.loaded = 0

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        self.calls.append((start, stop, len(x)))
        for block in self.blocks[start:stop]:
            x = block(x)
        return x

    def load(self, ids: Keys, views: Keys) -> Tensor:
        self.loaded += len(ids)
        images = self.pixels[torch.from_numpy(ids), torch.from_numpy(views)]
        return images.contiguous(memory_format=self.format)

    def digest(self, cut: int) -> str:
        return digest_tensors(self.blocks[:cut].state_dict().items())

    def fingerprint(self, cut: int, **changes: Any) -> Fingerprint:
        return make_fingerprint(prefix=self.digest(cut), cut=cut, **changes)

    def outputs(self, cut: int, batches: Sequence[tuple[Keys, Keys]]) -> list[Tensor]:
        """What a run without a cache computes, at the training batch shape; not recorded in `calls` and `loaded`."""
        calls, loaded, outputs = self.calls, self.loaded, []
        self.calls = []
        for ids, views in batches:
            images = self.load(np.resize(ids, BATCH_ROWS), np.resize(views, BATCH_ROWS))
            with torch.no_grad():
                outputs.append(self.run(images, 0, cut)[: len(ids)])
        self.calls, self.loaded = calls, loaded
        return outputs

    def cached(self, directory: Path, **changes: Any) -> PrefixActivations:
        options: dict[str, Any] = {"batch_rows": BATCH_ROWS, "directory": directory, "shard": "0of1", "owner": "run"}
        return PrefixActivations(run_blocks=self.run, load_images=self.load, **(options | changes))

    def begin(
        self, cached: PrefixActivations, cut: int, owned_keys: tuple[Keys, Keys], *, store: bool = True, **identity: Any
    ) -> None:
        """Move `cached` to `cut` of this net."""
        fingerprint = self.fingerprint(cut, **identity)
        cached.begin_cut(cut, fingerprint=fingerprint, owned_keys=owned_keys, store=store)


def batches_of(num_samples: int, *, epoch: int = 0, views: int = 1, drop_last: bool = False) -> list[tuple[Keys, Keys]]:
    """The batches of an epoch that shuffles `num_samples` samples and shows view `epoch` of each."""
    order = np.random.default_rng(epoch).permutation(num_samples)
    chunks = [order[at : at + BATCH_ROWS] for at in range(0, num_samples, BATCH_ROWS)]
    return [(ids, np.full_like(ids, epoch % views)) for ids in chunks if len(ids) == BATCH_ROWS or not drop_last]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal values, types, shapes and strides."""
    alike = left.dtype == right.dtype and left.shape == right.shape and left.stride() == right.stride()
    return alike and torch.equal(bytes_of(left), bytes_of(right))


def run_in_child(work: Callable[[], Iterable[object]]) -> tuple[int, list[str]]:
    """Run `work` in a forked process; return how that ended, as `waitpid` does, and what `work` yielded, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(240)
            for line in work():
                os.write(writing, f"{line}\n".encode())
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        said = lines.read().splitlines()
    return os.waitpid(child, 0)[1], said


def slow_down(monkeypatch: pytest.MonkeyPatch, *, read_rate: float = math.inf, write_rate: float = math.inf) -> None:
    """Slow cache files down to these rates, in bytes per second."""
    read, write = MappedRows.read, os.pwrite

    def slow_read(self: MappedRows, rows: Tensor) -> Tensor:
        time.sleep(len(rows) * self.row_bytes / read_rate)
        return read(self, rows)

    def slow_write(descriptor: int, content: bytes | memoryview, offset: int) -> int:
        time.sleep(len(content) / write_rate)
        return write(descriptor, content, offset)

    monkeypatch.setattr(MappedRows, "read", slow_read)
    monkeypatch.setattr(os, "pwrite", slow_write)


def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to open locks, as the kernel does for those of another user; the superuser, who may test, opens any."""
    open_file = os.open

    def refuse(path: Any, *how: Any, **more: Any) -> int:
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, *how, **more)

    monkeypatch.setattr(os, "open", refuse)
