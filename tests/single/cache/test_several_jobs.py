"""Several jobs that build one file, and jobs that are killed while they do."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.format import Keys
from hvfreeze.cache.file.reader import ActivationFile, directory_bytes
from hvfreeze.cache.store import Store
from hvfreeze.config.cache import CacheConfig
from hvfreeze.prefix.cache_decision import open_budget
from tests.single.cache.material import (
    BATCH_ROWS,
    fill,
    make_keys,
    make_rows,
    open_store,
    read,
    run_in_child,
    write_file,
)


def test_two_jobs_do_not_build_the_same_file(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    first, store = open_store(tmp_path, keys), open_store(tmp_path, keys)
    fill(first, keys[:16], rows[:16])
    assert fill(store, keys, rows) == 0
    assert store.waiting and store.missing(keys).all()
    other = open_store(tmp_path, keys, shard="1of2")
    fill(other, keys, rows)
    other.close()
    fill(first, keys, rows)
    first.close()
    store.refresh()
    found = read(store, keys[:BATCH_ROWS])
    assert store.complete and not store.waiting and found is not None and torch.equal(found, rows[:BATCH_ROWS])


def test_a_job_that_locks_do_not_keep_out_makes_the_other_one_give_up_and_its_own_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on two machines whose shared file system knows only locks of each.
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    keys, rows = make_keys(40), make_rows(40)
    first, second = open_store(tmp_path, keys), open_store(tmp_path, keys)
    fill(first, keys[:16], rows[:16])
    fill(second, keys[:16], rows[:16])
    with pytest.raises(CacheFault, match=rf"{first.path} was changed by another process while it was being written"):
        fill(first, keys, rows)
        first.close()
    fill(second, keys, rows)
    second.close()
    assert list(tmp_path.iterdir()) == [second.path]
    assert open_store(tmp_path, keys).complete


@pytest.mark.parametrize("published", [16, 40])
def test_rows_that_another_job_has_published_meanwhile_are_not_stored_twice(published: int, tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    late = open_store(tmp_path, keys)
    early = open_store(tmp_path, keys)
    fill(early, keys[:published], rows[:published])
    early.close()
    assert fill(late, keys, rows) == 0
    assert late.waiting and late.missing(keys).all(), "they are to be compared first"
    late.refresh()
    assert fill(late, keys, rows) == 40 - published
    late.close()
    assert list(tmp_path.iterdir()) == [late.path]
    file = ActivationFile(late.path)
    file.verify()
    assert file.manifest.capacity == 40
    assert torch.equal(file.read(torch.from_numpy(np.argsort(file.keys))), rows)
    for first in range(0, 40, BATCH_ROWS):
        found = read(late, keys[first : first + BATCH_ROWS])
        assert found is not None and torch.equal(found, rows[first : first + BATCH_ROWS])


def test_rows_of_another_shape_published_meanwhile_are_refused_and_the_lock_let_go(tmp_path: Path) -> None:
    keys = make_keys(40)
    late, early = open_store(tmp_path, keys), open_store(tmp_path, keys)
    fill(early, keys[:16], make_rows(16, shape=(7,)))
    early.close()
    with pytest.raises(CacheFault, match=r"stores rows of .*7.*, this run computes"):
        fill(late, keys, make_rows(40))
    late.discard()
    assert list(tmp_path.iterdir()) == [early.path]


def test_the_lock_of_a_process_keeps_others_out_until_it_is_killed_and_its_temporary_file_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, (reading, writing) = make_keys(40), os.pipe()
    first = os.fork()
    if first == 0:
        try:
            fill(open_store(tmp_path, keys, owner="the first job"), keys[:16], make_rows(40)[:16])
            os.write(writing, b"building")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 8) == b"building"
        store = open_store(tmp_path, keys)
        assert fill(store, keys, make_rows(40)) == 0
        (warning,) = caplog.messages
        assert re.search(
            rf'another process is writing cache file {store.path}: .*"pid": {first}.*the first job', warning
        )
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.close(reading)
        os.close(writing)
    assert {path.suffix for path in tmp_path.iterdir()} == {".tmp", ".lock"}
    path = write_file(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_jobs_have_left_is_removed_and_counts_towards_no_limit(tmp_path: Path) -> None:
    here, keys = os.uname().nodename, make_keys(40)
    live = open_store(tmp_path, keys)
    fill(live, keys[:16], make_rows(40)[:16])
    notes = {"dead": json.dumps({"host": here}), "elsewhere": json.dumps({"host": f"not-{here}"}), "full": ""}
    for number, note in enumerate(notes.values(), 1):
        path = live.path.with_name(live.path.name.replace("0of1", f"{number}of4"))
        path.with_name(f"{path.name}.tmp").write_bytes(bytes(1000))
        path.with_name(f"{path.name}.lock").write_text(note)
    (tmp_path / "activations-of-mine.h5.tmp").write_text("mine")
    (tmp_path / "activations-of-mine.h5.lock").write_text(notes["dead"])
    before = {path.name for path in tmp_path.iterdir()}
    off, on = (CacheConfig(cache=mode, cache_limit="1M") for mode in ("off", "on"))
    assert open_budget(off, tmp_path, size=1).left_bytes == (1 << 20) - directory_bytes(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before
    there = directory_bytes(tmp_path) - 1000
    assert open_budget(on, tmp_path, size=1).left_bytes == (1 << 20) - there
    gone = before - {path.name for path in tmp_path.iterdir()}
    assert {name.rpartition("-")[2] for name in gone} == {"1of4.h5.tmp", "1of4.h5.lock"}
    fill(live, keys, make_rows(40))
    live.close()
    ActivationFile(live.path).verify()


def complete(store: Store, keys: Keys, rows: Tensor, *, fatal: int) -> Iterator[str]:
    """Fill and publish; the process kills itself just before system call number `fatal` of publication."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in ("open", "pwrite", "posix_fallocate", "fsync", "replace", "unlink", "close"):
        setattr(os, name, counted(getattr(os, name)))
    fill(store, keys, rows)
    store.close()
    yield from ()


@pytest.mark.fault
@pytest.mark.parametrize("present", [0, 16])
def test_a_process_killed_at_any_write_leaves_what_was_there_or_a_complete_file(present: int, tmp_path: Path) -> None:
    """Where there was no file, and where one is completed."""
    keys, rows, found = make_keys(40), make_rows(40), list[int]()
    store = open_store(tmp_path, keys)
    if present:
        fill(store, keys[:present], rows[:present])
        store.close()
    before = store.path.read_bytes() if present else b""
    for fatal in range(1, 1000):
        work = partial(complete, open_store(tmp_path, keys), keys[present:], rows[present:], fatal=fatal)
        status, _ = run_in_child(work)
        found.append(0)
        if store.path.exists():
            file = ActivationFile(store.path)
            file.verify()
            found[-1] = file.manifest.rows
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        for left in tmp_path.iterdir():
            left.unlink()
        if present:
            store.path.write_bytes(before)
    assert list(tmp_path.iterdir()) == [store.path]
    assert found[-1] == 40 and len(found) > 15 and set(found[:-1]) == {present, 40}


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
