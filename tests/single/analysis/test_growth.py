"""Made rows, what they are measured by, and the page that is made of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from analysis import growth
from analysis.growth import AUTO, PRESETS, Planned, missing
from analysis.parts import growth_rows
from analysis.parts.growth_rows import MadeRows, Phases, left_for_solver, solve
from hvfreeze.comm.resources import peak_memory_bytes
from hvfreeze.heads.rows import Chunk
from tests.single.analysis.runs_material import fail

COUNT = 2 * growth_rows.PART + 100


def parts(rank: int, size: int) -> list[Chunk]:
    return list(MadeRows(COUNT, classes=5, rank=rank, size=size).chunks())


def test_which_rows_are_made_does_not_depend_on_the_number_of_ranks() -> None:
    whole = {int(chunk.info.samples[0]): chunk for chunk in parts(0, 1)}
    shared = [chunk for rank in range(2) for chunk in parts(rank, 2)]
    assert sum(len(chunk) for chunk in shared) == COUNT == MadeRows(COUNT, classes=5, rank=0, size=1).count
    for chunk in shared:
        same = whole[int(chunk.info.samples[0])]
        assert torch.equal(chunk.features, same.features) and torch.equal(chunk.info.labels, same.info.labels)
    assert MadeRows(10, classes=5, rank=1, size=2).count == 0


def test_phases_end_with_the_last_row_and_with_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    phases = Phases()
    phases.read(10)
    phases.watch("leave-one-out")
    for number in (0, 0, 1, 2):
        phases.watch(f"pass {number}, 50 %")
    found = phases.seconds()
    assert (found["points"], found["choice"], found["solution"]) == (1, 1, 1)


def test_a_head_is_solved_on_made_rows_and_not_made_again() -> None:
    plan = Planned("made", 1_500, 1, 50)
    found = solve({"rows": 1_500, "classes": 5, "centres": 50, "memory_bytes": 10**9})
    assert found["converged"] and found["accuracy"] > 0.6 and found["centres"] == 50
    assert found["peak_bytes"] <= peak_memory_bytes() and sum(found["seconds"].values()) > 0
    planned = [plan, Planned("made", 1_500, 2, 50)]
    assert list(missing(planned, [{**asdict(plan), **found}])) == planned[1:]


def test_a_million_rows_leave_memory_for_the_solver_within_what_is_promised() -> None:
    largest = PRESETS["full"][-1]
    mine = largest.rows // largest.ranks
    left = left_for_solver(growth.MEMORY_BYTES, mine, growth.CLASSES)
    assert largest.rows == 10**6 and left > 2 * 10**9
    assert left + mine * 4 * growth_rows.WIDTH < growth.MEMORY_BYTES


def test_a_run_that_fails_is_told_with_its_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "follow", fail)
    assert growth.main(["--preset", "smoke", "--out", str(tmp_path)]) == 3
    assert "1000 rows on 1 rank failed: no memory" in capsys.readouterr().err


def test_full_fine_tuning_is_asked_for_both_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(command: list[str], log: Path, *, timeout: float) -> int:
        folder = Path(command[command.index("analysis.parts.growth_images") + 1])
        (folder / "0.json").write_text('{"digest": "a", "peak_bytes": 1}')
        return 0

    monkeypatch.setattr(growth, "follow", made)
    monkeypatch.setattr(growth, "accuracy_for_both", lambda run_dir, data_dir: 0.5)
    found = [growth.measure(Planned("images", 9, 1, way=way), tmp_path, tmp_path) for way in (growth.FULL, AUTO)]
    assert ["accuracy_for_both" in each for each in found] == [True, False]
