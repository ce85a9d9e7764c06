from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvfreeze.errors import RefusedError
from hvfreeze.files import open_own
from hvfreeze.runs import files as module
from hvfreeze.runs.files import publish, publishing
from hvfreeze.runs.record import Record


def test_a_published_file_is_whole_private_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    publish(target, [b"one ", memoryview(b"two")])
    assert target.read_bytes() == b"one two"
    assert target.stat().st_mode & 0o777 == 0o600 and target.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(target.parent) == ["file"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), RuntimeError("writing failed\nat line 3")])
def test_a_failed_write_leaves_the_old_file_and_says_why(tmp_path: Path, failure: Exception) -> None:
    target = tmp_path / "file"
    publish(target, [b"old"])
    with pytest.raises(RefusedError, match=r"file cannot be written \((No space left on device|writing failed)\)"):  # noqa: SIM117
        with publishing(target) as file:
            file.write(b"half")
            raise failure
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_an_interruption_leaves_the_old_file_alone(tmp_path: Path) -> None:
    publish(tmp_path / "file", [b"old"])
    with pytest.raises(KeyboardInterrupt), publishing(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_the_file_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(f"{path.name}: {(tmp_path / 'file').exists()}")
        sync(descriptor)

    monkeypatch.setattr(module.os, "fsync", note)
    publish(tmp_path / "file", [b"new"])
    assert events == [".file.tmp: False", f"{tmp_path.name}: True"]


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for name in ("file", ".file.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    publish(tmp_path / "file", [b"new"])
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "file").is_symlink()


@dataclass
class Vote:
    step: int


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe"])
@pytest.mark.timeout(20)
def test_a_log_that_is_no_plain_file_is_not_written_to(tmp_path: Path, kind: str) -> None:
    victim, log = tmp_path / "mine", tmp_path / "run" / "metrics.jsonl"
    log.parent.mkdir()
    if kind != "dangling link":
        victim.write_text("precious")
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "hard link":
        os.link(victim, log)
    else:
        log.symlink_to(victim)
    with pytest.raises(OSError):
        Record(log.parent, {}, environment={})
    with pytest.raises(OSError):
        os.close(open_own(log, os.O_WRONLY | os.O_APPEND))
    assert victim.exists() == (kind != "dangling link") and (not victim.exists() or victim.read_text() == "precious")


def test_a_record_keeps_lines_and_drops_those_after_a_position(tmp_path: Path) -> None:
    record = Record(tmp_path, {}, environment={})
    record.metrics({"epoch": 0})
    record.decision(Vote(3))
    position = record.position()
    record.metrics({"epoch": 1})
    record.cut_back(position)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [{"epoch": 0}]
    assert json.loads((tmp_path / "decisions.jsonl").read_text()) == {"step": 3}
    record.cut_back({})
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "decisions.jsonl").read_text() == ""
    assert (tmp_path / "metrics.jsonl").stat().st_mode & 0o777 == 0o600
