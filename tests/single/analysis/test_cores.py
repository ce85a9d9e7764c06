"""Scaling over the cores of one machine: who runs where, what is planned, and what the kept runs say."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis import cores
from analysis.parts import copies, pinned
from analysis.sweeps.presets import REDUCED
from hvfreeze.errors import UsageError


def test_a_rank_has_the_first_thread_of_a_core_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for thread in range(4):
        (tmp_path / f"cpu{thread}").write_text(f"{thread % 2},{thread % 2 + 2}\n")
    monkeypatch.setattr(pinned, "TOPOLOGY", str(tmp_path / "cpu{}"))
    # Of thread 9 the system does not say whose it is.
    assert pinned.cores({0, 1, 2, 3, 9}) == [0, 1, 9]
    taken: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, threads: taken.append(threads))
    pinned.pin(1)
    assert taken == [{2}]
    with pytest.raises(UsageError, match=r"rank 2 must have its own core, and there are 2 cores: --ranks"):
        pinned.pin(2)
    with pytest.raises(SystemExit) as left:
        pinned.pin_or_exit(2)
    assert left.value.code == 2
    assert "pinned: error: rank 2 must have its own core" in capsys.readouterr().err


def test_ranks_share_one_batch_or_have_one_each_and_the_most_come_first() -> None:
    planned = cores.runs(replace(REDUCED, ranks=12, seeds=(0,)))
    sizes = {way: [run.ranks for run in planned if run.label.startswith(way)] for way in cores.WAYS}
    assert sizes["full"] == sizes["weak"] == [12, 8, 4, 2, 1] and sizes["copies"] == [12]
    for run in planned:
        images, batch = run.flags["train_samples"], run.flags.get("batch_size")
        if run.label.startswith(("full", "frozen")):
            assert (images, batch) == (cores.STRONG_IMAGES, cores.GLOBAL_BATCH // run.ranks)
        if run.label.startswith("weak"):
            assert (images, batch) == (cores.RANK_IMAGES * run.ranks, cores.RANK_BATCH)
    one, copy = ({run.label: run for run in planned}[label] for label in ("weak-1x", "copies-12x"))
    assert one.flags == copy.flags and copy.program == "analysis.parts.copies"


def test_copies_leave_one_run_with_the_pace_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy 1 begins after copy 0 and is done when copy 0 is; none of them knows of the others."""
    begun = tmp_path / "config.yaml"

    def program(words: list[str]) -> int:
        assert not any(name.startswith("OMPI_") for name in os.environ)
        folder = Path(words[words.index("--run-dir") + 1])
        assert begun.exists()
        folder.mkdir(exist_ok=True)
        pace = 50.0 if folder == tmp_path else 40.0
        (folder / "metrics.jsonl").write_text("".join(f'{{"images_per_second": {pace + i}}}\n' for i in range(2)))
        (folder / "summary.json").write_text('{"seconds": {}}')
        return 0

    monkeypatch.setattr(copies, "main", program)
    monkeypatch.setattr(copies, "time", SimpleNamespace(sleep=lambda seconds: begun.touch()))
    monkeypatch.setattr(copies, "pin_or_exit", lambda rank: None)
    for rank in ("1", "0"):
        monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"})
        assert copies.train(["train", "--run-dir", str(tmp_path), "--resume"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["copies"] == [[50.0, 51.0], [40.0, 41.0]]
    assert not (tmp_path / "copy1").exists()
