"""Trusted owners of cache files, permissions of new files, and detected changes by other processes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from hvfreeze.cache.commands import verify
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import prepare_directory
from hvfreeze.cache.file.reader import MappedRows
from hvfreeze.files import check_unlocked
from tests.single.cache.material import fill, make_keys, make_rows, open_store, read, refuse_locks, write_file

KEYS, ROWS = make_keys(40), make_rows(40)


def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_file(tmp_path / "run" / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in path.parents[:2]] == [0o700, 0o700]


@pytest.mark.parametrize(("mode", "shared_too"), [(0o666, False), (0o602, False), (0o660, True), (0o620, True)])
def test_a_file_that_others_may_write_is_not_believed(mode: int, shared_too: bool, tmp_path: Path) -> None:
    path = write_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(CacheFault, match=rf"{path} refused: .* may write to it \(mode {mode:o}\)"):
        open_store(tmp_path, KEYS)
    if shared_too:
        assert open_store(tmp_path, KEYS, private=False).complete
    else:
        with pytest.raises(CacheFault, match="any user may write"):
            open_store(tmp_path, KEYS, private=False)
        assert verify(tmp_path) == 3
    path.chmod(0o644)
    assert open_store(tmp_path, KEYS).complete


def test_a_file_of_another_user_is_believed_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mine = write_file(tmp_path), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(CacheFault, match=rf"{path} refused: it belongs to user {mine}.*--cache-shared to hvfreeze"):
        open_store(tmp_path, KEYS)
    assert open_store(tmp_path, KEYS, private=False).complete


def test_a_directory_in_which_anybody_can_replace_files_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CacheFault, match=rf"{tmp_path} has mode 777, so any user may replace"):
        prepare_directory(tmp_path)
    tmp_path.chmod(0o1777)
    prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["lock", "temporary"])
def test_no_link_is_followed(what: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("do not touch")
    store = open_store(tmp_path / "cache", KEYS)
    link = store.path.with_name(store.path.name + (".lock" if what == "lock" else ".tmp"))
    link.symlink_to(precious)
    if what == "lock":
        with pytest.raises(CacheFault, match="lock"):
            fill(store, KEYS, ROWS)
    else:
        fill(store, KEYS, ROWS)
        store.close()
        assert not store.path.is_symlink() and open_store(tmp_path / "cache", KEYS).complete
    assert precious.read_text() == "do not touch"


@pytest.mark.parametrize("private", [True, False])
def test_a_lock_is_for_its_group_only_in_a_shared_cache(private: bool, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        store = open_store(tmp_path, KEYS, private=private)
        fill(store, KEYS[:16], ROWS[:16])
    finally:
        os.umask(before)
    (lock,) = tmp_path.glob("*.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == (0o600 if private else 0o660)


def test_a_lock_of_another_user_that_cannot_be_opened_is_a_busy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, KEYS, private=False)
    refuse_locks(monkeypatch)
    with pytest.raises(CacheFault, match=r"cannot be created .*Permission denied"):
        fill(store, KEYS, ROWS)
    store.path.with_name(f"{store.path.name}.lock").write_text("")
    assert fill(store, KEYS, ROWS) == 0 and store.waiting
    assert f"user {os.geteuid()} is writing cache file {store.path}, or has left the lock" in caplog.text


def test_a_file_system_without_locks_is_no_busy_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    store = open_store(tmp_path, KEYS)
    with pytest.raises(CacheFault, match=r"the file system may not support locks; .*--cache-dir or directory="):
        fill(store, KEYS, ROWS)
    assert not store.waiting
    (tmp_path / "a.lock").write_text("")
    check_unlocked(tmp_path / "a.lock")


def change(path: Path) -> None:
    """Flip a bit of a row and put the times back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-500, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-500, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("made_here", [True, False])
def test_rows_changed_while_they_are_mapped_are_noticed_although_the_times_are_put_back(
    made_here: bool, tmp_path: Path
) -> None:
    store = open_store(tmp_path, KEYS)
    fill(store, KEYS, ROWS)
    store.publish()
    if not made_here:
        store = open_store(tmp_path, KEYS)
    before = read(store, KEYS[:16])
    assert before is not None and torch.equal(before, ROWS[:16])
    change(store.path)
    for _ in range(2):
        with pytest.raises(CacheFault, match=r"was changed while in use \(rows 0\.\.39 are damaged\)"):
            read(store, KEYS[:16])


def test_a_file_renamed_or_removed_is_looked_at_again_once_and_goes_on_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path)
    looked: list[int] = []
    store = open_store(tmp_path, KEYS)
    read(store, KEYS[:16])
    pread = MappedRows.pread
    monkeypatch.setattr(MappedRows, "pread", lambda self, *rows: looked.append(rows[0]) or pread(self, *rows))
    path.chmod(0o400)
    path.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").unlink()
    for _ in range(3):
        found = read(store, KEYS[16:32])
        assert found is not None and torch.equal(found, ROWS[16:32])
    assert looked == [0], "the only range is read once more, and not for each batch"


def test_a_full_disk_lets_rows_be_read_but_not_those_that_anybody_can_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**where: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    prepare_directory(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(CacheFault, match="any user may replace"):
        prepare_directory(tmp_path)
