"""Who knows strategies by name agrees on the names."""

from __future__ import annotations

from hvfreeze.config.sections import OWN_FLAGS, STRATEGIES
from hvfreeze.strategies.choices import CHOICES
from tests.parallel.workers.contract import SETTINGS, UNFIT


def test_every_strategy_can_be_chosen_and_is_held_to_the_contract() -> None:
    assert set(STRATEGIES) == set(OWN_FLAGS) == set(CHOICES) == set(SETTINGS) == set(UNFIT)
