"""A run directory that holds another run or cannot be used is refused and left alone; a run's own is private."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hvfreeze.data.folders import class_folder_of
from hvfreeze.errors import RefusedError
from hvfreeze.runs.reading import load_run
from tests.program import call, contents, save_photos, spawn, without_privileges
from tests.single.refusing import SMALL, refused


def test_a_directory_that_holds_another_run_is_left_alone(finished: Path) -> None:
    before = contents(finished)
    refused(call("train", *SMALL, "--run-dir", str(finished)), 2, "--run-dir", str(finished), "--resume")
    again = ["train", *SMALL, "--run-dir", str(finished), "--resume"]
    refused(call(*again, "--lr", "0.5"), 3, str(finished), "lr: 0.1 before, 0.5 now")
    refused(call(*again, "--seed", "1", "--epochs", "3"), 3, "seed: 0 before, 1 now")
    assert contents(finished) == before


def test_a_run_whose_configuration_is_damaged_is_not_resumed(tmp_path: Path) -> None:
    text = b"optimizer: {lr: ["
    (tmp_path / "config.yaml").write_bytes(text)
    refused(call("train", *SMALL, "--run-dir", str(tmp_path), "--resume"), 3, "config.yaml", "damaged")
    assert contents(tmp_path) == {"config.yaml": text}


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "run"):
        refused(call("train", *SMALL, "--run-dir", str(path)), 2, "--run-dir", str(path), "choose another")
    assert file.read_text() == "mine"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with without_privileges():
        refused(call("train", *SMALL, "--run-dir", str(closed)), 2, str(closed), "Permission denied")
        refused(call("train", *SMALL, "--run-dir", str(closed / "run")), 2, str(closed), "Permission denied")
    assert not contents(closed)


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        refused(call("train", *SMALL, "--run-dir", str(tmp_path / "run")), 2, "--run-dir", "Read-only file system")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_each_kind_of_refusal_is_the_exit_code_of_the_process(run_dir: Path, tmp_path: Path) -> None:
    refused(spawn("trian", "--run-dir", str(run_dir)), 2, "'trian'", "'train'")
    refused(spawn("runs", str(tmp_path / "gone")), 3, "gone cannot be read")


def test_a_run_keeps_its_files_to_its_owner_and_no_secret_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, secret = tmp_path / "run", "hunter2-5f1d"
    monkeypatch.setenv("FAKE_API_KEY", secret)
    outcome = call("train", *SMALL, "--run-dir", str(folder))
    assert outcome.returncode == 0, str(outcome)
    modes = {str(path.relative_to(tmp_path)): oct(path.stat().st_mode & 0o777) for path in [folder, *folder.rglob("*")]}
    wanted = {name: oct(0o700 if (tmp_path / name).is_dir() else 0o600) for name in modes}
    assert modes == wanted
    names = {"config.yaml", "environment.json", "metrics.jsonl", "decisions.jsonl", "summary.json", "checkpoints"}
    assert names <= {os.path.basename(name) for name in modes}
    for path, content in contents(folder).items():
        assert secret.encode() not in (content or b""), path
        assert b"FAKE_API_KEY" not in (content or b""), path
    assert secret not in outcome.stdout + outcome.stderr


def test_a_folder_of_images_is_no_run_directory(tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos")
    before = contents(tmp_path)
    for place in (photos, photos / "train", photos / "train" / "a"):
        for more in ([], ["--resume"]):
            outcome = call("auto", str(photos), "--run-dir", str(place), *more)
            refused(outcome, 2, f"--run-dir ({place}) holds images (", "; choose another")
    assert contents(tmp_path) == before
    note = tmp_path / "note"
    note.mkdir()
    (note / "slurm.out").write_text("a job's output may be there before the run")
    assert call("train", *SMALL, "--run-dir", str(note)).returncode == 0


def test_a_folder_that_holds_runs_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("")
    refused(
        call("train", *SMALL, "--run-dir", str(tmp_path)),
        2,
        f"({tmp_path}) holds other runs (a); name a new folder in it",
    )


def test_a_run_directory_does_not_become_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = save_photos(tmp_path / "photos")
    for data, place, root in (
        (photos, photos / "train" / "run", photos / "train"),
        (photos / "train", photos / "train" / "runs" / "a", photos / "train"),
        (photos / "train", None, photos / "train"),
    ):
        monkeypatch.chdir(photos / "train")
        before = contents(tmp_path)
        outcome = call("auto", str(data), *([] if place is None else ["--run-dir", str(place)]))
        refused(outcome, 2, f"is in {root}, whose folders are the classes of the data; choose another")
        assert contents(tmp_path) == before
    # The classes are in photos/train and photos/test alone.
    assert class_folder_of(photos / "runs" / "a", photos) is None
    assert class_folder_of(tmp_path / "run", photos) is class_folder_of(tmp_path, tmp_path / "absent" / "data") is None


def test_a_run_of_another_user_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    with without_privileges():
        for command, *more in (["predict", "a.png"], ["evaluate"]):
            refused(call(command, str(run), *more), 3, str(run), "cannot be used (Permission denied); ask its owner")
        with pytest.raises(RefusedError, match=r"run cannot be read \(Permission denied\)"):
            load_run(run)
