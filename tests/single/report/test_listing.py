from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.listing import has_epoch, is_run, progress_of
from hvfreeze.report.tables import group_label
from hvfreeze.runs.files import lock_directory
from hvfreeze.runs.reading import load_run, load_runs
from tests.program import call
from tests.single.report.run_directories import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, a stopped one, one without an epoch, a damaged one, and a folder that is no run."""
    runs = tmp_path / "runs"
    write_run(runs / "done", accuracies=[0.5, 0.75], freeze="linear")
    write_run(runs / "stopped", accuracies=[0.5], epochs=4, finished=False)
    begun = write_run(runs / "begun", accuracies=[0.5], finished=False)
    (begun / "metrics.jsonl").write_text("")
    write_run(runs / "torn", accuracies=[0.5])
    (runs / "torn" / "summary.json").write_text('{"test_accuracy": 0.5, "best')
    (runs / "empty").mkdir()
    (runs / "notes.txt").write_text("mine")
    return runs


def test_runs_are_listed_with_how_far_they_are(folder: Path) -> None:
    lock = lock_directory(folder / "begun")
    outcome = call("runs", str(folder))
    lock.release()
    assert outcome.returncode == 0, str(outcome)
    rows = {cells[0]: cells[1:] for cells in table(outcome.stdout)}
    assert set(rows) == {"done", "stopped", "begun", "torn"}
    assert rows["done"][:6] == ["finished", "resnet18", "digits", "2", "linear", "off"] and "75.0 %" in rows["done"]
    assert rows["stopped"][0] == "stopped, 1 of 4 epochs" and "50.0 %" in rows["stopped"]
    assert rows["begun"][0] == "running, no epoch yet"
    assert rows["torn"][0].startswith("damaged: ") and "summary.json" in rows["torn"][0]
    assert [cells[0] for cells in table(call("runs", str(folder / "done")).stdout)] == ["done"]


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()[2:]]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    for place, said in (
        (tmp_path, "contains no run directory"),
        (tmp_path / "nowhere", "cannot be read: No such file or directory; name a folder of runs, such as runs/"),
    ):
        outcome = call("runs", str(place))
        assert outcome.returncode == 3 and said in outcome.messages[0], str(outcome)


@pytest.mark.usefixtures("undrawn")
def test_a_report_leaves_out_what_is_no_run_and_says_so(folder: Path, tmp_path: Path) -> None:
    outcome = call("report", *sorted(map(str, folder.iterdir())), "--out", str(tmp_path / "out"))
    assert outcome.returncode == 0 and "report on 2 runs" in outcome.stdout, str(outcome)
    notes = [line for line in outcome.stderr.splitlines() if line.startswith("hvfreeze: note: skipped: ")]
    assert len(notes) == 4, str(outcome)
    for name in ("begun", "empty", "notes.txt", "torn"):
        assert any(str(folder / name) in note for note in notes), name
    outcome = call("report", str(folder / "torn"), "--out", str(tmp_path / "out"))
    assert outcome.returncode == 3 and "summary.json is damaged" in outcome.messages[0]


def test_repeats_of_one_seed_are_called_runs_and_not_seeds(tmp_path: Path) -> None:
    first = write_run(tmp_path / "full-a", accuracies=[0.5], seed=1)
    shutil.copytree(first, tmp_path / "full-b")
    other = write_run(tmp_path / "full-c", accuracies=[0.5], seed=2)
    (repeated,) = group_by_seed(load_runs([first, tmp_path / "full-b"]))
    assert group_label(repeated).endswith("(2 runs)")
    (seeded,) = group_by_seed(load_runs([first, other]))
    assert group_label(seeded).endswith("(2 seeds)")
    assert load_run(first).finished


def test_what_belongs_to_another_user_counts_as_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, look: Callable[[Path], bool] = Path.is_file) -> bool:
        if path.parent == folder / "stopped":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "is_file", forbidden)
    assert not is_run(folder / "stopped") and not has_epoch(folder / "stopped")
    assert progress_of(folder / "stopped") == (0, 0, 0) != progress_of(folder / "done")
    outcome = call("runs", str(folder))
    assert outcome.returncode == 0, str(outcome)
    assert {cells[0] for cells in table(outcome.stdout)} == {"done", "begun", "torn"}
