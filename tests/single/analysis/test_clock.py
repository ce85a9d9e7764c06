"""What is said of whole commands follows from the rows: epochs that were not made take as long as those that were."""

from __future__ import annotations

from analysis.clock import RANKS, commands
from analysis.parts.clock_tables import table, times, verdicts


def row(way: str, ranks: int, whole: float, train: float, *, epochs: int = 1, made: int = 1) -> dict[str, str]:
    values = {
        "experiment": "peers64",
        "samples": 1000,
        "way": way,
        "ranks": ranks,
        "epochs": epochs,
        "epochs_made": made,
    }
    seconds = {"whole_seconds": whole, "train_seconds": train, "evaluate_seconds": 4.0}
    return {name: str(value) for name, value in {**values, **seconds}.items()}


ROWS = [
    row("auto", 2, 20.0, 5.0),
    row("auto-one-view", 2, 15.0, 2.0),
    row("full", 2, 60.0, 50.0, epochs=8, made=8),
    row("full", 1, 20.0, 10.0, epochs=8, made=1),
]


def test_missing_epochs_are_added() -> None:
    assert times(ROWS[-1:], "whole").mean == 90.0
    assert times(ROWS[-1:], "train").mean == 80.0
    assert times(ROWS[2:3], "whole").mean == 60.0


def test_the_whole_command_and_training_alone_are_both_compared() -> None:
    (said,) = verdicts(ROWS)
    assert said.startswith("- 1000 images at 64 pixels: 8 epochs of full fine-tuning 60.0 s")
    assert "3.00x as fast (10.0x where training alone counts)" in said.replace("10.00x", "10.0x")
    assert "4.00x as fast (25.0x where training alone counts)" in said.replace("25.00x", "25.0x")
    assert said.endswith("evaluating takes 4.00 s on average")
    assert verdicts(ROWS[1:]) == []
    assert "| 1000 at 64 pixels | full fine-tuning | 90.0 s (80.0 s) | 60.0 s (50.0 s) |" in table(ROWS)


def test_the_shortest_full_fine_tuning_that_is_good_enough_is_compared_on_every_number_of_ranks() -> None:
    planned = list(commands())
    assert len({(each.experiment, each.cell, each.ranks) for each in planned}) == len(planned) == 4 * 3 * len(RANKS)
    epochs = {(each.experiment, each.cell.samples): each.cell.epochs for each in planned if each.cell.peer == "full"}
    assert epochs["peers64", 1_000] < 16
    assert {each.epochs for each in planned if each.ranks != 2} == {1}
