from __future__ import annotations

from typing import Any, cast

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.training.auto import stages_of
from hvfreeze.training.stages import StageRunner, joined

CACHE = {"mode": "auto", "exact": True, "bytes": 1, "rows_written": 2, "seconds_saved": 0.5}


def stage_runner() -> StageRunner:
    made = cast(StageRunner, StageRunner.__new__(StageRunner))
    made.mirror = None
    made.stages, made.number, made._earlier = (
        stages_of(
            from_dict({"freeze": "auto"}), batches_per_epoch=20, guarded_batches=18, cut=2, deepest=5, costs=None
        ),
        0,
        {},
    )
    made.asked = (20, 18, 20)
    return made


def test_what_a_runner_keeps_is_what_it_knows() -> None:
    made = stage_runner()
    assert made.knows(made.state_dict())
    assert made.knows({"number": 0, "steps": [20], "earlier": {}}), "a run may go on with more stages than it had"


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {},
        {"number": 3, "steps": [20, 18, 20], "earlier": {}},
        {"number": True, "steps": [20, 18, 20], "earlier": {}},
        {"number": 0, "steps": [20, 18, 20, 1], "earlier": {}},
        {"number": 0, "steps": [20, "18", 20], "earlier": {}},
        {"number": 0, "steps": [20, -18, 20], "earlier": {}},
        {"number": 0, "steps": [20, 18, 20], "earlier": None},
        {"number": 0, "steps": [20, 18, 20], "earlier": {}, "mirror": "never"},
    ],
)
def test_junk_is_not_known(junk: Any) -> None:
    assert not stage_runner().knows(junk)


def test_reports_of_stages_add_up() -> None:
    def part(**changes: Any) -> dict[str, Any]:
        common = {"allreduce_bytes": 3, "other_collective_bytes": 4, "cut_history": [(0, 0, 5)], "cache": CACHE}
        return {**common, **changes}

    assert joined({}, part()) == part()
    both = joined(part(head={"loss": 1.0}), part(cache={**CACHE, "mode": "off", "exact": False}))
    assert both["allreduce_bytes"] == 6 and both["other_collective_bytes"] == 8
    assert both["cut_history"] == [(0, 0, 5), (0, 0, 5)] and both["head"] == {"loss": 1.0}
    assert both["cache"] == {"mode": "auto", "exact": False, "bytes": 2, "rows_written": 4, "seconds_saved": 1.0}
