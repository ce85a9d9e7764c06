"""From a configuration to the strategy: which blocks are frozen, who owns which neurons of the MLP behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.point_to_point import open_wire
from hvfreeze.comm.world import LoneRank
from hvfreeze.config.tree import Config
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.mlp import Mlp, mlp_of
from hvfreeze.model.steps import Call
from hvfreeze.strategies.base import BuildContext
from hvfreeze.strategies.build_parts import check_left_out
from hvfreeze.strategies.data_parallel import open_replicas
from hvfreeze.strategies.rounds import Rounds
from hvfreeze.strategies.subnets.dealing import LANES, Exchange, Table
from hvfreeze.strategies.subnets.strategy import Piece, Subnets


class Place(NamedTuple):
    """Where the MLP stands in a chain."""

    mlp: Mlp
    name: str
    """Of the module, with a dot behind it; empty where it is the whole model."""
    cut: int
    """Blocks before it."""
    before: tuple[Call, ...]
    """What runs in its block before it."""


def open_subnets(context: BuildContext, config: Config) -> Subnets:
    """Return the strategy for a run. Collective.

    Raises:
        UsageError: settings do not go with subnets, the model has no MLP at its end, or it has too few neurons; on all
            ranks.
    """
    world, settings = context.world, config.optimizer
    place = raise_on_all_ranks(world, lambda: find(context.chain, config, ranks=world.size), name="subnets.settings")
    freeze = replace(config.freeze, freeze="static", cut=place.cut)
    replica = open_replicas(context, replace(config, freeze=freeze), exchanging=LoneRank(world))
    table = Table.of(place.mlp, size=world.size)
    with torch.random.fork_rng(devices=[]):
        narrow = Mlp(place.mlp.inputs, table.hand_sizes(world.rank), place.mlp.classes)
    last = {name for name, _ in context.chain.named_parameters(len(context.chain.blocks) - 1)}
    head = {name for name, _ in narrow.named_parameters() if f"{place.name}{name}" in last}
    piece = Piece(narrow, settings, head)
    exchange = Exchange(table, place.mlp, narrow, open_wire(world, LANES), rank=world.rank)
    exchange.give_up_whole()
    rounds = Rounds(world, config.strategy.steps_alone)
    widths = " and ".join(map(str, table.hand_sizes(0)))
    context.say(
        f"subnets: {widths} of {' and '.join(map(str, table.widths))} hidden neurons a rank, dealt anew every "
        f"{rounds.local_steps} steps; {2 * table.wire_bytes()} bytes a round over all ranks"
    )
    if place.cut and config.model.weights == "none":
        context.say("note: the trunk keeps its random initialisation; --weights gives it one that was trained")
    first = context.feed.epoch(0)[:1]
    return Subnets(
        replica,
        world,
        exchange.wire,
        rounds,
        place.mlp,
        place.before,
        piece,
        exchange,
        seed=config.run.seed,
        _batches=first,
    )


def find(chain: Chain, config: Config, *, ranks: int) -> Place:
    """Return where the MLP is; refuse settings that do not go with subnets, and models that do not."""
    freeze, optimizer = config.freeze, config.optimizer
    found = mlp_of(chain.model)
    if found is None:
        raise UsageError(
            f"--strategy (subnets) deals out the hidden neurons of an MLP, and {config.model.model} has none: pass "
            "--model mlp-512x512, or --head mlp-2048 for one on this model, whose own blocks are then frozen"
        )
    name, mlp = found
    cut = len(chain.blocks) - 1 if name else 0
    check_left_out(
        "subnets",
        ("freeze", freeze.freeze, freeze.freeze in ("none", "static"), "all blocks before the MLP are frozen"),
        ("cut", freeze.cut, freeze.cut in (None, cut), "all blocks before the MLP are frozen"),
        ("shadow", freeze.shadow, freeze.shadow == "none", "there is no vote"),
        ("statistics", freeze.statistics, freeze.statistics != "kept", "each rank normalises its own batches"),
        ("compression", optimizer.compression, optimizer.compression == "none", "no gradient travels"),
        ("optimizer", optimizer.optimizer, optimizer.optimizer == "sgd", "what others remember is other neurons'"),
    )
    least = min(mlp.widths)
    if least < ranks:
        flag, value = ("head", config.head.head) if name else ("model", config.model.model)
        raise UsageError(
            f"--{flag} ({value}) must have at least {ranks} neurons in each hidden layer, one for each rank, and one "
            f"has {least}: give it more, or start fewer ranks"
        )
    if not name:
        return Place(mlp, "", 0, ())
    block = chain.blocks[-1]
    if block.steps[-1] is not mlp or any(not own.startswith(f"{name}.") for own in block.parameter_names):
        raise UsageError(
            f"--blocks ({config.model.blocks}): the last block, {block.name}, must have no parameters beside the MLP; "
            "choose blocks of which the MLP is one"
        )
    return Place(mlp, f"{name}.", cut, block.steps[:-1])
