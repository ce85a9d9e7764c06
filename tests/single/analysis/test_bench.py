from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis import bench
from analysis.benchmarks import launching, table
from analysis.benchmarks.cases import CASES, ROWS, TOTAL_SECONDS
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import Setting
from analysis.benchmarks.runs import epoch_of
from hvfreeze.comm.world import SoloWorld
from tests.single.analysis.bench_clock import Clock, make_row

FIELDS = {"name", "ratio", "bound", "ok", "n", "low", "high", "what"}


def test_the_file_has_these_fields_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.json"
    table.write_rows(path, [make_row()])
    (entry,) = json.loads(path.read_text())
    assert set(entry) == FIELDS
    assert table.read_rows(path) == [make_row()]


def test_new_rows_replace_old_ones_of_their_name_and_leave_the_others() -> None:
    old = [make_row("c"), make_row("a", ratio=9.0), make_row("gone")]
    rows = table.merged(old, [make_row("a"), make_row("b")], order=("a", "b", "c"))
    assert [(row.name, row.ratio) for row in rows] == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"name": "a"}]'])
def test_a_file_that_is_no_bench_counts_as_empty(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    assert table.read_rows(path) == []


def test_the_table_explains_what_was_missed() -> None:
    text = table.table([make_row("a", ok=True, what="fine"), make_row("b", ok=False, what="why it was missed")])
    assert "b: why it was missed" in text
    assert "fine" not in text


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What was started instead of ranks: (row, its seconds), all of which were used up."""
    started: list[tuple[str, float]] = []
    clock = Clock()
    monkeypatch.setattr(bench, "monotonic", clock)

    def run_case(case: Any, wanted: Sequence[str], *, seconds: float, **others: Any) -> tuple[list[Row], int]:
        started.extend((name, seconds) for name in wanted)
        clock.now += case.setup_seconds + seconds * len(wanted)
        return [make_row(name) for name in wanted if name != "verification"], 0

    monkeypatch.setattr(bench, "run_case", run_case)
    return started


def test_only_measures_the_named_rows_and_merges_them(measured: list[tuple[str, float]], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    table.write_rows(path, [make_row("allreduce_bytes", ratio=7.0), make_row("data_and_logging", ratio=7.0)])
    names = "data_and_logging,frozen_step_cut2"
    assert bench.main(["--only", names, "--out", str(path)]) == 0
    assert sorted(name for name, _ in measured) == sorted(names.split(","))
    ratios = {row.name: row.ratio for row in table.read_rows(path)}
    assert ratios == {"frozen_step_cut2": 1.0, "data_and_logging": 1.0, "allreduce_bytes": 7.0}


def test_a_row_that_could_not_be_measured_is_reported_and_its_old_value_dropped(
    measured: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    table.write_rows(path, [make_row("verification")])
    assert bench.main(["--only", "verification", "--out", str(path)]) == 1
    said = capsys.readouterr().err
    assert (
        "verification could not be measured: its ranks ended with exit code 0" in said and "--only verification" in said
    )
    assert table.read_rows(path) == []


def test_a_bench_that_runs_out_of_time_names_once_what_it_has_not_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow machine: the third case stops itself after its first row, and the others are not started."""
    clock, started, path = Clock(), [], tmp_path / "my bench.json"
    monkeypatch.setattr(bench, "monotonic", clock)

    def run_case(case: Any, wanted: Sequence[str], *, left: float, **others: Any) -> tuple[list[Row], int]:
        started.append((case.module, left))
        clock.now += 400
        return [make_row(name) for name in wanted[: 1 if left < 100 else None]], 0

    monkeypatch.setattr(bench, "run_case", run_case)
    table.write_rows(path, [make_row("verification", ratio=7.0)])
    assert bench.main(["--out", str(path)]) == 0
    assert started == [("loops", 860.0), ("loops", 460.0), ("frozen", 60.0)]
    said = capsys.readouterr()
    measured = [row.name for row in table.read_rows(path)]
    left_over = [name for name in ROWS if name not in measured]
    assert measured[-1] == "frozen_step_cut1" and said.err == ""
    (note,) = [line for line in said.out.splitlines() if line.startswith("bench: note: ")]
    assert note.startswith(f"bench: note: {len(left_over)} rows were not reached within 860 s; to continue: ")
    assert note.endswith(f"--only {','.join(left_over)} --out '{path}'")
    # Going on measures these alone, and keeps the others.
    clock.now = 0
    started.clear()
    monkeypatch.setattr(bench, "run_case", lambda case, wanted, **others: ([make_row(name) for name in wanted], 0))
    assert bench.main(["--only", ",".join(left_over), "--out", str(path)]) == 0
    assert [row.name for row in table.read_rows(path)] == list(ROWS)


def test_a_case_that_had_to_be_ended_is_a_failure_with_its_reason_though_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(bench, "monotonic", clock)

    def hangs(case: Any, wanted: Sequence[str], **others: Any) -> tuple[list[Row], int]:
        clock.now += 900
        return [], launching.TIMED_OUT

    monkeypatch.setattr(bench, "run_case", hangs)
    assert bench.main(["--only", "verification,frozen_step_cut2", "--out", str(tmp_path / "bench.json")]) == 1
    said = capsys.readouterr()
    assert "frozen_step_cut2 could not be measured: it was not done after 132 s" in said.err
    assert "1 row was not reached within 860 s" in said.out and "verification" not in said.err


def test_an_unknown_row_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--only", "allreduce_byte"]) == 2
    assert "did you mean 'allreduce_bytes'" in capsys.readouterr().err


def test_all_rows_together_are_given_less_than_fifteen_minutes(
    measured: list[tuple[str, float]], tmp_path: Path
) -> None:
    bench.main(["--out", str(tmp_path / "bench.json")])
    assert [name for name, _ in measured] == list(ROWS)
    setup = sum(case.setup_seconds for case in CASES)
    assert sum(seconds for _, seconds in measured) + setup <= TOTAL_SECONDS + 1 < 15 * 60


def test_a_case_that_is_given_little_time_may_still_make_whole_runs_and_one_that_is_ended_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = []

    def run(command: Sequence[str], variables: Any, *, seconds: float) -> int:
        commands.append(list(command))
        return launching.TIMED_OUT

    monkeypatch.setattr(launching, "_run", run)
    (case,) = [case for case in CASES if case.module == "automatic"]
    rows, code = launching.run_case(case, case.rows, seconds=0.1 * case.seconds, left=9, quick=False, folder=tmp_path)
    (command,) = commands
    assert rows == [] and int(command[command.index("--timeout") + 1]) > 3 * len(case.rows) * case.seconds
    assert "was not done after 651 s" in launching.why_missing(case, case.rows, code)


def test_names_are_unique_and_every_case_has_its_module() -> None:
    assert len(set(ROWS)) == len(ROWS)
    for case in CASES:
        assert callable(importlib.import_module(f"analysis.benchmarks.rows.{case.module}").measure)


def test_ranks_are_started_without_what_another_job_or_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HOROVOD_CYCLE_TIME": "0.1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0", "HOME": "/home/somebody"}
    found = launching.environment({**given, "OMP_NUM_THREADS": "8", "PATH": "/bin"})
    assert not {"HOROVOD_CYCLE_TIME", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK"} & set(found)
    assert (found["OMP_NUM_THREADS"], found["OMPI_MCA_mpi_yield_when_idle"]) == ("1", "1")
    assert found["PATH"].startswith(str(Path(sys.executable).parent))


def test_an_epoch_behind_the_runs_end_is_not_timed(tmp_path: Path) -> None:
    setting = Setting(world=SoloWorld(), scratch=tmp_path, batch_rows=2, steps=1, epochs=1)
    job = setting.job("short")
    epoch_of(job)
    with pytest.raises(ValueError, match="epoch 1 is behind the run's end"):
        epoch_of(job)
