"""The whole command's time beside that of training."""

from __future__ import annotations

import pytest

from analysis.clock import RANKS, Commands, commands
from analysis.sweeps.kept import RESULTS


def test_epochs_that_were_not_made_are_taken_to_last_as_long() -> None:
    kept = Commands.of(RESULTS).rows.query("epochs_made < epochs").iloc[0]
    assert kept["train"] == pytest.approx(kept["train_seconds"] * kept["epochs"] / kept["epochs_made"])
    assert kept["whole"] - kept["train"] == pytest.approx(kept["whole_seconds"] - kept["train_seconds"])
    assert Commands.of(RESULTS).faster(("peers", 5_000), "auto") == "4.84x"
    assert Commands.of(RESULTS).epochs(("peers", 5_000)) == 8


def test_the_shortest_full_fine_tuning_that_is_good_enough_is_compared_on_every_number_of_ranks() -> None:
    planned = list(commands())
    assert len({(each.experiment, each.cell, each.ranks) for each in planned}) == len(planned) == 4 * 3 * len(RANKS)
    epochs = {(each.experiment, each.cell.samples): each.cell.epochs for each in planned if each.cell.peer == "full"}
    assert epochs["peers64", 1_000] < 16
    assert {each.epochs for each in planned if each.ranks != 2} == {1}
