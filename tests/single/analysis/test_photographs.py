"""Photographs of several megapixels, how they are measured, and the page that is made of the rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from analysis import photographs
from analysis.parts import measured_rank
from analysis.parts.photographs import make_photographs
from analysis.photographs import BEFORE, MEASURES, NOW, PRESETS, Finished, Planned, lines_of, phases_of, planned, ratio
from analysis.sweeps.pages import claims
from hvfreeze.data import reading
from hvfreeze.data.reading import is_reduced
from tests.single.analysis.runs_material import fail
from tests.single.analysis.test_pages import MOST_WORDS, assert_readable

SIZE = (1040, 780)


def made_lines() -> list[dict[str, Any]]:
    """A line for each run of the preset."""
    used = {"kernel_seconds": [1.0, 2.0], "peak_bytes": [10**9, 2 * 10**9], "commit": "abc", "machine": "one"}
    phases = {"launch": 1.0, "start": 2.0, "headers": 0.5, "decoding": 9.0, "fine-tuning": 30.0, "evaluation": 3.0}
    own: dict[str, dict[str, Any]] = {
        "allocator": {"steps": 30},
        "command": {"phases": phases, "predict_start": 3.0, "predict_seconds": 12.0},
        "large": {"steps": [3.0, 3.1, 2.9]},
    }
    return [
        {**asdict(run), "seconds": (40.0 if run.way == BEFORE else 30.0) + run.number, **used, **own.get(run.part, {})}
        for run in planned(PRESETS["reduced"])
    ]


def test_photographs_are_made_once_in_both_sizes_with_noise(tmp_path: Path) -> None:
    for number in range(10):
        place = tmp_path / "source" / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").rotate(90 * number).resize((100, 100)).save(place / f"{number}.jpg")
    out = tmp_path / "made"
    make_photographs(tmp_path / "source", out, count=10, size=SIZE)
    large, small = (sorted((out / kind).glob("*/*/*.jpg")) for kind in ("large", "small"))
    names = [[path.relative_to(path.parents[2]) for path in paths] for paths in (large, small)]
    assert names[0] == names[1] and len(large) == 10
    assert [path.parts[-3] for path in large].count("test") == 2
    with Image.open(large[0]) as image, Image.open(small[0]) as other:
        assert image.size == SIZE and min(other.size) == 256
        assert is_reduced(image, 32) and image.getexif()[0x0112] == 1
    before = large[0].stat().st_mtime_ns
    make_photographs(tmp_path / "source", out, count=10, size=SIZE)
    assert large[0].stat().st_mtime_ns == before


def test_the_ways_of_a_pair_follow_each_other_and_every_part_is_measured() -> None:
    runs = planned(PRESETS["reduced"])
    assert {run.part for run in runs} == set(MEASURES)
    own = [(run.number, run.way) for run in runs if run.part == "allocator" and run.name == "ResNet-18"]
    assert own[:4] == [(0, BEFORE), (0, NOW), (1, BEFORE), (1, NOW)] and len(own) == 10


def test_finished_runs_are_skipped_and_parts_are_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Planned] = []

    def measure(run: Planned, site: object) -> dict[str, Any]:
        asked.append(run)
        return {"seconds": 1.0}

    monkeypatch.setattr(photographs, "MEASURES", dict.fromkeys(MEASURES, measure))
    monkeypatch.setattr(photographs, "make_photographs", lambda *given, **more: None)
    words = ["--preset", "smoke", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert photographs.main([*words, "--only", "decoding"]) == 0
    assert {run.part for run in asked} == {"decoding"}
    assert photographs.main(words) == 0
    kept = [json.loads(line) for line in (tmp_path / "measured.jsonl").read_text().splitlines()]
    assert len(kept) == len(asked) == len(set(asked)) == len(planned(PRESETS["smoke"]))
    assert all(line["commit"] and line["finished"] for line in kept)
    with pytest.raises(SystemExit):
        photographs.main(["--out", str(tmp_path)])
    assert "--data-dir and --weights must be given" in capsys.readouterr().err


def test_a_run_that_fails_is_told_with_its_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photographs, "follow", fail)
    monkeypatch.setattr(photographs, "make_photographs", lambda *given, **more: None)
    words = ["--preset", "smoke", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert photographs.main([*words, "--only", "large"]) == 3
    assert "ended with exit code 1: no memory" in capsys.readouterr().err


def test_ratios_are_medians_of_pairs() -> None:
    lines = lines_of(made_lines(), "allocator", "ResNet-18")
    found = ratio(lines[:-1], "allocator", "ResNet-18", lambda line: float(line["seconds"]))
    assert found.n == 4 and found.low <= found.mean <= found.high
    assert found.mean == pytest.approx((31 / 41 + 32 / 42) / 2)
    assert ratio(lines, "allocator", "other", lambda line: 1.0).n == 0


def test_the_phases_of_a_command_add_up_to_its_time(tmp_path: Path) -> None:
    def spent(**seconds: float) -> dict[str, float]:
        return {**dict.fromkeys(("forward", "optimizer", "checkpoint", "evaluate"), 0.0), **seconds}

    metrics = [
        {"verb": "probe", "seconds": spent(optimizer=2.0)},
        {"epoch": 0, "seconds": spent(forward=5.0, optimizer=1.0, checkpoint=0.5)},
        {"verb": "solve", "seconds": spent(forward=4.0, optimizer=3.0)},
        {"verb": "finish", "seconds": spent(evaluate=6.0)},
    ]
    summary = {"set_up_seconds": {"start": 2.0, "decoding": 7.0}, "seconds": {"checkpoint": 0.75}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = phases_of(Finished(40.0, [], tmp_path))
    assert sum(found.values()) == pytest.approx(40)
    known = {"trial": 2, "fine-tuning": 6, "features": 4, "fit": 3, "evaluation": 6, "saving": 0.75, "decoding": 7}
    assert {name: found[name] for name in known} == known


def test_the_page_has_what_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / photographs.NAME
    folder.mkdir()
    (folder / "measured.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made_lines()))
    text = photographs.PAGE.text(tmp_path)
    found = list(claims(text))
    assert len(found) == 3 + 2 + 1 + 2
    assert all("n = " in answer and len(answer.split()) <= MOST_WORDS for _, _, answer in found)
    assert "0.76x (0.75 to 0.77, n = 5)" in text
    (figure,) = photographs.PAGE.drawings(tmp_path).values()
    assert_readable(figure, "command")
    some = [json.dumps(line) + "\n" for line in made_lines() if line["part"] == "decoding"]
    (folder / "measured.jsonl").write_text("".join(some))
    assert "## Allocator" not in photographs.PAGE.text(tmp_path) and photographs.PAGE.drawings(tmp_path) == {}


def test_a_rank_runs_a_program_with_the_switches_and_writes_what_it_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def program(words: list[str]) -> int:
        seen.append((words, reading.WHOLE_SIDE > 10**6))
        return 5

    monkeypatch.setattr(measured_rank.importlib, "import_module", lambda name: SimpleNamespace(main=program))
    monkeypatch.setattr(measured_rank, "keep_memory", lambda: seen.append("kept"))
    monkeypatch.setattr(reading, "WHOLE_SIDE", reading.WHOLE_SIDE)
    assert measured_rank.main([str(tmp_path), "some.module", "train", "--epochs", "1"]) == 5
    assert measured_rank.main(["--default-allocator", "--whole-images", str(tmp_path), "some.module"]) == 5
    assert seen == ["kept", (["train", "--epochs", "1"], False), ([], True)]
    assert json.loads((tmp_path / "0.json").read_text())["peak_bytes"] > 0
