"""Disks that are full, fail or may not be written, and the budget."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hvfreeze.cache.faults import CacheFault, CacheFull
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.reader import ActivationFile, directory_bytes
from tests.single.cache.material import BATCH_ROWS, fill, make_keys, make_rows, open_store, slow_down, write_file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_file_larger_than_the_free_space_is_refused_and_leaves_nothing(small_disk: Path) -> None:
    kept = write_file(small_disk, num_rows=20, shape=(1 << 12,))
    before = kept.read_bytes()
    keys = make_keys(500)
    store = open_store(small_disk, keys, shard="1of2")
    with pytest.raises(CacheFull, match=r"1of2\.h5 needs \d+ bytes"):
        fill(store, keys[20:40], make_rows(20, shape=(1 << 12,)))
    store.close()
    assert [path.name for path in small_disk.iterdir()] == [kept.name]
    assert kept.read_bytes() == before
    ActivationFile(kept).verify()


@pytest.mark.parametrize(
    ("call", "number"),
    [("pwrite", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EIO), ("posix_fallocate", errno.ENOSPC)],
)
def test_a_failing_disk_surfaces_in_a_later_call_and_leaves_the_old_file(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, rows = make_keys(40), make_rows(40)
    old = open_store(tmp_path, keys)
    fill(old, keys[:16], rows[:16])
    old.close()
    before = old.path.read_bytes()
    store = open_store(tmp_path, keys)

    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    real = getattr(os, call)
    monkeypatch.setattr(os, call, lambda first, *rest: fail() if _is_ours(first) else real(first, *rest))
    with pytest.raises(CacheFull if number == errno.ENOSPC else CacheFault, match=str(store.path)):
        for _ in range(20):
            fill(store, keys, rows)
            store.publish()
    monkeypatch.undo()
    store.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == [store.path.name]
    assert store.path.read_bytes() == before


def _is_ours(first: object) -> bool:
    """Whether a call is about a temporary cache file, and not about its lock."""
    name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
    return name.endswith(".h5.tmp")


def test_the_budget_is_never_exceeded_over_files(tmp_path: Path) -> None:
    one = write_file(tmp_path / "probe", owner="run").stat().st_size
    budget = Budget(2 * one)
    options = {"budget": budget, "owner": "run"}
    stores = [open_store(tmp_path, make_keys(40, first=40 * rank), shard=f"{rank}of3", **options) for rank in range(3)]
    for store in stores[:2]:
        fill(store, store.owned_keys, make_rows(40))
        store.close()
    assert budget.used_bytes == directory_bytes(tmp_path) == 2 * one
    with pytest.raises(CacheFull, match="--cache-limit"):
        fill(stores[2], stores[2].owned_keys, make_rows(40))
    assert budget.used_bytes == directory_bytes(tmp_path) == 2 * one and budget.left_bytes == 0
    store = open_store(tmp_path, make_keys(40), shard="0of3", **options)
    store.delete()
    assert budget.used_bytes == directory_bytes(tmp_path)


def test_a_disk_that_fills_up_before_allocation_is_a_clean_error(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvfreeze.cache.file.writer.free_bytes", lambda directory: 1 << 40)
    keys = make_keys(500)
    budget = Budget(1 << 40)
    store = open_store(small_disk, keys, budget=budget)
    with pytest.raises(CacheFull, match="No space left"):
        fill(store, keys, make_rows(16, shape=(1 << 12,)))
    assert list(small_disk.iterdir()) == [] and budget.used_bytes == 0


def test_an_allocated_file_is_filled_although_the_disk_is_full_by_then(small_disk: Path) -> None:
    keys, rows = make_keys(64), make_rows(64, shape=(1 << 12,))
    store = open_store(small_disk, keys)
    fill(store, keys[:16], rows[:16])
    with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb") as filler:
        while True:
            filler.write(bytes(1 << 20))
            filler.flush()
    fill(store, keys, rows)
    store.close()
    ActivationFile(store.path).verify()


def test_the_budget_counts_both_generations_while_a_file_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, rows = make_keys(40), make_rows(40)
    budget = Budget()
    first = open_store(tmp_path, keys, budget=budget)
    fill(first, keys[:16], rows[:16])
    first.close()
    assert budget.used_bytes == directory_bytes(tmp_path)
    slow_down(monkeypatch, write_rate=1e4)
    second = open_store(tmp_path, keys, budget=budget)
    fill(second, keys[16:32], rows[16:32])
    assert budget.used_bytes == directory_bytes(tmp_path) > first.path.stat().st_size
    second.close()
    assert budget.used_bytes == directory_bytes(tmp_path) == first.path.stat().st_size


def test_discarding_gives_back_disk_and_budget_and_rows_stay_readable(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    budget = Budget(1 << 30)
    store = open_store(tmp_path, keys, budget=budget)
    fill(store, keys[:BATCH_ROWS], rows[:BATCH_ROWS])
    place = store.locate(keys[:BATCH_ROWS])
    store.discard()
    assert list(tmp_path.iterdir()) == [] and budget.used_bytes == 0
    assert place is not None and torch.equal(store.read_at(place), rows[:BATCH_ROWS])


def test_a_file_with_more_rows_than_a_reader_accepts_is_refused_before_it_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvfreeze.cache.file.writer.MAX_ROWS", 39)
    budget, keys = Budget(), make_keys(40)
    store = open_store(tmp_path, keys, budget=budget)
    with pytest.raises(CacheFault, match=r"needs 40 rows, more than the maximum of 39; use more ranks"):
        fill(store, keys, make_rows(40))
    assert list(tmp_path.iterdir()) == [] and budget.used_bytes == 0
    assert write_file(tmp_path, num_rows=39).exists()
