"""Studies of one question each: the parts of auto, the whole command's time."""

from __future__ import annotations

from analysis.clock import RANKS, commands
from analysis.parts import clock_tables


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
