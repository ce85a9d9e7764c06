from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze import files as locking
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.runs import directory as module
from hvfreeze.runs import files
from hvfreeze.runs.directory import check_directory, directory_name, open_record
from tests.program import NOBODY, contents, without_privileges
from tests.single.runs.starting import ENVIRONMENT, kept, settings, start


def test_names_of_jobs_that_start_in_the_same_second_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(strftime=lambda form: "20260101-000000"))
    names = {directory_name("../resnet 18", "digits") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("20260101-000000-.._resnet_18-digits-") and "/" not in name for name in names)


def test_the_name_of_a_model_of_many_layers_can_be_a_directorys(tmp_path: Path) -> None:
    name = directory_name("mlp-" + "x".join(["512"] * 100), "my_package." * 50 + "photos:make", "coherence")
    (tmp_path / name).mkdir()
    assert "-mlp-512x512x" in name and "-my_package.my_package." in name and "-coherence-" in name


def test_a_run_keeps_what_it_is_privately_and_its_paths_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    cached = {"cache": "on", "cache_dir": "/cache", "augment": "none"}
    try:
        record = start(tmp_path / "runs" / "a", data="imagefolder", data_dir="photos", **cached, weights="w.pt")
    finally:
        os.umask(before)
    record.log("a line")
    record.close()
    held, environment = kept(tmp_path / "runs" / "a")
    assert held["data"]["data_dir"] == str(tmp_path / "photos") and held["cache"]["cache_dir"] == "/cache"
    assert held["model"]["weights"] == str(tmp_path / "w.pt") and held["strategy"]["strategy"] == "replicas"
    assert environment == ENVIRONMENT
    assert (tmp_path / "runs" / "a" / "log.txt").read_text().endswith(" a line\n")
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "runs" / "a").iterdir()} == {0o600}


def test_lines_are_on_the_disk_before_a_checkpoint_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, synced = start(tmp_path), []
    record.metrics({"epoch": 0})
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    position = record.position()
    assert position == {"metrics": (tmp_path / "metrics.jsonl").stat().st_size, "decisions": 0}
    assert {(tmp_path / f"{name}.jsonl").stat().st_ino for name in position} <= set(synced)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "log.txt")
    with pytest.raises(RefusedError, match=r"metrics.jsonl cannot be written: "):
        record.position()
    record.close()


def test_a_check_changes_nothing_and_makes_nothing(tmp_path: Path) -> None:
    assert check_directory(tmp_path / "new" / "run", settings(), ENVIRONMENT) == []
    assert os.listdir(tmp_path) == []


HELD = (
    "import sys; from pathlib import Path; from hvfreeze.runs.files import lock_directory;"
    "lock = lock_directory(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_a_directory_belongs_to_one_job_at_a_time_until_its_end(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None and job.stdout.readline() == "held\n"
    before = contents(tmp_path)
    for attempt in (check_directory, open_record_of):
        with pytest.raises(UsageError, match=rf"--run-dir \({tmp_path}\) is in use by process {job.pid} on .*; wait"):
            attempt(tmp_path, settings(), ENVIRONMENT)
    assert contents(tmp_path) == before
    job.kill()
    job.communicate()
    start(tmp_path).close()


def open_record_of(directory: Path, given: Any, environment: Any) -> None:
    open_record(directory, given, environment=environment)


def test_a_resumption_waits_until_the_job_before_it_is_gone(tmp_path: Path) -> None:
    first = start(tmp_path)
    with pytest.raises(UsageError, match="is in use by process"):
        start(tmp_path)
    first.close()
    first.close()
    job = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None and job.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match="is in use by"):
        check_directory(tmp_path, settings(), ENVIRONMENT)
    threading.Timer(0.5, job.kill).start()
    assert check_directory(tmp_path, settings(resume=True), ENVIRONMENT) == []
    job.communicate()


@pytest.mark.parametrize(
    ("host", "resume", "waited"), [("here", True, 12.0), ("elsewhere", True, 150.0), ("elsewhere", False, 0.0)]
)
def test_a_lock_from_another_host_is_waited_for_as_long_as_a_file_server_keeps_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    resume: bool,
    waited: float,
) -> None:
    clock = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(files.socket, "gethostname", lambda: host)
    lock = files.lock_directory(tmp_path)
    monkeypatch.setattr(files.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: clock, sleep=sleep))
    with pytest.raises(UsageError, match=rf"is in use by process \d+ on {host}; wait") as refused:
        check_directory(tmp_path, settings(resume=resume), ENVIRONMENT)
    lock.release()
    assert clock == pytest.approx(waited, abs=files.PAUSE_SECONDS)
    gone = f"; if elsewhere is down for good, remove {tmp_path}/.lock"
    assert str(refused.value).endswith(gone) == (host == "elsewhere")
    assert capsys.readouterr().err.count("waiting up to 150 s") == (waited == 150.0)


def test_a_file_system_without_locks_is_not_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(descriptor: int, operation: int) -> None:
        raise OSError(locking.errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(locking.fcntl, "flock", missing)
    record = start(tmp_path)
    assert "cannot be locked on this file system" in record.notes[0]
    record.close()
    start(tmp_path, resume=True).close()


def test_a_directory_that_others_could_write_to_becomes_private(tmp_path: Path) -> None:
    for mode, after in ((0o777, 0o700), (0o755, 0o755)):
        folder = tmp_path / f"{mode}"
        folder.mkdir()
        folder.chmod(mode)
        start(folder).close()
        assert folder.stat().st_mode & 0o777 == after


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_somebody_else_has_put_there_is_not_used() -> None:
    # Not below pytest's own folder, which others than its owner cannot reach.
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        run.mkdir()
        Path(name).chmod(0o755)
        (run / "checkpoints").symlink_to(name)
        os.chown(run / "checkpoints", NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(UsageError, match=r"contains checkpoints, which belongs to another user \(id 65534\)"):
            start(run)
        with without_privileges(), pytest.raises(UsageError, match=r"belongs to another user \(id 0\)"):
            check_directory(run, settings(), ENVIRONMENT)


def test_where_nothing_can_be_written_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place, said in (
        ("file/run", "file is not a directory; choose another"),
        ("file", "it is not a directory; choose another"),
    ):
        with pytest.raises(UsageError, match=rf"cannot be written: .*{said}"):
            check_directory(tmp_path / place, settings(), ENVIRONMENT)
    with pytest.raises(UsageError, match="cannot be written"):
        open_record(Path("/proc/run"), settings(), environment=ENVIRONMENT)


def test_a_start_that_fails_leaves_no_new_directory_and_an_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes").write_text("mine")
    monkeypatch.setattr(module, "Record", full)
    for name in ("old", "new"):
        with pytest.raises(UsageError, match="cannot be written: No space left"):
            open_record(tmp_path / name, settings(), environment=ENVIRONMENT)
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old" / "notes").read_text() == "mine"
