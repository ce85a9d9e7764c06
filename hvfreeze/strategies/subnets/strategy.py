"""Independent Subnet Training: deals the hidden neurons of an MLP to the ranks in every round, each training its own.

    round:  deal -> step -> ... -> step (no messages) -> return the pieces to their owners, and start the next round

No rank holds the whole MLP except while it is evaluated or saved. Pieces have no entry in common, so nothing is
averaged. Source: Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet
Training" (VLDB 2022, arXiv 1910.02120). In training, BatchNorm normalises each rank's own batch, as in their program.
For evaluation they normalise by the evaluated batch; here the whole network's statistics come from the batches of the
last step, so that an image's result does not depend on other images.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.point_to_point import open_wire
from hvfreeze.comm.replica_sync import average_running_statistics, running_statistics
from hvfreeze.comm.world import LoneRank
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.model.blocks import Chain
from hvfreeze.model.mlp import Mlp, mlp_of
from hvfreeze.model.modes import in_evaluation, in_precision
from hvfreeze.model.segments import tensors_of
from hvfreeze.model.steps import Call
from hvfreeze.optim import Update, open_optimizer
from hvfreeze.strategies.base import MODEL, Answers, BuildContext, State, StepResult, not_finite
from hvfreeze.strategies.data_parallel import joined, open_replicas
from hvfreeze.strategies.rounds import RoundStrategy, next_round
from hvfreeze.strategies.subnets.dealing import DEALT, LANES, RETURNED, SEEN, WHOLE, Deal, Exchange, Table, deal, put
from hvfreeze.strategies.subnets.settings import SubnetsConfig


class Place(NamedTuple):
    """The position of the MLP in a chain."""

    mlp: Mlp
    name: str
    """Name of the module with a trailing dot; empty if it is the whole model."""
    cut: int
    """Number of blocks before it."""
    before: tuple[Call, ...]
    """The modules before it in its block."""


def open_subnets(context: BuildContext, config: Config) -> Subnets:
    """Return the subnets strategy of a run. Collective.

    Raises:
        UsageError: settings do not go with subnets, the model has no MLP at its end, or it has too few neurons; on all
            ranks.
    """
    world, settings = context.world, config.optimizer
    place = raise_on_all_ranks(
        world, lambda: find_mlp(context.chain, config, ranks=world.size), name="subnets.settings"
    )
    freeze = replace(config.freeze, freeze="static", cut=place.cut)
    replica = open_replicas(context, replace(config, freeze=freeze), exchanging=LoneRank(world))
    table = Table.of(place.mlp, size=world.size)
    with torch.random.fork_rng(devices=[]):
        narrow = Mlp(place.mlp.inputs, table.hand_sizes(world.rank), place.mlp.classes)
    last = {name for name, _ in context.chain.named_parameters(len(context.chain.blocks) - 1)}
    head = {name for name, _ in narrow.named_parameters() if f"{place.name}{name}" in last}
    piece = Piece(narrow, settings, head)
    exchange = Exchange(table, place.mlp, narrow, open_wire(world, LANES), rank=world.rank)
    exchange.free_whole()
    local_steps = SubnetsConfig.of(config).local_steps
    widths = " and ".join(map(str, table.hand_sizes(0)))
    context.say(
        f"subnets: {widths} of {' and '.join(map(str, table.widths))} hidden neurons per rank, redistributed every "
        f"{'step' if local_steps == 1 else f'{local_steps} steps'}; {2 * table.wire_bytes()} bytes "
        "per round over all ranks"
    )
    if place.cut and config.model.weights == "none":
        context.say("note: the trunk is randomly initialised; use --weights for a pretrained trunk")
    return Subnets(
        replica=replica,
        world=world,
        wire=exchange.wire,
        local_steps=local_steps,
        whole=place.mlp,
        before=place.before,
        piece=piece,
        exchange=exchange,
        seed=config.run.seed,
        _batches=context.feed.epoch(0)[:1],
    )


def find_mlp(chain: Chain, config: Config, *, ranks: int) -> Place:
    """Return the position of the MLP; raises UsageError if the settings or the model do not go with subnets."""
    found = mlp_of(chain.model)
    if found is None:
        raise UsageError(
            f"--strategy (subnets) distributes the hidden neurons of an MLP, but {config.model.model} has no MLP; "
            "use --model mlp-512x512, or --head mlp-2048 to put an MLP on this model, whose blocks are then frozen"
        )
    name, mlp = found
    cut = len(chain.blocks) - 1 if name else 0
    if config.freeze.cut not in (None, cut):
        why = "all blocks before the MLP are always frozen"
        raise UsageError(f"--cut ({config.freeze.cut}) must be left out with --strategy subnets: {why}")
    least = min(mlp.widths)
    if least < ranks:
        flag, value = ("head", config.head.head) if name else ("model", config.model.model)
        raise UsageError(
            f"--{flag} ({value}) must have at least {ranks} neurons in each hidden layer, one per rank, but one "
            f"layer has {least}; use a wider MLP or fewer ranks"
        )
    if not name:
        return Place(mlp, "", 0, ())
    block = chain.blocks[-1]
    beside = [own for own in block.parameter_names if not own.startswith(f"{name}.")]
    if beside:
        raise UsageError(
            f"--blocks ({config.model.blocks}): the last block of {config.model.model}, {block.name}, must have no "
            f"parameters except the MLP, but has {beside[0]}; choose --blocks so that the MLP is a block, or a "
            "model such as resnet18, which ends in a single layer"
        )
    steps = block.steps
    # An Mlp is an nn.Sequential too, but is not opened here.
    while (
        isinstance(steps[-1], nn.Sequential)
        and not isinstance(steps[-1], Mlp)
        and type(steps[-1]).forward is nn.Sequential.forward
    ):
        steps = (*steps[:-1], *steps[-1])
    if steps[-1] is not mlp:
        raise UsageError(
            f"--model ({config.model.model}) must end with the MLP, but other layers follow {name}; choose a model "
            "such as resnet18"
        )
    return Place(mlp, f"{name}.", cut, steps[:-1])


@dataclass(eq=False)
class Piece:
    """The network of this rank's neurons and its training; its optimizer is reset with every deal."""

    mlp: Mlp
    settings: OptimizerConfig
    head: Collection[str]
    """Names of the parameters with the head's learning rate."""
    update: Update = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the optimizer's state, which belongs to other neurons."""
        named = self.mlp.named_parameters()
        optimizer = open_optimizer(named, self.settings, head=self.head)
        self.update = Update(optimizer, self.settings)


@dataclass(eq=False, kw_only=True)
class Subnets(RoundStrategy):
    """Trains pieces of an MLP on a frozen trunk, or on images; see `Strategy`.

    The replica has the whole model: the trunk's output, read or computed, and evaluation. Its optimizer is not used.
    """

    whole: Mlp
    """The MLP of the replica's model; its parameters exist only while the whole model is needed."""
    before: Sequence[Call]
    """Modules between the trunk's output and the MLP, such as dropout; without parameters."""
    piece: Piece
    exchange: Exchange
    seed: int
    """Seed of the deals."""
    _batches: list[Batch]
    """Batches of the last step, or of the first one to come, which determine the whole network's statistics."""
    _dealt: Deal | None = None
    """The deal of the round; None before its first step."""
    _statistics: list[Tensor] | None = None
    """BatchNorm statistics of the whole network, if it was assembled since the last step."""
    _shown: bool = False
    _collective_bytes: int = 0

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the logits of an evaluation batch. Collective, unless the whole model is assembled already."""
        self._look()
        return self.replica.predict(batch)

    def state_dict(self) -> State:
        """Return this rank's own and trained entries, and the position in the round; also for an assembled model."""
        piece = {}
        if self._dealt is not None:
            weights = {name: parameter.detach() for name, parameter in self.piece.mlp.named_parameters()}
            piece = {"weights": weights, "optimizer": self.piece.update.optimizer.state_dict()}
        own = {
            "owned": dict(self.exchange.owned),
            "piece": piece,
            "rounds": self._position(),
            "freezer": self.replica.freezer.state_dict(),
            "batches": [[torch.from_numpy(b.ids), torch.from_numpy(b.views), b.labels] for b in self._batches],
            "statistics": self._statistics,
            "counts": self.wire.bytes_sent(),
        }
        frozen = {name: tensor.detach() for name, tensor in tensors_of(self.replica.chain, (0, self.cut))}
        return State({"frozen": frozen, "other_bytes": self._collective_bytes}, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same rank."""
        shared, own = state
        self.replica.freezer.load_state_dict(own["freezer"])
        with torch.no_grad():
            for name, tensor in tensors_of(self.replica.chain, (0, self.cut)):
                tensor.copy_(shared["frozen"][name])
            for name, tensor in self.exchange.owned.items():
                tensor.copy_(own["owned"][name])
        self.replica.freezer.prefix.seal()
        self._continue_from(own["rounds"])
        self._dealt = None
        if own["piece"]:
            self._dealt = self._deal()
            self.piece.begin()
            self.piece.update.optimizer.load_state_dict(own["piece"]["optimizer"])
            with torch.no_grad():
                for name, parameter in self.piece.mlp.named_parameters():
                    parameter.copy_(own["piece"]["weights"][name])
        if own["batches"]:
            self._batches = [Batch(i.numpy(), v.numpy(), labels, len(i)) for i, v, labels in own["batches"]]
        self._statistics, self._shown = own["statistics"], False
        self._collective_bytes = shared["other_bytes"]
        self.wire.count_on(own["counts"])

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank its owned entries, with the pieces returned; starts a round. Not a collective.

        The optimizer is reset, as with every deal.
        """
        before = list(owns)
        counts: Counter[str] = Counter()
        for own in before:
            counts.update(own["counts"])
        first = before[0]
        whole = self._whole_of(before)
        table = replace(self.exchange.table, size=size)
        for rank in range(size):
            yield {
                "owned": {p.name: table.own_part(p, whole[p.name], rank).clone() for p in table.parameters},
                "piece": {},
                "rounds": next_round(first["rounds"]),
                "freezer": Freezer.redealt(first["freezer"], restep=restep),
                # The rank may have other samples, so it records batches again.
                "batches": [],
                "statistics": first["statistics"],
                "counts": dict(counts) if rank == 0 else {},
            }

    def report(self) -> dict[str, Any]:
        """Return the replica's report, and the number, bytes and seconds of synchronizations. Collective."""
        table, sent = self.exchange.table, self._sent_by_all()
        ranks = range(table.size)
        own = [4 * sum(math.prod(table.own_shape(p, rank)) for p in table.parameters) for rank in ranks]
        pieces = [sum(table.message_bytes(owner=owner, rank=rank) for owner in ranks) for rank in ranks]
        return {
            **self.replica.report(),
            "allreduce_bytes": 0,
            "other_collective_bytes": self.signal_bytes + self._collective_bytes,
            "subnets": {
                "local_steps": self.local_steps,
                "rounds": self.rounds,
                "wire_bytes": {lane: sent[lane] for lane in (DEALT, RETURNED)},
                "evaluation_wire_bytes": sent[SEEN] + sent[WHOLE],
                "touched": table.touched(),
                "owned_bytes": own,
                "piece_bytes": pieces,
            },
        }

    def _deal(self) -> Deal:
        return deal(self.whole.widths, size=self.world.size, seed=self.seed, number=self.rounds)

    def _inputs(self, features: Tensor) -> Tensor:
        """Return the input of the MLP for the trunk's output."""
        with torch.no_grad(), in_precision(self.replica.halves.precision):
            for call in self.before:
                features = call(features)
        return features

    def _continue_alone(self) -> None:
        """Free the whole model after an evaluation, and deal the neurons at the start of a round."""
        if self._shown:
            self.exchange.free_whole()
            self._shown, self._statistics = False, None
        if self._dealt is None:
            with self.replica.clock.within("allreduce"):
                self._dealt = self._deal()
                self.exchange.deal(self._dealt)
            self.piece.begin()

    def _synchronize(self) -> None:
        assert self._dealt is not None, "a round begins with a deal"
        self.exchange.give_back(self._dealt, lane=RETURNED)
        self._dealt = None

    def _step_alone(self, batches: Sequence[Batch], *, rate: float) -> StepResult:
        """Make an optimizer step of this rank's piece; raise NumericsError, before the update, on this rank only."""
        clock, count, logits_of, value = self.replica.clock, len(batches), [], 0.0
        objective, step = self.replica.objective, self.replica.freezer.step
        self.piece.update.optimizer.zero_grad()
        # For dropout before the MLP; the piece is always in training mode.
        self.replica.halves.be_in_mode(training=True)
        for number, batch in enumerate(batches, 1):
            clock.enter("forward")
            features = self.replica.training.of(batch)
            seen = objective.mix(features, batch.labels, batch.ids, step=step, number=number)
            inputs = self._inputs(seen.features)
            with in_precision(self.replica.halves.precision):
                logits = self.piece.mlp(inputs).float()
            loss = objective.loss(logits, seen) / count
            value += loss.item()
            logits_of.append(logits.detach())
            clock.enter("backward")
            loss.backward()
        if not math.isfinite(value) or not self.piece.update.gradients_are_finite():
            what = "the gradients contain NaN or Inf" if math.isfinite(value) else "the loss is NaN or Inf"
            raise not_finite(step, what, self.replica.advice)
        clock.enter("optimizer")
        self.piece.update.make(rate)
        clock.enter("data")
        self._batches, self._statistics = list(batches), None
        self.replica.freezer.after_step(value)
        answers = {MODEL: Answers(joined(logits_of), joined([batch.labels for batch in batches]))}
        return StepResult(losses={MODEL: value}, answers=answers, leave=False)

    def _look(self) -> None:
        """Assemble the whole model as it is, until the next step. Collective."""
        if self._shown:
            return
        self.replica.take_place()
        if self._dealt is not None:
            self.exchange.give_back(self._dealt, lane=SEEN)
        self.exchange.assemble_whole()
        self._shown = True
        statistics = [tensor for pair in running_statistics(self.whole.modules()) for tensor in pair]
        if self._statistics is None:
            self._collective_bytes += self._take_statistics()
            self._statistics = [tensor.clone() for tensor in statistics]
            return
        for tensor, kept in zip(statistics, self._statistics, strict=True):
            tensor.copy_(kept)

    @torch.no_grad()
    def _take_statistics(self) -> int:
        """Set BatchNorm's statistics from the last step's batches of all ranks; return the bytes sent. Collective."""
        norms = [module for module in self.whole.modules() if isinstance(module, torch.nn.BatchNorm1d)]
        momentum = [norm.momentum for norm in norms]
        # In evaluation there is no dropout before the MLP; here it would also advance the random generator.
        with in_evaluation(self.replica.chain.model):
            for norm in norms:
                norm.reset_running_stats()
                # None averages over the batches.
                norm.momentum = None
                norm.train()
            for batch in self._batches:
                inputs = self._inputs(self.replica.training.of(batch))
                with in_precision(self.replica.halves.precision):
                    self.whole(inputs)
        for norm, before in zip(norms, momentum, strict=True):
            norm.momentum = before
            assert norm.num_batches_tracked is not None
            # The number of evaluations is no part of the model.
            norm.num_batches_tracked.zero_()
        return average_running_statistics(self.whole.modules(), self.world)

    @torch.no_grad()
    def _whole_of(self, owns: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the MLP's parameters from the own states of all ranks, with their pieces returned."""
        table = replace(self.exchange.table, size=len(owns))
        whole = {p.name: torch.empty(p.shape) for p in table.parameters}
        for owner, own in enumerate(owns):
            for p in table.parameters:
                table.own_part(p, whole[p.name], owner).copy_(own["owned"][p.name])
        dealt = deal(table.widths, size=len(owns), seed=self.seed, number=owns[0]["rounds"]["ended"])
        for rank, own in enumerate(owns):
            for p in table.parameters if own["piece"] else ():
                indices = [
                    torch.arange(p.shape[dimension]) if layer is None else dealt[layer][rank]
                    for dimension, layer in enumerate(p.layers)
                ]
                put(whole[p.name], indices, own["piece"]["weights"][p.name])
        return whole
