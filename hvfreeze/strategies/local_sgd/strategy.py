"""Local SGD: every rank trains its own copy of the model for some steps, then all ranks average their copies.

    round:  step -> step -> ... -> step (no messages) -> average parameters over ranks, and start the next round

A round may extend over the end of an epoch. If the model is needed inside a round, ranks average temporarily and then
continue from their own copies, so that evaluation changes nothing. Source: Stich 2019, "Local SGD Converges Fast and
Communicates Little" (arXiv 1805.09767).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hvfreeze.comm.point_to_point import Wire, open_wire
from hvfreeze.comm.replica_sync import (
    average_running_statistics,
    broadcast_tensors,
    other_buffers,
    running_statistics,
)
from hvfreeze.comm.world import LoneRank
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch
from hvfreeze.strategies.base import Answers, BuildContext, State, StepResult
from hvfreeze.strategies.data_parallel import open_replicas, pooled
from hvfreeze.strategies.local_sgd.settings import LocalSgdConfig
from hvfreeze.strategies.rounds import RoundStrategy, next_round
from hvfreeze.wording import plural

LANES = ("parts", "means")
LOOKING = "evaluation."
"""Prefix of the lanes for temporary averages."""


def open_local_sgd(context: BuildContext, config: Config) -> LocalSgd:
    """Return the local SGD strategy of a run. Collective.

    Raises:
        UsageError: settings do not go with local SGD, the model or the world; on all ranks.
    """
    world = context.world
    replica = open_replicas(context, config, exchanging=LoneRank(world))
    steps = LocalSgdConfig.of(config).local_steps
    context.say(f"local SGD: ranks train alone for {plural(steps, 'step')}, then average their models")
    wire = open_wire(world, [prefix + lane for prefix in ("", LOOKING) for lane in LANES])
    return LocalSgd(replica=replica, world=world, wire=wire, local_steps=steps)


@dataclass(eq=False, kw_only=True)
class LocalSgd(RoundStrategy):
    """Trains a replica on each rank, and averages them at the end of every round; see `Strategy`."""

    _payload_bytes: int = 0
    """Bytes of parameters that this rank sent at the ends of rounds."""
    _statistics_bytes: int = 0
    _kept: list[Tensor] = field(default_factory=list)
    """During a temporary average, the values from which this rank continues, in the order of `_moving`."""

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the logits of an evaluation batch, of this rank's own model before `begin_epoch`. Not a collective."""
        return self.replica.predict(batch)

    def state_dict(self) -> State:
        """Return this rank's model and optimizer, and the position in the round; also during a temporary average."""
        state = self.replica.state_dict()
        moving = [tensor.detach().clone() for tensor in self._kept or self._moving()]
        parameters, buffers = len(self._parameters()), len(moving) - len(self._buffers())
        own = {
            **state.own,
            "parameters": moving[:parameters],
            "statistics": moving[parameters:buffers],
            "buffers": moving[buffers:],
            "optimizer": state.shared["optimizer"],
            "rounds": self._position(),
            "counts": self.wire.bytes_sent(),
        }
        shared = {key: value for key, value in state.shared.items() if key != "optimizer"}
        return State({**shared, "exchanged": [self._payload_bytes, self._statistics_bytes]}, own)

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same rank."""
        shared, own = state
        # The statistics of frozen blocks are in the shared model. These are the tensors that it is loaded into, not
        # copies, so the replica keeps what it has loaded.
        frozen = [tensor for pair in running_statistics(self.replica.chain.modules(0, self.cut)) for tensor in pair]
        inner = {**own, "statistics": [*frozen, *own["statistics"]]}
        self.replica.load_state_dict(State({**shared, "optimizer": own["optimizer"]}, inner))
        self._kept = []
        with torch.no_grad():
            for tensor, saved in zip(self._parameters(), own["parameters"], strict=True):
                tensor.copy_(saved)
            # Checkpoints of earlier versions have none.
            for (_, buffer), saved in zip(self._buffers(), own.get("buffers", ())):
                buffer.copy_(saved)
        self._continue_from(own["rounds"])
        self._payload_bytes, self._statistics_bytes = shared["exchanged"]
        self.wire.count_on(own["counts"])

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each rank the average of models and optimizers, which starts a round. Not a collective."""
        totals: list[Any] = []
        counts: Counter[str] = Counter()
        number = 0

        def passed_on() -> Iterator[dict[str, Any]]:
            nonlocal number
            for own in owns:
                local = (own["parameters"], own["optimizer"])
                totals[:] = [added(totals[0], local)] if totals else [local]
                counts.update(own["counts"])
                number += 1
                yield own

        base = pooled(passed_on(), restep=restep)
        parameters, optimizer = divided(totals[0], number)
        rounds = next_round(base["rounds"])
        state = {**base, "parameters": list(parameters), "optimizer": optimizer, "rounds": rounds}
        yield {**state, "counts": dict(counts)}
        yield from repeat({**state, "counts": {}}, size - 1)

    def report(self) -> dict[str, Any]:
        """Return the replica's report, and the number and bytes of synchronizations. Collective."""
        sent = self._sent_by_all()
        return {
            **self.replica.report(),
            "allreduce_bytes": self._payload_bytes,
            "other_collective_bytes": self.signal_bytes + self._statistics_bytes,
            "local_sgd": {
                "local_steps": self.local_steps,
                "rounds": self.rounds,
                "wire_bytes": {lane: sent[lane] for lane in LANES},
                "evaluation_wire_bytes": sum(sent[LOOKING + lane] for lane in LANES),
            },
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter for _, parameter in self.replica.reducer.carried]

    def _moving(self) -> list[Tensor]:
        """Return the tensors that differ between ranks in a round: parameters, running statistics, other buffers."""
        pairs = running_statistics(self.replica.chain.modules(self.cut))
        buffers = [buffer for _, buffer in self._buffers()]
        return [*self._parameters(), *(tensor for pair in pairs for tensor in pair), *buffers]

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers behind the cut that are not running statistics, such as a spectral norm's vectors."""
        chain = self.replica.chain
        return other_buffers(chain.named_buffers(self.cut), chain.modules(self.cut))

    def _look(self) -> None:
        """Show the average of all ranks' models and statistics, and rank 0's other buffers, until the next step.

        Collective.
        """
        if self._kept:
            return
        self._kept = [tensor.detach().clone() for tensor in self._moving()]
        if self.done:
            parts, means = LANES
            self._average((LOOKING + parts, LOOKING + means))
        modules = self.replica.chain.modules(self.cut)
        self._statistics_bytes += average_running_statistics(modules, self.world)
        buffers = dict(self._buffers())
        if buffers and self.world.size > 1:
            # Not averaged: a mean of unit vectors is no unit vector, and a mean of counts no count.
            broadcast_tensors(buffers, self.world)
            self._statistics_bytes += sum(buffer.nbytes for buffer in buffers.values())

    @torch.no_grad()
    def _continue_alone(self) -> None:
        """Restore this rank's own model after a temporary average."""
        for tensor, kept in zip(self._moving(), self._kept):
            tensor.copy_(kept)
        self._kept = []

    def _step_alone(self, batches: Sequence[Batch], *, rate: float) -> StepResult:
        return self.replica.step(batches, rate=rate, leave=False)

    def _synchronize(self) -> None:
        self._payload_bytes += self._average(LANES)

    @torch.no_grad()
    def _average(self, lanes: tuple[str, str]) -> int:
        """Average the parameters over ranks; return their bytes, 0 for a single rank. Collective."""
        parameters = self._parameters()
        for dtype in (torch.float32, torch.float64):
            tensors = [tensor for tensor in parameters if tensor.dtype == dtype]
            if not tensors:
                continue
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            average_(flat, self.wire, rank=self.world.rank, size=self.world.size, lanes=lanes)
            for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view(tensor.shape))
        return sum(tensor.nbytes for tensor in parameters) if self.world.size > 1 else 0


def added(one: Any, other: Any) -> Any:
    """Return the sum of two optimizer states, or other trees of one structure; non-tensors are taken from the first."""
    return tree_map(lambda a, b: a + b if isinstance(a, Tensor) and a.is_floating_point() else a, one, other)


def divided(total: Any, number: int) -> Any:
    """Return the mean from the sum `added` of `number` trees."""
    return tree_map(lambda a: a / number if isinstance(a, Tensor) and a.is_floating_point() else a, total)


def average_(flat: Tensor, wire: Wire, *, rank: int, size: int, lanes: tuple[str, str]) -> None:
    """Average `flat` over all ranks: ((v_0 + v_1) + ...) / n. Collective.

    The sum is taken in rank order, with the same bits on every rank, as in one process. The order of MPI's sums depends
    on its version, the size and the network. Each rank receives one part of every vector, adds the parts up, and
    returns the mean: the bytes of a ring allreduce.

    Args:
        flat: (N,) floats, of one length and type on all ranks.
        wire: lanes between the ranks.
        rank: this rank.
        size: number of ranks.
        lanes: one for the parts of vectors, one for their means.
    """
    gathering, returning = lanes
    parts = list(flat.tensor_split(size))
    others = [other for other in range(size) if other != rank]
    for other in others:
        wire.put(parts[other], to=other, lane=gathering)
    local = parts[rank]
    received = [
        local.clone() if source == rank else wire.get(local.shape, dtype=flat.dtype, source=source, lane=gathering)
        for source in range(size)
    ]
    *_, total = accumulate(received, torch.add)
    local.copy_(total / size)
    for other in others:
        wire.put(local, to=other, lane=returning)
        wire.expect(parts[other].shape, dtype=flat.dtype, source=other, lane=returning)
    # `flat` must be sent before the means overwrite it.
    wire.drain()
    for other in others:
        parts[other].copy_(wire.get(parts[other].shape, dtype=flat.dtype, source=other, lane=returning))
