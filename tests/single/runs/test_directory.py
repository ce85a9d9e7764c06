from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvfreeze.config.tree import from_dict, to_dict
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.runs import directory as module
from hvfreeze.runs import lock as locking
from hvfreeze.runs.directory import check_directory, directory_name, open_record
from hvfreeze.runs.record import Record
from tests.program import NOBODY, contents, without_privileges

ENVIRONMENT: dict[str, Any] = {
    "size": 2,
    "hosts": ["a", "a"],
    "processor": "Some CPU",
    "capability": "AVX2",
    "threads": 2,
    "versions": {"torch": "2.13.0", "numpy": "2.0.0", "h5py": "3.16.0"},
}


def settings(**flags: Any) -> dict[str, dict[str, Any]]:
    return to_dict(from_dict({"run_dir": "somewhere", **flags}))


def start(directory: Path, environment: dict[str, Any] | None = None, **flags: Any) -> Record:
    """Begin a run, as rank 0 does."""
    check_directory(directory, settings(**flags), environment or ENVIRONMENT)
    record = open_record(directory, settings(**flags), environment=environment or ENVIRONMENT)
    record.begin()
    return record


def changed(**changes: Any) -> dict[str, Any]:
    environment = copy.deepcopy(ENVIRONMENT)
    environment["versions"].update(changes.pop("versions", {}))
    return {**environment, **changes}


def kept(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the environment that a directory holds."""
    held = yaml.safe_load((directory / "config.yaml").read_text())
    return held, json.loads((directory / "environment.json").read_text())


def test_names_of_jobs_that_start_in_the_same_second_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "strftime", lambda form: "20260101-000000")
    names = {directory_name("../resnet 18", "digits") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("20260101-000000-.._resnet_18-digits-") and "/" not in name for name in names)


def test_a_run_keeps_what_it_is_privately_and_its_paths_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        record = start(tmp_path / "runs" / "a", data_dir="photos", cache_dir="/cache", weights="w.pt")
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


def test_a_check_changes_nothing_and_makes_nothing(tmp_path: Path) -> None:
    assert check_directory(tmp_path / "new" / "run", settings(), ENVIRONMENT) == []
    assert os.listdir(tmp_path) == []


HELD = (
    "import sys; from pathlib import Path; from hvfreeze.runs.lock import Lock;"
    "lock = Lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
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
    start(tmp_path).close()
    job = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None and job.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match="is in use by"):
        check_directory(tmp_path, settings(), ENVIRONMENT)
    threading.Timer(0.5, job.kill).start()
    assert check_directory(tmp_path, settings(resume=True), ENVIRONMENT) == []
    job.communicate()


def test_a_record_that_is_closed_lets_others_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    first = start(tmp_path)
    with pytest.raises(UsageError, match="is in use by process"):
        start(tmp_path, resume=True)
    first.close()
    first.close()
    start(tmp_path, resume=True).close()


def test_a_file_system_without_locks_is_not_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(descriptor: int, operation: int) -> None:
        raise OSError(locking.errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(locking.fcntl, "flock", missing)
    record = start(tmp_path)
    assert "cannot be locked on this file system" in record.notes[0]
    record.close()
    start(tmp_path, resume=True).close()


def test_a_directory_that_others_could_write_to_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "read").mkdir()
    (tmp_path / "read").chmod(0o755)
    start(tmp_path / "open").close()
    start(tmp_path / "read").close()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "read")] == [0o700, 0o755]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_somebody_else_has_put_there_is_not_used() -> None:
    # Not below pytest's own folder, which others than its owner cannot reach.
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        run.mkdir()
        Path(name).chmod(0o755)
        (run / "checkpoints").symlink_to(name)
        os.chown(run / "checkpoints", NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(UsageError, match=r"holds checkpoints, which belongs to another user \(id 65534\)"):
            start(run)
        with without_privileges(), pytest.raises(UsageError, match=r"belongs to another user \(id 0\)"):
            check_directory(run, settings(), ENVIRONMENT)


def test_where_nothing_can_be_written_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"cannot be written: .*/file is no folder; choose another"):
        check_directory(tmp_path / "file" / "run", settings(), ENVIRONMENT)
    with pytest.raises(UsageError, match="it is no folder"):
        check_directory(tmp_path / "file", settings(), ENVIRONMENT)
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


INEXACT = {
    "threads": ({}, {"threads": 3}, "threads: 2 there, 3 here"),
    "threads of a rank": ({}, {"threads": [2, 3]}, r"threads: 2 there, \[2, 3\] here"),
    "processor": ({}, {"processor": "Another CPU"}, "processor: Some CPU there, Another CPU here"),
    "kernels": ({}, {"capability": "AVX512"}, "capability: AVX2 there"),
    "torch": ({}, {"versions": {"torch": "2.12.0"}}, "torch: 2.13.0 there, 2.12.0 here"),
    "cache type": ({"cache": "auto", "cache_dtype": "float16"}, {}, "cached as: exact values there, float16"),
}


@pytest.mark.parametrize(("flags", "environment", "reason"), INEXACT.values(), ids=INEXACT)
def test_what_would_not_go_on_exactly_is_refused_or_allowed_and_recorded(
    tmp_path: Path, flags: dict[str, Any], environment: dict[str, Any], reason: str
) -> None:
    start(tmp_path, augment="views:2").close()
    before, flags = contents(tmp_path), {"augment": "views:2", "resume": True, **flags}
    now = changed(**environment)
    with pytest.raises(RefusedError, match=f"cannot go on bit for bit .*{reason}.*--resume-inexact"):
        check_directory(tmp_path, settings(**flags), now)
    assert contents(tmp_path) == before
    record = start(tmp_path, now, **flags, resume_inexact=True)
    record.close()
    held, ran_on = kept(tmp_path)
    assert [note for note in record.notes if note.startswith("not as before: ")]
    assert len(ran_on["resumed"]) == 1 and ran_on["resumed"][0]["changed"]
    assert held["cache"]["cache_dtype"] == flags.get("cache_dtype", "native")
    # From then on this is what the run is, and its history stays.
    assert start(tmp_path, now, **flags).close() is None
    assert kept(tmp_path)[1]["resumed"] == ran_on["resumed"]


def test_a_rounded_cache_is_not_left_out_silently(tmp_path: Path) -> None:
    start(tmp_path, augment="none", cache="on", cache_dtype="bfloat16").close()
    with pytest.raises(RefusedError, match=r"cached as: bfloat16 \(on\) there, exact values here"):
        check_directory(tmp_path, settings(augment="none", cache_dtype="bfloat16", resume=True), ENVIRONMENT)


def test_an_exact_cache_hosts_and_another_size_change_nothing_here(tmp_path: Path) -> None:
    start(tmp_path, augment="none").close()
    now = changed(size=3, threads=9, hosts=["b"] * 3, versions={"h5py": "1.0"})
    flags: dict[str, Any] = {"augment": "none", "resume": True, "cache": "on", "quiet": True, "threads": 7}
    assert check_directory(tmp_path, settings(**flags), now) == []


def test_epochs_may_grow_and_nothing_else_may_change(tmp_path: Path) -> None:
    start(tmp_path, epochs=2).close()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RefusedError, match="epochs: 2 there, 1 here, which must not be fewer"):
        check_directory(tmp_path, settings(epochs=1, resume=True), ENVIRONMENT)
    with pytest.raises(RefusedError, match=r"another run \(lr: 0.1 there, 0.2 here; seed: 0"):
        check_directory(tmp_path, settings(epochs=3, lr=0.2, seed=1, resume=True, resume_inexact=True), ENVIRONMENT)
    record = start(tmp_path, epochs=3, resume=True)
    record.close()
    held, ran_on = kept(tmp_path)
    assert held["optimizer"]["epochs"] == 3 and record.notes == ("not as before: epochs: 2 there, 3 here",)
    assert ran_on["resumed"][0]["changed"] == ["epochs: 2 there, 3 here"]
    assert not (tmp_path / "summary.json").exists()


def test_a_run_from_before_a_setting_existed_is_the_run_with_its_default(tmp_path: Path) -> None:
    start(tmp_path).close()
    held = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del held["strategy"], held["run"]["quiet"], held["data"]["shuffle"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(held))
    assert check_directory(tmp_path, settings(resume=True), ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "a: &a [x, x]\nb: [*a, *a]"),
        ("config.yaml", "[" * 100000),
        ("config.yaml", "{"),
        ("config.yaml", "- a"),
        ("config.yaml", "optimizer: 3"),
        ("environment.json", '{"size": 2, "versions"'),
        ("environment.json", "[" * 100000),
    ],
)
@pytest.mark.timeout(20)
def test_a_damaged_run_is_refused_by_the_files_name(tmp_path: Path, name: str, text: str) -> None:
    start(tmp_path).close()
    (tmp_path / name).write_text(text)
    with pytest.raises(RefusedError, match=f"{name} is damaged"):
        check_directory(tmp_path, settings(resume=True), ENVIRONMENT)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(RefusedError, match="no plain file"):
        check_directory(tmp_path, settings(resume=True), ENVIRONMENT)
