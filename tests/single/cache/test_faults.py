"""Disks that are full, fail or may not be written, and the budget."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvfreeze.cache.faults import CacheFault, CacheFull
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.reader import ActivationFile, directory_bytes
from tests.single.cache.material import fill, make_keys, make_rows, open_store, write_file


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
