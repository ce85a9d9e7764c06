"""Checks of which some fail, for the test of checks.py itself."""

from __future__ import annotations

import sys
from pathlib import Path

from hvfreeze.comm.world import World


def setting(world: World, root: Path) -> World:
    vars(sys.modules["__main__"])["PATIENCE_SECONDS"] = 1.0
    return world


def check_one_rank(world: World) -> None:
    world.barrier(name="one")
    assert world.rank == 0, "nothing holds here"


def check_all_ranks(world: World) -> None:
    world.barrier(name="all")
    raise KeyError("nobody expected this")


def check_that_holds(world: World) -> None:
    world.barrier(name="holds")


def check_one_that_others_wait_for(world: World) -> None:
    assert world.rank > 0
    world.barrier(name="waits")


def check_that_is_not_reached(world: World) -> None:
    world.barrier(name="late")
