"""What a solution is expected to take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hvfreeze.heads import expected
from hvfreeze.heads.gram import TILE

PLENTY = 2**40


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every piece take a millisecond."""

    def settled_seconds(work: Callable[[], object]) -> float:
        work()
        return 1e-3

    monkeypatch.setattr(expected, "settled_seconds", settled_seconds)


comparing: Callable[..., float] = partial(expected.time_comparing, width=64, classes=10)


def test_rows_of_more_ranks_are_shared_and_what_rank_0_does_alone_is_not(counted: None) -> None:
    alone = expected.time_landmarks(rows=40_000, columns=20, products=15, compared=1e-3)
    one, four = (comparing(rows=40_000 // size, size=size, memory_bytes=PLENTY) for size in (1, 4))
    assert four - alone == pytest.approx((one - alone) / 4)


def test_likenesses_that_memory_does_not_hold_are_made_in_every_product(counted: None) -> None:
    rows: dict[str, Any] = {"rows": 20_000, "size": 2}
    held, none = (comparing(**rows, memory_bytes=memory) for memory in (PLENTY, 0))
    tiles = 20_000 * 40_000 / 2 / TILE**2
    assert none - held == pytest.approx(tiles * 1e-3 * expected.PRODUCTS_OF_MANY)
    half = comparing(**rows, memory_bytes=20_000 * 40_000 // 2)
    assert half == pytest.approx((held + none) / 2), "two bytes a likeness"


def test_centres_save_products_and_cost_their_factor(counted: None) -> None:
    everything = comparing(rows=40_000, size=1, memory_bytes=PLENTY)
    some = comparing(rows=40_000, size=1, memory_bytes=PLENTY, asked=2000)
    assert some < everything / 5
    factors = [expected.time_factor(count, rows=10**9, size=1, compared=0.0) for count in (2000, 4000)]
    assert factors[1] == pytest.approx(8 * factors[0]), "the third power"
    assert comparing(rows=0, size=4, memory_bytes=PLENTY) < 10.0, "a rank without rows"


def test_answers_take_as_long_as_they_have_centres(counted: None) -> None:
    few, many = (expected.time_answering(rows=1000, width=64, centres=centres) for centres in (TILE, 4 * TILE))
    assert few == pytest.approx(1000 / TILE * 2e-3) and many == pytest.approx(2.5 * few)
