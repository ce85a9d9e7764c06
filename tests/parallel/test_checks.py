"""What must hold at 1 to 4 ranks: every check of every worker, on ranks that stay; see standing.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvfreeze.config.registry import STRATEGIES
from tests.parallel import standing

WORKERS = Path(__file__).with_name("workers")
SCRIPT = "own_optimizer"
"""A script that starts Horovod itself."""


class Part(NamedTuple):
    """A worker's checks: on how many ranks `make test` and `make test-all` make them."""

    often: tuple[int, ...]
    seldom: tuple[int, ...] = ()
    start: str = ""
    """What opens the ranks' world; see rank.py."""


CONTRACTS = {
    "grid": Part((3,)),
    "stale-ring": Part((3,), (1,)),
    "local-critics": Part((3,), (1,)),
    "subnets": Part((2,), (1,)),
}
"""Where others than 2 are needed: a chain of ranks has a middle at 3; one rank takes parts that several refuse."""


PARTS = {
    "exchanging": Part((3,), (2, 4)),
    "invariants": Part((3,), (2, 4)),
    "alone": Part((1,)),
    "runs": Part((2,), (3,)),
    "equal_runs": Part((3,)),
    "staged": Part((2,)),
    "cached": Part((2,)),
    "solved": Part((2,)),
    "judged": Part((2,)),
    "hub": Part((2,)),
    "updating": Part((2,)),
    **{f"contract:{name}": CONTRACTS.get(name, Part((2,))) for name in STRATEGIES},
    "grid": Part((4,), (2,)),
    "local_sgd": Part((3,)),
    "local_critics": Part((2,), (3,)),
    "subnets": Part((2,), (3,)),
    "redealt": Part((3,), (4,)),
    "shared_trunk": Part((2,), (3,)),
    "stale_ring": Part((2,), (3,)),
    "node_pixels": Part((3,), (2, 4)),
    "lanes": Part((3,), (2, 4)),
    "own_fit": Part((2,)),
    "own_optimizer": Part((2,), (3,), start=SCRIPT),
    "own_drop_in": Part((2,), (3,), start=SCRIPT),
    "own_arguments": Part((2,), start=SCRIPT),
    "own_scripts": Part((), (2,), start=SCRIPT),
    "own_rest:not-yet": Part((), (2,), start="own_rest:not-yet"),
    "own_rest:started": Part((), (3,), start="own_rest:started"),
    "own_sets": Part((), (3,), start="own_rest:started"),
}


SELDOM = {
    "alone": ("a_head_is_fitted_in_a_script_and_plain_horovod_trains_beside_it",),
    "staged": ("parts", "budgets", "rounds"),
    "runs": ("scheduled_runs_whose_exchange_is_chosen",),
    "invariants": ("a_saved_state_goes_on_where_gains_are_sampled",),
    "grid": ("a_resumed_run_is_the_uninterrupted_one", "a_grid_that_splits_no_batch_is_replicas_with_their_votes"),
    "local_sgd": ("looking_changes_nothing_and_a_run_goes_on_in_the_middle_of_a_round",),
    "redealt": ("a_resumed_run_is_the_uninterrupted_one",),
    "local_critics": ("a_stopped_run_goes_on_bit_for_bit",),
    "shared_trunk": ("a_resumed_run_is_the_uninterrupted_one",),
    "stale_ring": ("a_stopped_run_goes_on_bit_for_bit",),
    "own_arguments": ("every_optimizer_of_torch_steps_as_under_horovod",),
    "subnets": ("a_run_goes_on_at_the_end_of_an_epoch_and_in_the_middle_of_a_round",),
    "updating": ("a_stopped_run_goes_on_and_mixing_is_the_same_from_a_cache",),
    "equal_runs": ("ranks_that_meet_all_samples_share_what_each_has_computed",),
}
"""Checks that take long, of which `make test` makes the cheaper kin."""


ONCE = {
    "runs": ("runs_that_freeze_and_thaw", "scheduled_runs_whose_exchange_is_chosen"),
    "redealt": ("a_resumed_run_is_the_uninterrupted_one",),
    "local_critics": ("a_stopped_run_goes_on_bit_for_bit",),
    "shared_trunk": ("a_resumed_run_is_the_uninterrupted_one",),
    "stale_ring": ("a_stopped_run_goes_on_bit_for_bit",),
    "subnets": ("a_run_goes_on_at_the_end_of_an_epoch_and_in_the_middle_of_a_round",),
    "own_optimizer": ("what_would_lose_gradients_is_refused",),
}
"""Checks that a second number of ranks would only repeat: each rank keeps its state, or refuses, by itself."""


def checks_of(part: str) -> list[str]:
    """Return the names of a worker's checks, without loading what it imports."""
    source = ast.parse((WORKERS / f"{part.partition(':')[0]}.py").read_text())
    named = [node.name for node in source.body if isinstance(node, ast.FunctionDef)]
    return [name for name in named if name.startswith("check_")]


def cases() -> Iterator[Any]:
    for name, part in PARTS.items():
        for size in part.often + part.seldom:
            for check in checks_of(name):
                called = check.removeprefix("check_")
                if size in part.seldom and called in ONCE.get(name, ()):
                    continue
                seldom = size in part.seldom or called in SELDOM.get(name, ())
                marks = [pytest.mark.seldom] if seldom else []
                yield pytest.param(name, check, size, part.start, id=f"{name}-{called}-{size}", marks=marks)


@pytest.mark.mpi
@pytest.mark.standing
@pytest.mark.parametrize(("part", "check", "size", "start"), list(cases()))
def test_check(part: str, check: str, size: int, start: str) -> None:
    standing.call(size, part, check, start=start)


def test_every_worker_with_checks_is_called() -> None:
    called = {name.partition(":")[0] for name in PARTS}
    assert {path.stem for path in WORKERS.glob("*.py") if checks_of(path.stem)} - {"failing"} == called
