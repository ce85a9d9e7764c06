from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hvfreeze.cache.faults import CacheFault, CacheFull
from hvfreeze.cache.file.disk import Budget, LimitedDisk
from hvfreeze.cache.file.names import directory_bytes
from hvfreeze.cache.file.reader import ActivationFile
from tests.single.cache.material import BATCH_ROWS, fill, make_keys, make_rows, open_store, write_file

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


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
            filler.write(bytes(MIB))
            filler.flush()
    fill(store, keys, rows)
    store.close()
    ActivationFile(store.path).verify()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
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


def test_a_directory_that_cannot_be_written_is_a_cache_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFault, match="cannot be used"):
        open_store(tmp_path / "file" / "below", make_keys(4))


LOCKER = """
import sys
from pathlib import Path
from tests.single.cache.material import *
keys = make_keys(40)
store = open_store(Path(sys.argv[1]), keys, owner="the first job")
fill(store, keys[:16], make_rows(40)[:16])
print("building", flush=True)
sys.stdin.readline()
fill(store, keys, make_rows(40))
store.close()
"""


def test_two_jobs_do_not_build_the_same_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", LOCKER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "building\n"
        keys, rows = make_keys(40), make_rows(40)
        store = open_store(tmp_path, keys)
        assert fill(store, keys, rows) == 0
        assert store.waiting and store.missing(keys).all()
        (warning,) = caplog.messages
        assert re.search(rf'{store.path} is being built by .*"pid": {first.pid}.*the first job', warning)
        other = open_store(tmp_path, keys, shard="1of2")
        fill(other, keys, rows)
        other.close()
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.wait(timeout=60) == 0
    store.refresh()
    found = store.read(keys[:BATCH_ROWS])
    assert store.complete and not store.waiting and found is not None and torch.equal(found, rows[:BATCH_ROWS])


def test_a_file_whose_builder_is_gone_is_built_after_the_next_look(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    first, second = open_store(tmp_path, keys), open_store(tmp_path, keys)
    fill(first, keys[:16], rows[:16])
    assert fill(second, keys, rows) == 0
    first.discard()
    assert fill(second, keys, rows) == 0
    second.refresh()
    assert fill(second, keys, rows) == 40
    second.close()
    assert list(tmp_path.iterdir()) == [second.path]


@pytest.mark.parametrize("published", [16, 40])
def test_rows_that_another_job_has_published_meanwhile_are_not_stored_twice(published: int, tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    late = open_store(tmp_path, keys)
    early = open_store(tmp_path, keys)
    fill(early, keys[:published], rows[:published])
    early.close()
    assert late.missing(keys).all()
    assert fill(late, keys, rows) == 40 - published
    late.close()
    assert list(tmp_path.iterdir()) == [late.path]
    file = ActivationFile(late.path)
    file.verify()
    assert file.manifest.capacity == 40
    assert torch.equal(file.read(torch.from_numpy(np.argsort(file.keys))), rows)
    for first in range(0, 40, BATCH_ROWS):
        found = late.read(keys[first : first + BATCH_ROWS])
        assert found is not None and torch.equal(found, rows[first : first + BATCH_ROWS])


def test_rows_of_another_shape_published_meanwhile_are_refused_and_the_lock_let_go(tmp_path: Path) -> None:
    keys = make_keys(40)
    late, early = open_store(tmp_path, keys), open_store(tmp_path, keys)
    fill(early, keys[:16], make_rows(16, shape=(7,)))
    early.close()
    with pytest.raises(CacheFault, match=r"holds rows of .*7.*, this run computes"):
        fill(late, keys, make_rows(40))
    late.discard()
    assert list(tmp_path.iterdir()) == [early.path]


def test_the_lock_of_a_killed_process_and_its_temporary_file_are_taken_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        first.wait(timeout=60)
    assert {path.suffix for path in tmp_path.iterdir()} == {".tmp", ".lock"}
    path = write_file(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


# Forks a child for each system call that publication makes, and lets the child kill itself just before it.
KILLER = """
import os, signal, sys
from pathlib import Path
from tests.single.cache.material import *
from hvfreeze.cache.file.reader import ActivationFile

directory, keys, rows = Path(sys.argv[1]), make_keys(40), make_rows(40)
calls = 0

def counted(real, fatal):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call

def build(fatal, first):
    for name in ("open", "pwrite", "posix_fallocate", "fsync", "replace", "unlink", "close"):
        setattr(os, name, counted(getattr(os, name), fatal))
    store = open_store(directory, keys)
    fill(store, keys[first:], rows[first:])
    store.close()

for fatal in range(1, 1000):
    child = os.fork()
    if child == 0:
        build(fatal, 0 if "partial" not in sys.argv else 16)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    path = open_store(directory, keys).path
    state = "absent"
    if path.exists():
        file = ActivationFile(path)
        file.verify()
        state = f"{file.manifest.rows} rows"
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else "done", state, flush=True)
    if not os.WIFSIGNALED(status):
        break
    for left in directory.iterdir():
        if left != path or "partial" not in sys.argv:
            left.unlink()
    if "partial" in sys.argv and path.exists() and file.manifest.rows == 40:
        path.write_bytes(Path(sys.argv[2]).read_bytes())
print(len(list(directory.iterdir())))
"""


@pytest.mark.slow
@pytest.mark.fault
def test_a_process_killed_at_any_write_leaves_no_file_or_a_complete_one(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    command = [sys.executable, "-c", KILLER, str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    *lines, left = done.stdout.splitlines()
    assert left == "1" and lines[-1] == "done 40 rows" and len(lines) > 15
    killed = {line.removeprefix(f"{signal.SIGKILL.value} ") for line in lines[:-1]}
    assert killed == {"absent", "40 rows"}


@pytest.mark.slow
@pytest.mark.fault
def test_a_process_killed_while_it_completes_a_partial_file_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    place, keys = tmp_path / "cache", make_keys(40)
    store = open_store(place, keys)
    fill(store, keys[:16], make_rows(40)[:16])
    store.close()
    partial = tmp_path / "partial.h5"
    partial.write_bytes(store.path.read_bytes())
    command = [sys.executable, "-c", KILLER, str(place), str(partial), "partial"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    *lines, left = done.stdout.splitlines()
    assert left == "1" and lines[-1] == "done 40 rows" and len(lines) > 15
    killed = {line.removeprefix(f"{signal.SIGKILL.value} ") for line in lines[:-1]}
    assert killed == {"16 rows", "40 rows"}


def test_the_budget_is_never_exceeded_over_files(tmp_path: Path) -> None:
    one = write_file(tmp_path / "probe", owner="run").stat().st_size
    budget = Budget(2 * one)
    options = {"budget": budget, "owner": "run"}
    stores = [open_store(tmp_path, make_keys(40, first=40 * rank), shard=f"{rank}of3", **options) for rank in range(3)]
    for store in stores[:2]:
        fill(store, store.universe, make_rows(40))
        store.close()
    assert budget.used_bytes == directory_bytes(tmp_path) == 2 * one
    with pytest.raises(CacheFull, match="--cache-limit"):
        fill(stores[2], stores[2].universe, make_rows(40))
    assert budget.used_bytes == directory_bytes(tmp_path) == 2 * one and budget.left_bytes == 0
    store = open_store(tmp_path, make_keys(40), shard="0of3", **options)
    store.delete()
    assert budget.used_bytes == directory_bytes(tmp_path)


def test_the_budget_counts_both_generations_while_a_file_is_completed(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    budget = Budget()
    first = open_store(tmp_path, keys, budget=budget)
    fill(first, keys[:16], rows[:16])
    first.close()
    assert budget.used_bytes == directory_bytes(tmp_path)
    second = open_store(tmp_path, keys, budget=budget, disk=LimitedDisk(read_rate=1e12, write_rate=1e3))
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
