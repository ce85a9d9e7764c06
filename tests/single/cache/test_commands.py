from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest

from hvfreeze.cache.commands import ls, rm, verify
from hvfreeze.cache.file.reader import directory_bytes
from hvfreeze.errors import RefusedError, UsageError
from tests.single.cache.material import (
    fill,
    make_fingerprint,
    make_keys,
    make_rows,
    open_store,
    refuse_locks,
    write_file,
)


def make_directory(directory: Path) -> list[Path]:
    """A complete file, a partial one in a folder below, and some that are not ours."""
    keys = make_keys(40)
    partial = open_store(directory / "below", keys, fingerprint=make_fingerprint(split="test", cut=4))
    fill(partial, keys[:16], make_rows(40)[:16])
    partial.close()
    whole = write_file(directory)
    (directory / "notes.txt").write_text("mine")
    return [whole, partial.path]


def test_ls_prints_a_line_for_each_file_and_verify_accepts_sound_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, partial = make_directory(tmp_path)
    assert ls(tmp_path) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["file", "model", "data", "split", "cut", "rows", "row", "type", "MiB", "state"]
    assert len(lines) == 2
    assert lines[0].split() == [whole.name, "-", "digits", "train", "2", "40/40", "4", "float32", "0.0", "complete"]
    assert lines[1].split()[0] == f"below/{partial.name}" and lines[1].split()[-1] == "partial"
    assert verify(tmp_path) == 0 and capsys.readouterr().out.count("sound") == 2
    whole.rename(whole.with_name(whole.name + ".tmp"))
    assert ls(tmp_path) == 0 and "left over" in capsys.readouterr().out, "by a process that was killed"


@pytest.mark.parametrize("damage", ["flip", "rename", "foreign"])
def test_verify_names_the_bad_file_and_fails(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, partial = make_directory(tmp_path)
    bad = whole
    if damage == "flip":
        content = bytearray(whole.read_bytes())
        content[-1] ^= 1
        whole.write_bytes(content)
    elif damage == "rename":
        bad = whole.rename(whole.with_name(partial.name.replace("0of1", "1of1")))
    else:
        bad = tmp_path / "foreign.h5"
        with h5py.File(bad, "w") as file:
            file["x"] = [1, 2]
    assert verify(tmp_path) == 3
    lines = capsys.readouterr().out.splitlines()[1:]
    (refused,) = [line for line in lines if not line.endswith("sound")]
    assert str(bad) in refused and "refused" in refused


def test_rm_removes_our_files_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    whole, partial = make_directory(cache)
    kept = write_file(outside)
    left_over = [whole.with_name(whole.name + suffix) for suffix in (".tmp", ".lock")]
    for path in left_over:
        path.write_text("")
    foreign = cache / "foreign.h5"
    foreign.write_text("")
    (cache / "elsewhere").symlink_to(outside)
    link = cache / "activations-0123456789abcdef-0of1.h5"
    link.symlink_to(kept)
    assert rm(cache) == 3
    out = capsys.readouterr().out
    assert out.count("removed") == 4 and f"kept: it is not a regular file  {link}" in out
    assert not any(path.exists() for path in (whole, partial, *left_over))
    assert kept.exists() and link.is_symlink() and foreign.exists() and (cache / "notes.txt").exists()


def test_rm_leaves_what_is_being_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = make_keys(40)
    store = open_store(tmp_path, keys)
    fill(store, keys[:16], make_rows(40)[:16])
    assert ls(tmp_path) == 0 and "being built" in capsys.readouterr().out
    assert rm(tmp_path) == 3
    assert "removed" not in capsys.readouterr().out
    fill(store, keys, make_rows(40))
    store.close()
    assert rm(tmp_path) == 0 and not store.path.exists()


def test_rm_leaves_what_a_user_builds_whose_lock_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = make_keys(40)
    store = open_store(tmp_path, keys)
    fill(store, keys[:16], make_rows(40)[:16])
    there = sorted(tmp_path.iterdir())
    refuse_locks(monkeypatch)
    assert ls(tmp_path) == 0 and "being built" in capsys.readouterr().out
    assert rm(tmp_path) == 3 and sorted(tmp_path.iterdir()) == there
    assert capsys.readouterr().out.count("kept: a job is writing it") == len(there) == 2


def test_a_directory_that_is_absent_or_a_link_is_a_usage_error(tmp_path: Path) -> None:
    for command in (ls, verify, rm):
        with pytest.raises(UsageError, match="is not a directory"):
            command(tmp_path / "absent")
    write_file(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="link"):
        rm(tmp_path / "link")


@pytest.mark.parametrize(("command", "closed"), [(ls, "."), (verify, "below"), (rm, "below")])
def test_a_directory_that_cannot_be_listed_is_refused_after_what_can_be_is_told(
    command: Callable[[Path], int],
    closed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, _ = make_directory(tmp_path)
    list_folder = os.scandir

    def scandir(folder: Any = ".") -> Any:
        if not isinstance(folder, int) and Path(folder) == tmp_path / closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return list_folder(folder)

    # The superuser, who may run this, is let in everywhere.
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(RefusedError, match=re.escape(f"{tmp_path / closed} cannot be listed (Permission denied)")):
        command(tmp_path)
    assert (whole.name in capsys.readouterr().out) == (closed == "below")


def test_files_that_go_while_a_directory_is_looked_at_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = make_directory(tmp_path)
    gone = whole.with_name(whole.name.replace("0of1", "1of2"))
    temporary = gone.with_name(f"{gone.name}.tmp")
    there = directory_bytes(tmp_path)
    find = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [*find(folder, pattern), gone])
    monkeypatch.setattr("hvfreeze.cache.commands._files", lambda directory: iter([gone, temporary, whole]))
    assert directory_bytes(tmp_path) == there > 0
    assert ls(tmp_path) == 0 and verify(tmp_path) == 0
    assert gone.name not in capsys.readouterr().out
    walk = os.fwalk

    def walked(*where: Any, **how: Any) -> Iterator[Any]:
        return ((folder, below, [*names, gone.name], opened) for folder, below, names, opened in walk(*where, **how))

    monkeypatch.setattr(os, "fwalk", walked)
    assert rm(tmp_path) == 0 and not whole.exists()
    assert gone.name not in capsys.readouterr().out


def test_rm_goes_on_after_a_file_that_may_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, partial = make_directory(tmp_path)
    unlink = os.unlink

    def refuse(name: str, **how: Any) -> None:
        if name == whole.name:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        unlink(name, **how)

    monkeypatch.setattr(os, "unlink", refuse)
    assert rm(tmp_path) == 3 and whole.exists() and not partial.exists()
    assert f"kept: it cannot be removed (Permission denied)  {whole}\n" in capsys.readouterr().out
