"""Where there are too many rows to compare, --freeze auto takes fewer of them, then another head; nobody else does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.config.model import HeadConfig
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.training.making.notes import notes_on_freezing
from hvfreeze.training.stages.opening import MOST_ROWS, Opener
from hvfreeze.training.stages.stage import Stage

KERNEL = HeadConfig(head="multi-level", head_fit="kernel")


def affordable(samples: int, *, flips: bool = True, freeze: str = "auto", head: HeadConfig = KERNEL) -> HeadConfig:
    shards = [range(samples // 2), range(samples - samples // 2)]
    materials: Any = SimpleNamespace(
        feed=SimpleNamespace(plan=SimpleNamespace(shards=shards)),
        corpus=SimpleNamespace(train=SimpleNamespace(flips=flips)),
    )
    blueprint: Any = None
    data = replace(Config().data, augment="none")
    config = replace(Config(), data=data, freeze=FreezeConfig(freeze=freeze), head=head)
    return Opener(materials, config, blueprint, frozenset())._affordable().head


def test_mirror_images_go_first_and_then_the_comparison() -> None:
    half = MOST_ROWS // 2
    one_view, linear = replace(KERNEL, mirror="off"), replace(KERNEL, head_fit="exact")
    assert affordable(half) == KERNEL
    assert affordable(half + 1) == affordable(MOST_ROWS) == one_view
    assert affordable(MOST_ROWS + 1) == linear
    assert affordable(MOST_ROWS, flips=False) == KERNEL
    assert affordable(MOST_ROWS + 1, flips=False) == linear
    assert affordable(MOST_ROWS, head=one_view) == one_view
    assert affordable(MOST_ROWS + 1, head=one_view) == replace(one_view, head_fit="exact")


def test_a_head_that_was_asked_for_is_refused_with_ways_out() -> None:
    with pytest.raises(UsageError, match=r"50002 views.*pass --head-fit exact, or --mirror off where that halves them"):
        affordable(25_001, freeze="none")


@pytest.mark.parametrize(("samples", "told"), [(25_001, "no mirror images"), (50_001, "head-fit exact, not kernel")])
def test_what_was_left_out_is_told(samples: int, told: str) -> None:
    config = replace(Config(), freeze=FreezeConfig(freeze="auto"), head=KERNEL)
    solving = replace(config, head=affordable(samples))
    stage = Stage(name="solve", config=solving, steps=1, batches_per_epoch=1)
    notes = [note for note in notes_on_freezing(config, [stage]) if "50000 views" in note]
    assert len(notes) == 1 and notes[0].startswith(told)
    assert not any("views" in note for note in notes_on_freezing(config, [replace(stage, config=config)]))
