"""Where a ring is cut, and with which batch each module goes back: pure functions."""

from __future__ import annotations

import pytest

from hvfreeze.errors import UsageError
from hvfreeze.strategies.schedules import ring_period, stale_batch
from hvfreeze.strategies.stale_ring.build import cut_for_ring
from hvfreeze.strategies.stale_ring.settings import StaleRingConfig


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
@pytest.mark.parametrize("since", [0, 1, 4])
def test_every_batch_is_used_once_by_each_module_and_so_many_steps_late(delay: int, since: int) -> None:
    used = [(step, stale_batch(step, delay=delay, since=since)) for step in range(20)]
    batches = [batch for _, batch in used if batch is not None]
    assert batches == list(range(20 - delay))
    assert all(batch is None or step - batch == (delay if step >= since else 0) for step, batch in used)
    waited = [step for step, batch in used if batch is None]
    assert waited == list(range(since, since + delay)), "nothing is used while the pipeline fills"


def test_what_an_error_is_needed_for_was_sent_in_the_step_before() -> None:
    for part in range(3):
        for step in range(10, 20):
            mine, next_one = (stale_batch(s, delay=3 - p, since=4) for p, s in ((part, step), (part + 1, step - 1)))
            assert mine == next_one is not None


def test_a_step_takes_as_long_as_its_longest_rank() -> None:
    # Rank 0: 1 forward, 2 back, 1 forward, 2 back; rank 1: waits 1, 1 forward, 2 back.
    assert ring_period([1, 1, 1]) == 6
    # Rank 0 waits for the batch: 1 + 3, then 6; rank 1: 1, 3, 6.
    assert ring_period([1, 3, 2]) == 10
    assert ring_period([1, 2]) == 9
    assert ring_period([0, 4, 0, 0]) == 12


def test_the_modules_of_rank_0_are_smaller() -> None:
    assert cut_for_ring([1.0] * 6, parts=3) == ((0, 1), (1, 4), (4, 6))
    assert ring_period([1, 3, 2]) < ring_period([2, 2, 2])
    assert cut_for_ring([1.0] * 4, parts=4) == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert cut_for_ring([1.0] * 4, parts=2) == ((0, 2), (2, 4)), "one rank has both, however they are cut"
    assert len(cut_for_ring([1.0] * 60, parts=20)) == 20, "too many ways to try"


def test_there_is_one_module_more_than_ranks() -> None:
    settings = StaleRingConfig()
    assert [settings.modules(ranks) for ranks in (1, 2, 3)] == [2, 3, 4]
    assert StaleRingConfig(parts=4).modules(3) == 4
    with pytest.raises(
        UsageError, match=r"--parts \(4\) must be one more than the number of ranks \(2\).*start 3 ranks"
    ):
        StaleRingConfig(parts=4).modules(2)
    with pytest.raises(UsageError, match=r"share a rank; leave --parts out"):
        StaleRingConfig(parts=1).modules(1)
