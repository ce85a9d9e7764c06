"""Data that a run cannot use: absent, unreadable, damaged or of several sizes; refused, and nothing is written."""

from __future__ import annotations

import os
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.program import NOBODY, OFFLINE, Outcome, call, contents, save_photos, without_privileges
from tests.single.refusing import SMALL, refused

TRAIN_ON = ["train", "--model", "mlp-16x16", "--batch-size", "8", "--epochs", "1", "--threads", "1"]
TRAIN_ON += ["--data", "imagefolder", "--data-dir"]


def train_on(folder: Path, run_dir: Path) -> Outcome:
    return call(*TRAIN_ON, str(folder), "--run-dir", str(run_dir))


def test_a_data_folder_that_is_absent_or_empty_is_refused(run_dir: Path, tmp_path: Path) -> None:
    refused(train_on(tmp_path / "absent", run_dir), 3, str(tmp_path / "absent"), "name an existing folder")
    (tmp_path / "empty").mkdir()
    refused(train_on(tmp_path / "empty", run_dir), 3, str(tmp_path / "empty"), "class folders")
    photos = save_photos(tmp_path / "photos")
    for image in (photos / "train" / "b").iterdir():
        image.unlink()
    refused(train_on(photos, run_dir), 3, str(photos / "train" / "b"), "no image")


def test_a_data_folder_that_may_not_be_read_is_refused() -> None:
    # Not below pytest's own folder, which others than its owner cannot reach.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_dir, photos = folder / "run", save_photos(folder / "photos")
        run_dir.mkdir()
        folder.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(run_dir, NOBODY, NOBODY)
        (photos / "train" / "a").chmod(0)
        with without_privileges():
            outcome = train_on(photos, run_dir)
        (photos / "train" / "a").chmod(0o700)
        refused(outcome, 3, str(photos / "train" / "a"), "cannot be read (Permission denied)")
        assert not contents(run_dir)


def test_a_damaged_image_is_named_before_training(run_dir: Path, tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos")
    image = photos / "train" / "b" / "17.png"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    refused(train_on(photos, run_dir), 3, str(image), "not an intact image")
    image.write_bytes(b"")
    refused(train_on(photos, run_dir), 3, str(image), "not an intact image")


def test_a_class_of_which_no_image_is_left_is_told(tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos", classes="abc")
    for image in (photos / "train" / "b").iterdir():
        image.write_bytes(b"")
    outcome = call(*TRAIN_ON, str(photos), "--skip-bad", "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 0 and "note: class b has no readable training image" in outcome.stdout, str(outcome)


def test_a_damaged_image_that_is_streamed_is_named_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvfreeze.samples.opening.memory_budget", lambda local_size: 0)
    photos = save_photos(tmp_path / "photos")
    image = photos / "test" / "b" / "02.png"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    refused(train_on(photos, tmp_path / "run"), 3, str(image), "not an intact image")
    image.write_bytes(whole)
    again = call(*TRAIN_ON, str(photos), "--run-dir", str(tmp_path / "run"), "--resume")
    assert again.returncode == 0, str(again)


def test_data_that_is_absent_is_refused_where_nothing_can_be_downloaded(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    # What was opened before knows no proxy.
    monkeypatch.setattr(urllib.request, "_opener", None)
    empty = tmp_path / "data"
    outcome = call("train", *SMALL, "--data", "cifar10", "--data-dir", str(empty), "--run-dir", str(run_dir))
    refused(outcome, 3, "CIFAR10", str(empty), "cannot be downloaded", "--data-dir", "--data digits")
    assert not list(empty.iterdir())
