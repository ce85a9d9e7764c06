"""The partitioning of a grid: which rank holds which blocks, and how it changes between epochs and from checkpoints."""

from __future__ import annotations

import io
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvfreeze.comm.mesh import Mesh
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.replica_sync import pooled_statistics
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.data.batches import Batch
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.model.blocks import Chain
from hvfreeze.model.segments import FORWARD_SHARE, Segment, cut_evenly, drop_tensors, tensors_of
from hvfreeze.optim import Update
from hvfreeze.plain_load import load_plain
from hvfreeze.strategies.model_parallel import optimizer_state, put_optimizer_state
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class GridFacts:
    """The shape of the grid, equal on all ranks."""

    parts: int
    replicas: int
    micro_batches: int
    schedule: str
    """One of `SCHEDULES`."""
    cache: str
    """The value of --cache."""
    repartitions: bool
    """Whether ranks whose blocks are frozen or cached form further pipelines of the other blocks."""

    def shape(self) -> dict[str, Any]:
        """Return the shape at the start."""
        return {"parts": self.parts, "replicas": self.replicas, "micro_batches": self.micro_batches}

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must match; the cache is included because it changes repartitioning."""
        return {**self.shape(), "redeal": f"with --cache {self.cache}" if self.repartitions else "off"}


@dataclass(frozen=True)
class Partitioning:
    """The blocks of each partition from a step on; equal on all ranks."""

    segments: tuple[Segment, ...]
    step: int = 0
    """The first step with this partitioning."""
    cached: bool = False
    """Whether the frozen prefix was assumed to cost nothing."""

    @property
    def parts(self) -> int:
        """Ranks of a pipeline."""
        return len(self.segments)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Partitioning:
        """Undo `plain`."""
        return cls(tuple((start, stop) for start, stop in plain["segments"]), plain["step"], plain["cached"])

    def plain(self) -> dict[str, Any]:
        """Return the partitioning as plain values."""
        segments = [list(segment) for segment in self.segments]
        return {"step": self.step, "parts": self.parts, "segments": segments, "cached": self.cached}

    def describe(self) -> str:
        """Return one clause for the user."""
        blocks = ", ".join(f"{start}..{stop - 1}" for start, stop in self.segments)
        return f"{plural(self.parts, 'part')} (blocks {blocks})"

    def partition_of(self, block: int) -> int:
        """Return the partition that holds a block."""
        return next(part for part, (start, stop) in enumerate(self.segments) if start <= block < stop)


def shorter_lines(parts: int, *, micro_batches: int) -> list[int]:
    """Return the numbers of partitions, ascending, that may replace `parts`: pipelines must share a batch evenly."""
    return [fewer for fewer in range(1, parts) if parts % fewer == 0 and micro_batches % (parts // fewer) == 0]


def next_partitioning(
    now: Partitioning, *, cut: int, cached: bool, step: int, costs: Sequence[float], first: int, micro_batches: int
) -> Partitioning | None:
    """Return the partitioning from `step` on, None if it does not change; `first` is the initial number of partitions.

    The number of pipelines grows by a whole factor, so every rank keeps its replica's samples. While a frozen prefix
    must be computed, training partitions keep at least as many ranks as they had; once it is `cached`, at most as many.
    `costs` are those of each block's forward and backward pass.
    """
    training = sum(stop > cut for _, stop in now.segments)
    possible = shorter_lines(first, micro_batches=micro_batches)
    fewer = [parts for parts in possible if now.parts % parts == 0 and parts < min(now.parts, len(costs) - cut + 1)]
    fitting = [parts for parts in fewer if (parts <= training if cached else parts >= training)]
    if training < now.parts and fitting:
        parts = (max if cached else min)(fitting)
        return Partitioning(cut_again(costs, cut=cut, cached=cached, parts=parts), step, cached)
    if cached and not now.cached and 1 < now.parts < first and now.parts <= len(costs) - cut:
        # As many ranks as before, but the blocks of the first partition cost less than they did.
        segments = cut_again(costs, cut=cut, cached=True, parts=now.parts)
        return Partitioning(segments, step, True) if segments != now.segments else None
    return None


def cut_again(costs: Sequence[float], *, cut: int, cached: bool, parts: int) -> tuple[Segment, ...]:
    """Return `parts` segments of similar cost; the first has the frozen blocks and at least one trained block."""
    frozen = 0.0 if cached else FORWARD_SHARE * sum(costs[:cut])
    segments = cut_evenly([frozen + costs[cut], *costs[cut + 1 :]], parts=parts)
    return tuple((start + cut if start else 0, stop + cut) for start, stop in segments)


def transfers(before: Sequence[Segment], after: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Return (block, from, to) for every block to be sent; segments are by rank, now and after."""
    return [
        (block, next(rank for rank, (start, stop) in enumerate(before) if start <= block < stop), to)
        for to, (start, stop) in enumerate(after)
        for block in range(start, stop)
        if not before[to][0] <= block < before[to][1]
    ]


MOVING = "blocks"
"""The lane on which blocks are sent."""
BlockState = dict[str, dict[str, Any]]
"""State of some blocks: `tensors`, `optimizer` and `exponents`, each by tensor name."""


def move(
    wire: Wire,
    chain: Chain,
    local: BlockState,
    *,
    place: int,
    ranks: Sequence[int],
    before: Sequence[Segment],
    after: Sequence[Segment],
) -> BlockState:
    """Return the state of this rank's next blocks, bit for bit, from its own and the received ones. Collective.

    All of `ranks` must call this. They hold the chain, once or more, before and after. `place` is this rank's index
    among them, `before` and `after` their blocks by index, `local` the state of this rank's current blocks.
    """
    blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block, source, to in transfers(before, after):
        blocks[source, to].append(block)
    for (source, to), some in blocks.items():
        if source == place:
            buffer = io.BytesIO()
            torch.save(of_blocks(local, chain, some), buffer)
            data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
            wire.put(torch.tensor([len(data)]), to=ranks[to], lane=MOVING, seq=0)
            wire.put(data, to=ranks[to], lane=MOVING, seq=1)
    result = of_blocks(local, chain, [block for block in range(*after[place]) if block in range(*before[place])])
    for source in [source for source, to in blocks if to == place]:
        length = int(wire.get((1,), dtype=torch.int64, source=ranks[source], lane=MOVING, seq=0))
        data = wire.get((length,), dtype=torch.uint8, source=ranks[source], lane=MOVING, seq=1)
        for kind, found in load_plain(io.BytesIO(data.numpy().tobytes())).items():
            result[kind] |= found
    wire.drain()
    return result


def of_blocks(state: BlockState, chain: Chain, blocks: Sequence[int]) -> BlockState:
    """Return the part of `state` that belongs to some blocks."""
    names = [name for block in blocks for name, _ in tensors_of(chain, (block, block + 1))]
    return {kind: {name: found[name] for name in names if name in found} for kind, found in state.items()}


def repartitioned(
    owns: Iterable[Mapping[str, Any]], chain: Chain, segments: Iterable[Segment], *, restep: Callable[[int], int]
) -> Iterator[dict[str, Any]]:
    """Yield for each of `segments` the state for a grid of another shape.

    Running statistics are pooled over all replicas. Every rank gets the gradient byte count of the rank that sent most;
    the bytes sent to neighbours are the first rank's.
    """
    tensors: dict[str, list[Tensor]] = {}
    optimizer: dict[str, Any] = {}
    exponents: dict[str, int] = {}
    exchanged = [0, 0]
    first: Mapping[str, Any] = {}
    sent: Counter[str] = Counter()
    for own in owns:
        first = first or own
        sent.update(own["sent"])
        for name, tensor in own["tensors"].items():
            # Parameters are equal on all replicas; each has its own BatchNorm statistics.
            if name not in tensors or name.endswith(("running_mean", "running_var")):
                tensors.setdefault(name, []).append(tensor)
        optimizer |= own["optimizer"]
        exponents |= own["reducer"]["exponents"]
        exchanged = [max(pair) for pair in zip(exchanged, own["bytes"], strict=True)]
    values = {name: copies[0] for name, copies in tensors.items()}
    for name, copies in tensors.items():
        if name.endswith("running_mean") and len(copies) > 1:
            other = name.removesuffix("mean") + "var"
            values[name], values[other] = pooled_statistics(copies, tensors[other])
    freezer = Freezer.redealt(first["freezer"], restep=restep)
    for rank, segment in enumerate(segments):
        local = [name for name, _ in tensors_of(chain, segment)]
        yield {
            "tensors": {name: values[name] for name in local},
            "optimizer": {name: optimizer[name] for name in local if name in optimizer},
            "freezer": freezer,
            "reducer": {**first["reducer"], "exponents": {n: exponents[n] for n in local if n in exponents}},
            "bytes": exchanged,
            "sent": dict(sent) if rank == 0 else dict.fromkeys(sent, 0),
        }


def sizes_of(rows: int, parts: int) -> Sequence[int]:
    """Return the number of samples in each of `parts` micro-batches of `rows` samples; the first ones have one more."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def micro_batches_of(batch: Batch, *, micro_batches: int, lines: int = 1, line: int = 0) -> list[Batch]:
    """Return this pipeline's part of a batch that `lines` pipelines share, in order, as micro-batches."""
    starts = [0, *accumulate(sizes_of(len(batch.ids), micro_batches))]
    count = micro_batches // lines
    found = []
    for start, stop in list(pairwise(starts))[line * count : (line + 1) * count]:
        counted = max(0, min(batch.counted, stop) - start)
        found.append(Batch(batch.ids[start:stop], batch.views[start:stop], batch.labels[start:stop], counted))
    return found


class Place(NamedTuple):
    """A rank's place in pipelines of some length."""

    mesh: Mesh
    line: World | None
    """The world of its pipeline, if its ranks combine observations."""


class LocalStage:
    """The blocks that this rank holds and trains; they change between epochs if blocks freeze.

    Args:
        facts: shape of the grid.
        partitioning: the initial one.
        places: this rank's place for each possible length of pipelines.
        chain: the model, of which this rank drops all but its blocks.
        wire: has the lane `MOVING`.
        open_freezer: returns what trains the given blocks at a place, with an optimizer and a reducer, without state.
        settings: how parameters are updated.
        costs: of each block, for later partitionings.
    """

    def __init__(
        self,
        facts: GridFacts,
        partitioning: Partitioning,
        places: Mapping[int, Place],
        chain: Chain,
        wire: Wire,
        *,
        open_freezer: Callable[[Place, Segment], Freezer],
        settings: OptimizerConfig,
        costs: Sequence[float],
    ) -> None:
        self.facts, self.chain, self.wire = facts, chain, wire
        self._places, self._open_freezer, self._settings, self._costs = places, open_freezer, settings, costs
        self._trained = [parameter for _, parameter in chain.named_parameters() if parameter.requires_grad]
        self.partitionings: list[Partitioning] = []
        """The partitionings of the run, the current one last."""
        self._hold([partitioning], {})

    @property
    def partitioning(self) -> Partitioning:
        """The current partitioning."""
        return self.partitionings[-1]

    @property
    def mesh(self) -> Mesh:
        """This rank's current place."""
        return self._places[self.partitioning.parts].mesh

    @property
    def segment(self) -> Segment:
        """The blocks that this rank holds."""
        return self.partitioning.segments[self.mesh.partition]

    @property
    def lines(self) -> int:
        """The number of pipelines that share a replica's samples."""
        return self.facts.parts // self.partitioning.parts

    @property
    def line(self) -> int:
        """The index of this rank's pipeline among them."""
        return self.mesh.replica % self.lines

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Return this pipeline's micro-batches of a batch."""
        return micro_batches_of(batch, micro_batches=self.facts.micro_batches, lines=self.lines, line=self.line)

    @property
    def epochs_at_cut(self) -> int:
        """Whole epochs trained since the last change of the cut, counted in steps; no clock is read."""
        cadence, moved = self.freezer.cadence, self.freezer.cut_history[-1].step
        return cadence.epoch(self.freezer.step) - math.ceil(cadence.epochs_in(moved))

    def next_partitioning(self, *, cached: bool) -> Partitioning | None:
        """Return the next partitioning, None if it does not change."""
        found = next_partitioning(
            self.partitioning,
            cut=self.freezer.cut,
            cached=cached,
            step=self.freezer.step,
            costs=self._costs,
            first=self.facts.parts,
            micro_batches=self.facts.micro_batches,
        )
        # Every rank must have something to train, as at the start.
        fits = found is not None and all(self.chain.named_parameters(*segment) for segment in found.segments)
        return found if fits else None

    def hand_over(self, after: Partitioning) -> None:
        """Change to a new partitioning, bit for bit; observations of the interval are dropped. Collective.

        Running statistics must have been averaged.
        """
        state, parts, rank = self.state(), self.facts.parts, self.mesh.world.rank
        first = rank - rank % parts
        moved = move(
            self.wire,
            self.chain,
            {
                "tensors": state["tensors"],
                "optimizer": state["optimizer"],
                "exponents": state["reducer"]["exponents"],
            },
            place=rank - first,
            ranks=range(first, first + parts),
            before=[self.partitioning.segments[place % self.partitioning.parts] for place in range(parts)],
            after=[after.segments[place % after.parts] for place in range(parts)],
        )
        freezer = Freezer.redealt(state["freezer"], restep=lambda step: step)
        reducer = {**state["reducer"], "exponents": moved.pop("exponents")}
        self.put_back([*self.partitionings, after], {**state, **moved, "freezer": freezer, "reducer": reducer})

    def state(self) -> dict[str, Any]:
        """Return the state of this rank's blocks and their training."""
        optimizer, reducer = self.freezer.optimizer, self.freezer.reducer
        return {
            "tensors": {name: tensor.detach() for name, tensor in tensors_of(self.chain, self.segment)},
            "optimizer": optimizer_state(optimizer, self.chain.named_parameters(*self.segment)),
            "freezer": self.freezer.state_dict(),
            "reducer": reducer.state_dict(),
            "bytes": [reducer.payload_bytes, reducer.other_bytes],
        }

    def put_back(self, partitionings: list[Partitioning], state: Mapping[str, Any]) -> None:
        """Load a `state` of this rank's blocks in the last of `partitionings`. Not a collective."""
        self.freezer.reducer.carry([])
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self._hold(partitionings, state["tensors"])
        freezer = self.freezer
        # The freezer first: it takes frozen parameters out of the optimizer.
        freezer.load_state_dict(state["freezer"])
        put_optimizer_state(freezer.optimizer, self.chain.named_parameters(*self.segment), state["optimizer"])
        freezer.reducer.load_state_dict(state["reducer"])
        freezer.reducer.payload_bytes, freezer.reducer.other_bytes = state["bytes"]
        freezer.prefix.seal()

    def _hold(self, partitionings: list[Partitioning], tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's blocks, with values from `tensors`, and drop all others."""
        self.partitionings = partitionings
        for name, tensor in tensors_of(self.chain, self.segment):
            if name in tensors:
                tensor.data = tensors[name].detach().clone()
        drop_tensors(self.chain, 0, self.segment[0])
        drop_tensors(self.chain, self.segment[1], len(self.chain.blocks))
        self.freezer = self._open_freezer(self._places[self.partitioning.parts], self.segment)
        # The norm of --clip-grad is that of all blocks together, which no rank has alone.
        self.update = Update(self.freezer.optimizer, replace(self._settings, clip_grad=None))
