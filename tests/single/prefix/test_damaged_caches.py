"""The program meets cached files that are damaged, forged or evil, or a disk that is full: same model, file named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from hvfreeze.cache.file.format import NAMES
from hvfreeze.cache.file.hdf5 import find_regions
from tests.program import Outcome, call
from tests.single.cache.test_evil_files import EVIL, FORGED, forge

TRAINING = ["--model", "mlp-16x16", "--train-samples", "64", "--batch-size", "16", "--epochs", "1"]
TRAINING += ["--augment", "none", "--lr", "0.01", "--threads", "1", "--checkpoint-every", "0"]
TRAINING += ["--freeze", "static", "--cut", "2"]


def train(run: Path, *flags: str) -> tuple[Outcome, dict[str, Any]]:
    ended = call("train", *TRAINING, "--run-dir", str(run), *flags)
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    return ended, summary


def flip_a_bit_of_a_row(path: Path) -> None:
    descriptor, regions = find_regions(path, names=NAMES)
    os.close(descriptor)
    content = bytearray(path.read_bytes())
    content[regions["activations"].offset + 100] ^= 4
    path.write_bytes(content)


def evil_storage(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        EVIL["external storage"][0](file, path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of a row": flip_a_bit_of_a_row,
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "forged rows": lambda path: forge(path, FORGED["absurdly many rows"][0]),
    "storage elsewhere": evil_storage,
}


def test_damaged_and_evil_files_are_named_and_their_rows_computed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, truth = train(tmp_path / "truth", "--cache", "off")
    cache = tmp_path / "cache"
    _, first = train(tmp_path / "first", "--cache", "on", "--cache-dir", str(cache))
    assert first["parameter_digest"] == truth["parameter_digest"] and first["cache"]["rows_written"] == 64
    sound = shutil.copytree(cache, tmp_path / "sound")
    _, read = train(tmp_path / "read", "--cache", "on", "--cache-dir", str(cache))
    assert read["cache"]["rows_read"] == 64 and read["cache"]["rows_written"] == 0
    for name, damage in DAMAGES.items():
        shutil.rmtree(cache)
        shutil.copytree(sound, cache)
        victim = max(cache.glob("*.h5"), key=lambda path: path.stat().st_size)
        damage(victim)
        caplog.clear()
        run = tmp_path / name.replace(" ", "-")
        ended, summary = train(run, "--cache", "on", "--cache-dir", str(cache))
        assert ended.returncode == 0, f"{name}: {ended}"
        assert summary["parameter_digest"] == truth["parameter_digest"], name
        told = ended.stdout + ended.stderr + caplog.text + (run / "log.txt").read_text()
        assert victim.name in told, f"{name} was not told: {told}"
        assert "TOPSECRET" not in told
    ended, _ = train(tmp_path / "stop", "--cache", "on", "--cache-dir", str(cache), "--cache-failure", "stop")
    assert ended.returncode == 3 and len(ended.messages) == 1 and victim.name in ended.messages[0], str(ended)


def test_a_run_goes_on_without_a_cache_that_its_disk_has_no_room_for(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        _, truth = train(tmp_path / "truth", "--cache", "off")
        ended, summary = train(tmp_path / "run", "--cache", "on", "--cache-dir", str(disk / "cache"))
        assert ended.returncode == 0, str(ended)
        assert summary["parameter_digest"] == truth["parameter_digest"]
        assert not [path for path in disk.rglob("*") if path.suffix == ".h5" or path.suffix == ".tmp"]
        strict = ["--cache", "on", "--cache-dir", str(disk / "cache"), "--cache-failure", "stop"]
        ended, _ = train(tmp_path / "strict", *strict)
        assert ended.returncode == 3 and len(ended.messages) == 1 and "Traceback" not in ended.stderr, str(ended)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
