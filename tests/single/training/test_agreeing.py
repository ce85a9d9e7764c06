"""What two ranks find out about each other before they train; the other says what a test lets it say."""

from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.samples.opening import open_agreed_corpus
from hvfreeze.training.build import environment_of


class First(SoloWorld):
    """The first of two ranks; the second says the same, but for `others` in a mapping."""

    size = 2

    def __init__(self, **others: str) -> None:
        self.others = others

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        return [value, {**value, **self.others} if self.others else value]


@pytest.mark.parametrize("what", ["torch", "torchvision", "pillow", "horovod", "hvfreeze", "source"])
def test_a_rank_that_runs_something_else_is_named(what: str) -> None:
    words = (
        rf"different versions: {what} is '.+' on rank 0 and 'another' on rank 1; start all ranks with the same command"
    )
    with pytest.raises(UsageError, match=words):
        environment_of(from_dict({}), First(**{what: "another"}))


def test_timm_must_be_the_same_where_the_model_is_its() -> None:
    with pytest.raises(UsageError, match=r"different versions: timm is .* on rank 0 and 'another' on rank 1"):
        environment_of(from_dict({"model": "timm:resnet18"}), First(timm="another"))


def test_ranks_that_meet_each_others_samples_are_not_given_a_cache_each() -> None:
    config = from_dict({"shuffle": "global", "cache": "on", "augment": "none"})
    with pytest.raises(UsageError, match=r"--shuffle \(global\) needs --cache off or --cache-shared"):
        open_agreed_corpus(config, First(), holds_out=False, clock=PhaseClock(SET_UP_PHASES))
