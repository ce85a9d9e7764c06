"""The time that the cache saves, and the numbers known before it is planned."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.cache.activations import Counters
from hvfreeze.prefix.cache_decision import Account, Horizon, PrefixTimer


def test_what_is_saved_is_what_all_batches_would_have_taken_less_what_they_took() -> None:
    misses, counters = PrefixTimer(cut=2, seconds=6.0, batches=3, spent=6.0), Counters(batches=3)
    account = Account(misses, counters)
    account.settle(2)
    assert (account.rows_read, account.seconds_saved) == (0, 0.0), "a batch that is computed saves nothing"
    counters.batches, counters.rows_read, counters.rows_advanced = 8, 64, {1: 16}
    counters.read_seconds, counters.write_seconds, misses.spent = 0.5, 0.25, 7.0
    account.settle(2)
    assert account.rows_read == 80
    assert account.seconds_saved == pytest.approx(5 * 2.0 - 1.0 - 0.5 - 0.25)


@pytest.mark.parametrize(
    ("left", "until_move", "trained", "evaluated"),
    [
        (10.0, math.inf, (10.0, math.inf), (10.0, math.inf)),
        # In the middle of an epoch, whose end and four others are evaluated; the move is at the third's end.
        (4.5, 2.5, (4.5, 2.5), (5.0, 2.0)),
        (4.5, 0.5, (4.5, 0.5), (5.0, 0.0)),
        (3 - 1e-12, 1.0, (3.0, 1.0), (3.0, 0.0)),
        (0.0, 0.0, (0.0, 0.0), (1.0, 0.0)),
    ],
)
def test_evaluations_come_whole_and_at_the_ends_of_epochs(
    left: float, until_move: float, trained: tuple[float, ...], evaluated: tuple[float, ...]
) -> None:
    for name, passes in (("train", trained), ("test", evaluated)):
        split: Any = SimpleNamespace(name=name, passes_per_epoch=1.0)
        assert Horizon(left, until_move).passes(split) == passes
