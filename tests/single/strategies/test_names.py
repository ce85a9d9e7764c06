"""What is known of strategies beside the registry has all of them."""

from __future__ import annotations

import importlib

import pytest

from hvfreeze.config.registry import STRATEGIES
from tests.parallel.workers.contract import SETTINGS, UNFIT
from tests.program import ROOT


def test_every_strategy_is_held_to_the_contract() -> None:
    assert set(STRATEGIES) == set(SETTINGS) == set(UNFIT)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_a_guide_and_code_that_opens_it(name: str) -> None:
    kind = STRATEGIES[name]
    module, _, function = kind.builder.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert (ROOT / "docs" / "strategies" / f"{kind.page}.md").is_file() and kind().strategy == name
