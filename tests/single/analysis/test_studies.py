"""Studies of one question each: the parts of auto, the whole command's time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from analysis import auto_parts, clock, peers
from analysis.clock import RANKS, commands, folder_of
from analysis.parts import clock_tables, start_phases
from analysis.parts.start_tables import columns, table
from analysis.sweeps.presets import REDUCED, SMOKE
from analysis.sweeps.results import Results
from tests.single.analysis.runs_material import carried_out


def test_the_whole_and_what_is_solved_alone_are_the_runs_that_peers_make_too() -> None:
    theirs = {run.name: run for run in peers.then(REDUCED, Results(Path(), []), peers.Ground())}
    shared = [run for run in auto_parts.runs(REDUCED) if run.name in theirs]
    assert {run.label for run in shared} == {auto_parts.WHOLE, auto_parts.SOLVED}
    assert [run.identity() for run in shared] == [theirs[run.name].identity() for run in shared]


def test_every_part_is_left_out_once_and_differs_in_that_alone() -> None:
    by_label = {run.label: run.flags for run in auto_parts.runs(REDUCED)}
    assert by_label.keys() == {auto_parts.WHOLE, *auto_parts.PARTS} == {auto_parts.WHOLE, *auto_parts.WORDS}
    for label, changes in auto_parts.PARTS.items():
        assert by_label[label] == {**by_label[auto_parts.WHOLE], **changes}


@pytest.mark.usefixtures("no_training", "no_files")
def test_a_part_that_gives_points_helps_and_one_that_takes_them_is_negative(tmp_path: Path) -> None:
    results = carried_out(auto_parts.EXPERIMENT, replace(SMOKE, seeds=(0, 1, 2)), tmp_path)
    assert set(results.labels) == {auto_parts.WHOLE, "without-votes"}
    for points, wanted in ((0.02, "it helps"), (-0.02, "it harms (negative)")):
        rows = [
            {**row, "test_accuracy": 0.5 + 0.001 * row["seed"] + points * (row["label"] == auto_parts.WHOLE)}
            for row in results.rows
        ]
        (table,) = auto_parts.tables(replace(results, rows=rows))
        assert table.rows[1][3] == wanted
    assert auto_parts.answers(results)[0].details[1].startswith("votes while tuning")


def command(way: str, ranks: int, whole: float, train: float, *, epochs: int = 1, made: int = 1) -> dict[str, str]:
    values = {"experiment": "peers64", "samples": 1000, "way": way, "ranks": ranks}
    values |= {"epochs": epochs, "epochs_made": made}
    seconds = {"whole_seconds": whole, "train_seconds": train, "evaluate_seconds": 4.0}
    return {name: str(value) for name, value in {**values, **seconds}.items()}


def test_whole_commands_are_compared_and_epochs_that_were_not_made_are_added() -> None:
    rows = [command("auto", 2, 20.0, 5.0), command("auto-one-view", 2, 15.0, 2.0)]
    rows += [command("full", 2, 60.0, 50.0, epochs=8, made=8), command("full", 1, 20.0, 10.0, epochs=8, made=1)]
    assert [clock_tables.times(rows[-1:], what).mean for what in ("whole", "train")] == [90.0, 80.0]
    (*_, said) = clock_tables.verdicts(rows).splitlines()
    assert said.startswith("| 1000 at 64 pixels | 60.0 s, 8 epochs | 20.0 s | 3.00x (10.00x) | ")
    assert said.endswith(" | 4.00 s |")
    assert clock_tables.verdicts(rows[1:]) == ""
    row = "| 1000 at 64 pixels | full fine-tuning | 90.0 s (80.0 s) | 60.0 s (50.0 s) |"
    assert row in clock_tables.table(rows)


def test_the_shortest_full_fine_tuning_that_is_good_enough_is_compared_on_every_number_of_ranks() -> None:
    planned = list(commands())
    assert len({(each.experiment, each.cell, each.ranks) for each in planned}) == len(planned) == 4 * 3 * len(RANKS)
    epochs = {(each.experiment, each.cell.samples): each.cell.epochs for each in planned if each.cell.peer == "full"}
    assert epochs["peers64", 1_000] < 16
    assert {each.epochs for each in planned if each.ranks != 2} == {1}


def test_each_phase_of_a_start_has_what_was_spent_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("one")
    vars(module)["load"] = lambda value: value + 1
    clock = iter([3.0, 4.0, 6.0])
    monkeypatch.setattr(start_phases.time, "monotonic", lambda: next(clock))
    marks, then = start_phases.Marks(1.0), list[str]()
    marks("launcher")
    marks.around(module, "load", "decoding", lambda: then.append("loaded"))
    assert module.load(1) == 2 and then == ["loaded"]
    assert {name: each for name, each in marks.seconds.items() if each} == {
        "launcher": 2,
        start_phases.REST: 1,
        "decoding": 2,
    }


def test_a_start_is_told_without_the_import_of_torch() -> None:
    both = [
        {kind: dict.fromkeys(start_phases.PHASES, each) for kind in ("seconds", "cpu_seconds")} for each in (1.0, 2.0)
    ]
    row = columns(both)
    others = len(start_phases.PHASES) - 1
    assert (row["beside_torch_seconds"], row["beside_torch_cpu_seconds"]) == (f"{others:.2f}", f"{1.5 * others:.2f}")
    assert table([{"data": "digits", "ranks": "2", **row}]).splitlines()[-1].startswith("| digits | 2 | 1.00 |")


def test_starts_without_a_folder_of_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clock.main(["--start", "--data-dir", str(tmp_path), "--weights", "x", "--out", str(tmp_path)]) == 2
    assert f"clock: error: --data-dir ({tmp_path}) must have a folder train/CLASS" in capsys.readouterr().err


def test_a_folder_of_few_images_has_as_many_of_each_class(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        for number in range(5):
            (tmp_path / "tree" / name / f"{number}.png").write_bytes(b"")
    few = folder_of(tmp_path / "tree", tmp_path / "few", 4)
    assert sorted(path.relative_to(few).as_posix() for path in few.rglob("*.png")) == [
        "a/0.png",
        "a/1.png",
        "b/0.png",
        "b/1.png",
    ]
