"""Where there are too many rows to compare, --freeze auto takes fewer of them, then another head; nobody else does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvfreeze.config.sections import FreezeConfig, HeadConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.shards import plan_shards
from hvfreeze.errors import UsageError
from hvfreeze.heads.kernel import MOST_ROWS
from hvfreeze.training.auto import affordable, notes_on_stages, stages_of
from hvfreeze.training.stage_build import StageFactory
from hvfreeze.training.stages import Stage

KERNEL = HeadConfig(head="multi-level", head_fit="kernel")


def factory(
    samples: int,
    *,
    flips: bool = True,
    freeze: str = "auto",
    head: HeadConfig = KERNEL,
    mirror: str = "auto",
    shuffle: str = "shard",
) -> StageFactory:
    plan = plan_shards(np.zeros(samples, np.int64), np.arange(samples), size=2, batch_size=1, seed=0, shuffle=shuffle)
    context: Any = SimpleNamespace(
        feed=SimpleNamespace(plan=plan),
        corpus=SimpleNamespace(train=SimpleNamespace(flips=flips)),
    )
    blueprint: Any = None
    data = replace(Config().data, augment="none", mirror=mirror)
    config = replace(Config(), data=data, freeze=FreezeConfig(freeze=freeze), head=head)
    return StageFactory(context, config, blueprint, frozenset())


Taken = tuple[str, str]
"""Of the settings with which a head is solved --head-fit and --mirror."""


def taken(samples: int, **given: Any) -> Taken:
    found = affordable(factory(samples, **given))
    return found.head.head_fit, found.data.mirror


@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_mirror_images_go_first_and_then_the_comparison(shuffle: str) -> None:
    half = MOST_ROWS // 2
    assert taken(half, shuffle=shuffle) == ("kernel", "auto")
    assert taken(half + 1, shuffle=shuffle) == taken(MOST_ROWS, shuffle=shuffle) == ("kernel", "off")
    assert taken(MOST_ROWS + 1, shuffle=shuffle) == ("exact", "auto")


def test_where_there_are_no_mirror_images_or_they_were_asked_for_the_comparison_goes() -> None:
    assert taken(MOST_ROWS, flips=False) == ("kernel", "auto")
    assert taken(MOST_ROWS + 1, flips=False) == ("exact", "auto")
    assert taken(MOST_ROWS, mirror="off") == ("kernel", "off")
    assert taken(MOST_ROWS + 1, mirror="off") == ("exact", "off")
    assert taken(MOST_ROWS, mirror="on") == ("exact", "on")


def test_blocks_are_tuned_on_mirror_images_that_a_head_has_no_room_for() -> None:
    config = replace(Config(), freeze=FreezeConfig(freeze="auto"), head=KERNEL)
    alone = replace(config, data=replace(config.data, mirror="off"))
    settings = {"batches_per_epoch": 9, "guarded_batches": 8, "cut": 2, "deepest": 5, "costs": None}
    stages = stages_of(config, solved=alone, **settings)  # type: ignore[arg-type]
    assert [stage.config.data.mirror for stage in stages] == ["off", "auto", "off"]


def test_a_head_that_was_asked_for_is_refused_with_ways_out() -> None:
    with pytest.raises(UsageError, match=r"50002 views.*pass --head-fit exact, or --mirror off where that halves them"):
        factory(25_001, freeze="none").stages()


@pytest.mark.parametrize(("samples", "told"), [(25_001, "no mirror images"), (50_001, "head-fit exact, not kernel")])
def test_what_was_left_out_is_told(samples: int, told: str) -> None:
    config = replace(Config(), freeze=FreezeConfig(freeze="auto"), head=KERNEL)
    solving = affordable(factory(samples))
    stage = Stage(name="solve", config=solving, steps=1, batches_per_epoch=1)
    notes = [note for note in notes_on_stages(config, [stage]) if "50000 views" in note]
    assert len(notes) == 1 and notes[0].startswith(told)
    assert not any("views" in note for note in notes_on_stages(config, [replace(stage, config=config)]))
