"""Broken images: all named in one message, or left out where that is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hvfreeze
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.decoding import find_broken
from hvfreeze.data.images import BrokenImagesError
from hvfreeze.wording import MOST_NAMED
from tests.program import call, save_photos

GONE = "train/a/05.png"
"""A link to a file that is no longer there."""
CIRCLE = "train/a/07.png"
"""A link to itself."""
PIPE = "test/a/02.png"
"""Whoever opens it waits for somebody who writes to it."""
BROKEN = ("train/a/03.png", GONE, CIRCLE, "train/b/17.png", "test/b/01.png", PIPE)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = save_photos(tmp_path / "photos")
    (folder / GONE).unlink()
    (folder / GONE).symlink_to("nowhere.png")
    for name in (CIRCLE, PIPE):
        (folder / name).unlink()
    (folder / CIRCLE).symlink_to(Path(CIRCLE).name)
    os.mkfifo(folder / PIPE)
    for name in set(BROKEN) - {GONE, CIRCLE, PIPE}:
        intact = (folder / name).read_bytes()
        (folder / name).write_bytes(b"no image" if "a" in name else intact[: len(intact) // 2])
    return folder


def test_of_many_broken_images_some_are_named() -> None:
    error = BrokenImagesError([f"{row}.png is not intact (x); remove it" for row in range(MOST_NAMED + 5)])
    assert "0.png is not intact (x); 1.png" in str(error) and "and 5 more;" in str(error)
    again = BrokenImagesError(str(error))
    assert str(again) == str(error), "as it comes from another rank"


def test_every_broken_image_is_found_by_whoever_has_its_share(photos: Path) -> None:
    train = open_data("imagefolder", photos).train
    whole = find_broken(train, workers=2)
    assert sorted(whole) == [3, 5, 7, 24 + 17]
    parts = [find_broken(train, share=share, shares=3) for share in range(3)]
    assert {row: why for part in parts for row, why in part.items()} == whole


def test_a_run_leaves_broken_images_out_where_that_is_asked_for(photos: Path, tmp_path: Path) -> None:
    flags = ("--model", "mlp-16x16", "--data", "imagefolder", "--data-dir", str(photos), "--batch-size", "8")
    flags += ("--epochs", "1", "--threads", "1", "--run-dir", str(tmp_path / "run"))
    refused = call("train", *flags)
    assert refused.returncode == 3 and len(refused.messages) == 1, str(refused)
    assert "6 images cannot be used: " in refused.messages[0] and "not a plain file" in refused.messages[0]
    assert all(str(photos / name) in refused.stderr for name in BROKEN) and "--skip-bad" in refused.stderr
    outcome = call("train", *flags, "--skip-bad")
    assert outcome.returncode == 0 and "6 images cannot be decoded and are left out" in outcome.stdout, str(outcome)
    said = call("evaluate", str(tmp_path / "run")).stdout
    assert "on 6 test samples" in said and "as the run reported" in said
    assert hvfreeze.load_model(tmp_path / "run").classes == ("a", "b")
