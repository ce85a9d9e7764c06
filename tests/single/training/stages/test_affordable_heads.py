"""Where rows are too many to be compared with each other, --freeze auto takes the mean over mirror images."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvfreeze.config.sections import FreezeConfig, HeadConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.shards import plan_shards
from hvfreeze.heads.kernel import ALL_COMPARED
from hvfreeze.training.auto_plan import Costs, affordable, notes_on_views, stages_of
from hvfreeze.training.stage_build import StageFactory
from hvfreeze.training.stages import with_mirror

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
def test_mirror_images_are_no_rows_where_these_are_too_many_to_be_compared_with_each_other(shuffle: str) -> None:
    half = ALL_COMPARED // 2
    assert taken(half, shuffle=shuffle) == ("kernel", "auto")
    assert taken(half + 1, shuffle=shuffle) == taken(10 * ALL_COMPARED, shuffle=shuffle) == ("kernel", "mean")
    many = factory(half + 1, shuffle=shuffle)
    assert many.rows(affordable(many)) == half + 1


def test_what_was_asked_for_stays() -> None:
    many = ALL_COMPARED + 1
    assert taken(many, flips=False) == ("kernel", "auto")
    assert taken(many, mirror="off") == ("kernel", "off")
    assert taken(many, mirror="on") == ("kernel", "on")
    assert taken(many, head=replace(KERNEL, centres=500)) == ("kernel", "auto")
    assert taken(many, head=HeadConfig(head="multi-level", head_fit="exact")) == ("exact", "auto")


def test_blocks_are_tuned_on_mirror_images_that_a_head_has_no_room_for() -> None:
    config = replace(Config(), freeze=FreezeConfig(freeze="auto"), head=KERNEL)
    together = replace(config, data=replace(config.data, mirror="mean"))
    settings = {
        "batches_per_epoch": 9,
        "guarded_batches": 8,
        "cut": 2,
        "deepest": 5,
        "costs": Costs(views=2, frozen=0.0),
        "passes": 50.0,
    }
    stages = stages_of(config, solved=together, **settings)  # type: ignore[arg-type]
    assert [stage.config.data.mirror for stage in stages] == ["mean", "auto", "mean", "mean"]
    assert [stage.mirror_is_open for stage in stages] == [True, False, True, True]
    assert [with_mirror(stage, "off").config.data.mirror for stage in stages] == ["off"] * 4
    assert [with_mirror(stage, "on").config.data.mirror for stage in stages] == ["mean", "on", "mean", "mean"]
    asked = stages_of(together, solved=together, **settings)  # type: ignore[arg-type]
    assert [stage.config.data.mirror for stage in asked] == ["mean", "on", "mean", "mean"]
    assert not any(stage.mirror_is_open for stage in asked)


def test_answers_that_take_twice_the_time_are_told() -> None:
    (note,) = notes_on_views(factory(ALL_COMPARED))
    assert "in twice the time" in note and f"at most {ALL_COMPARED}" in note and "--mirror off" in note
    assert notes_on_views(factory(ALL_COMPARED // 2)) == []
