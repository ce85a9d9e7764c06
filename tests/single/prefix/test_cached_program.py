"""The program's own runs with a cache, started alone: what they may read, and what they must refuse."""

from __future__ import annotations

import gc
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from hvfreeze.__main__ import main
from hvfreeze.cache.planning import Plan, make_plan
from hvfreeze.comm import agreement
from hvfreeze.comm.world import World
from hvfreeze.prefix import cache_decision
from hvfreeze.strategies.data_parallel import DataParallel

TRAIN = (
    *("train", "--data", "digits", "--train-samples", "80", "--validation-fraction", "0.2", "--batch-size", "16"),
    *("--augment", "none", "--lr", "0.01", "--threads", "1", "--checkpoint-every", "0"),
)
RESNET = ("--model", "resnet20", "--image-size", "16")
SQUEEZENET = ("--model", "squeezenet1_1", "--freeze", "static", "--cut", "1", "--epochs", "2", "--image-size", "32")


def train(run: Path, *flags: str) -> dict[str, Any]:
    """Train in `run` and return its summary."""
    assert main([*TRAIN, *flags, "--run-dir", str(run)]) == 0
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def test_rows_of_a_prefix_that_ends_elsewhere_are_named_and_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = ("--cache", "on", "--cache-dir", str(tmp_path / "cache"))
    # The same parameters before the cut, which is one operation without any further on.
    before, after = (("--blocks", f"features.0,features.{start},classifier") for start in (2, 3))
    first = train(tmp_path / "first", *SQUEEZENET, *before, *cached)
    assert first["cache"]["rows_read"] > 0
    files = set((tmp_path / "cache").iterdir())
    assert "not used" not in capsys.readouterr().out
    truth = train(tmp_path / "truth", *SQUEEZENET, *after)
    other = train(tmp_path / "other", *SQUEEZENET, *after, *cached)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not used" in line]
    assert len(lines) == 2, "one for each split"
    assert all(
        f"cache file {tmp_path / 'cache'}/activations-" in line and "operations (file " in line for line in lines
    )
    assert other["parameter_digest"] == truth["parameter_digest"]
    assert other["cache"]["rows_written"] == first["cache"]["rows_written"] > 0
    assert len(set((tmp_path / "cache").iterdir())) == 2 * len(files)
    again = train(tmp_path / "again", *SQUEEZENET, *before, *cached)
    assert again["parameter_digest"] == first["parameter_digest"]
    assert again["cache"]["rows_written"] == 0, "the first run's own rows are still good"


def photographs(folder: Path) -> Path:
    """Write scans of four handwritten digits as class folders: 48 to train on, 16 to test with."""
    digits = load_digits()
    for number in range(4):
        scans = np.flatnonzero(digits.target == number)[:16]
        for place, index in enumerate(scans):
            path = folder / ("train" if place < 12 else "test") / str(number) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = (digits.images[index] * 15).astype(np.uint8)
            Image.fromarray(pixels).resize((32, 32)).convert("RGB").save(path)
    return folder


def test_votes_views_and_an_automatic_cache_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # In three blocks and a head, and with an eta that lets the cut move.
    command = (
        *("train", "--data", "imagefolder", "--data-dir", str(photographs(tmp_path / "photos")), "--image-size", "16"),
        *(
            "--model",
            "resnet20",
            "--lr",
            "0.02",
            "--schedule",
            "cosine",
            "--freeze",
            "gradient-norm",
            "--augment",
            "views:2",
        ),
        *("--blocks", "layer2,layer3,fc", "--eta-max", "10", "--batch-size", "16", "--threads", "1", "--epochs", "8"),
        *("--augment", "views:2", "--checkpoint-every", "0"),
    )
    found = {}
    for mode in ("auto", "off"):
        run = tmp_path / mode
        assert main([*command, "--cache", mode, "--run-dir", str(run)]) == 0
        found[mode] = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "auto" / "metrics.jsonl").read_text().splitlines()]
    moving = {line["cut"]: line["cache"]["rows_written"] for line in lines if line["cut"] in (1, 2)}
    assert moving, "the cut never stood before its deepest place: this test says nothing"
    assert max(moving.values()) > 0, "rows are worth keeping although the cut will move on"
    assert found["auto"]["cache"]["rows_written"] > 0 and found["auto"]["cache"]["rows_read"] > 0, found["auto"]
    assert found["auto"]["cache"]["exact"] is True
    assert found["auto"]["parameter_digest"] == found["off"]["parameter_digest"]
    assert "saves" in capsys.readouterr().out


def test_what_is_cached_already_is_read_in_the_last_epoch_and_without_any_budget(tmp_path: Path) -> None:
    frozen = (*RESNET, "--freeze", "static", "--cut", "3", "--epochs", "1")
    kept = ("--cache-dir", str(tmp_path / "cache"))
    nothing = train(tmp_path / "nothing", *frozen, *kept, "--cache", "auto")
    assert nothing["cache"]["rows_written"] == 0, "no row would be read again"
    on = train(tmp_path / "on", *frozen, *kept, "--cache", "on")
    assert on["cache"]["rows_written"] == 64
    again = train(tmp_path / "again", *frozen, *kept, "--cache", "auto", "--cache-limit", "1K")
    assert again["cache"]["rows_read"] == 64 and again["cache"]["rows_written"] == 0
    assert again["cache"]["exact"] is True and again["parameter_digest"] == on["parameter_digest"]
    assert again["cache"]["seconds_saved_predicted"] > 0


def test_no_file_of_a_cache_stays_open_after_the_run(tmp_path: Path) -> None:
    gc.disable()
    try:
        train(tmp_path / "run", *RESNET, *("--freeze", "static", "--cut", "3", "--epochs", "2", "--cache", "on"))
        opened = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    finally:
        gc.enable()
    assert [name for name in opened if name.startswith(str(tmp_path))] == []


def test_a_run_that_could_read_no_row_measures_no_disk_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*args: object, **others: object) -> None:
        raise AssertionError("the directory was measured")

    monkeypatch.setattr(cache_decision, "rates_of", measured)
    frozen = (*RESNET, "--freeze", "static", "--cut", "3", "--epochs", "1")
    found = train(tmp_path / "run", *frozen, "--cache", "auto", "--augment", "views:2")
    line = "cache auto at cut 3: none of 2 views will be read again in the remaining 1.0 epochs"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert found["cache"]["rows_written"] == 0


@pytest.mark.parametrize("flags", [(), ("--cache-failure", "stop")])
def test_an_impossible_directory_is_refused_before_training(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place, run = tmp_path / "file" / "cache", tmp_path / "run"
    assert main([*TRAIN, *SQUEEZENET, "--cache", "on", "--cache-dir", str(place), *flags, "--run-dir", str(run)]) == 3
    assert f"cache directory {place} cannot be used (Not a directory)" in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()


def lose_directory(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Put a file in the directory's place once the first step is made."""
    step = DataParallel.step

    def once(self: DataParallel, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(DataParallel, "step", step)
        shutil.rmtree(place)
        place.write_text("")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DataParallel, "step", once)


MOVING = ("--model", "squeezenet1_1", "--freeze", "linear", "--epochs", "3", "--image-size", "32", "--cache", "on")


def test_a_directory_that_is_lost_during_training_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "cache"
    truth = train(tmp_path / "truth", *MOVING[:-1], "off")
    lose_directory(monkeypatch, place)
    lost = train(tmp_path / "lost", *MOVING, "--cache-dir", str(place))
    assert lost["parameter_digest"] == truth["parameter_digest"] and lost["final_cut"] > 0
    assert lost["cache"]["rows_written"] == 0
    lines = [record.getMessage() for record in caplog.records if "continuing without" in record.getMessage()]
    assert 0 < len(lines) <= 2 and all(str(place) in line for line in lines), "at most one for each split"


def test_a_directory_that_is_lost_stops_a_run_that_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "cache"
    lose_directory(monkeypatch, place)
    flags = ("--cache-dir", str(place), "--cache-failure", "stop", "--run-dir", str(tmp_path / "stopped"))
    assert main([*TRAIN, *MOVING, *flags]) == 3
    assert str(place) in capsys.readouterr().err


def test_a_cut_whose_rows_were_not_worth_keeping_is_looked_at_again_in_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declined: list[Plan] = []

    def hesitant(*args: Any, **kwargs: Any) -> Plan:
        plan = make_plan(*args, **kwargs)
        if len(declined) < 4:
            # Both splits, when the cut begins and when the first epoch does.
            declined.append(plan)
            return replace(plan, use=False)
        return plan

    monkeypatch.setattr(cache_decision, "make_plan", hesitant)
    frozen = (*RESNET, "--freeze", "static", "--cut", "3", "--epochs", "4")
    found = train(tmp_path / "run", *frozen, "--cache", "auto")
    assert len(declined) == 4
    assert found["cache"]["rows_written"] == 64 and found["cache"]["rows_read"] == 64 * 2
    assert "at cut 3, decided again: saves" in capsys.readouterr().out


def test_ranks_meet_between_the_forwards_that_fill_in_missing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = ("--cache", "on", "--cache-dir", str(tmp_path / "cache"))
    train(tmp_path / "some", *SQUEEZENET, *cached, "--train-samples", "50")
    names: list[str] = []

    def gather(world: World, value: Any, *, name: str) -> list[Any]:
        names.append(name)
        return [value]

    monkeypatch.setattr(World, "allgather_object", gather)
    monkeypatch.setattr(agreement, "ROUND_SECONDS", 0.0)
    found = train(tmp_path / "all", *SQUEEZENET, *cached)
    assert 0 < found["cache"]["rows_written"] <= 48
    forwards = -(-found["cache"]["rows_written"] // 16)
    # One more each time: when the cut was taken, and at the beginning of two epochs.
    assert names.count("verdict.rounds.cache.train") == forwards + 3


def test_samples_dealt_out_anew_to_one_rank_are_its_own_and_cached(tmp_path: Path) -> None:
    found = {
        mode: train(tmp_path / mode, *SQUEEZENET, "--shuffle", "global", "--cache", mode) for mode in ("off", "on")
    }
    assert found["on"]["parameter_digest"] == found["off"]["parameter_digest"]
    assert found["on"]["cache"]["rows_read"] > 0


def test_blocks_that_look_at_neighbours_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "by_batch.py").write_text(
        "from torch import nn\n"
        "def make(num_classes):\n"
        "    first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU())\n"
        "    return nn.Sequential(first, nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(4704, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = (*TRAIN, "--model", "by_batch:make", "--freeze", "static", "--cut", "1", "--epochs", "1")
    assert main([*flags, "--cache", "on", "--cache-dir", str(tmp_path), "--run-dir", str(tmp_path / "run")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1 and "normalise with batch statistics" in said[0] and "--cache off" in said[0], said
    assert main([*flags, "--run-dir", str(tmp_path / "plain")]) == 0
