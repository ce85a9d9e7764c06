"""What the grid adds to a run's record: what travelled, and what each rank had and did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hvfreeze.freezing.freezer import Freezer
from hvfreeze.prefix.caching import NOTHING_KEPT
from hvfreeze.ranks.machine.memory import peak_memory_bytes
from hvfreeze.ranks.wire import LaneCounts
from hvfreeze.strategies.grid.dealing.deal import Deal
from hvfreeze.strategies.grid.dealing.moving import MOVING
from hvfreeze.strategies.grid.facts import Facts
from hvfreeze.strategies.grid.line.pipeline import EVALUATION, LANES
from hvfreeze.strategies.grid.rows.entry import merged
from hvfreeze.strategies.grid.rows.errands import ERRANDS


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank had and did."""

    allreduce_bytes: int
    """Gradients that it handed over."""
    other_bytes: int
    sent: dict[str, int]
    """Bytes by lane."""
    parameter_bytes: int
    """Of its blocks, buffers included."""
    optimizer_bytes: int
    peak_memory_bytes: int
    """Resident since training began, of the whole process, the program itself included."""
    cpu_seconds: float
    """In training, of all its threads."""
    wait_seconds: float
    """For what its neighbours sent, in training."""
    cache: Mapping[str, Any] | None
    """What this rank answers for of the training samples' cache."""


def share_of(
    freezer: Freezer,
    tensors: Sequence[tuple[str, Tensor]],
    *,
    sent: Mapping[str, int],
    counts: Mapping[str, LaneCounts],
    cpu_seconds: float,
    signal_bytes: int,
    cache: Mapping[str, Any] | None,
) -> Share:
    """Return this rank's."""
    states = [value for state in freezer.optimizer.state.values() for value in state.values()]
    return Share(
        allreduce_bytes=freezer.reducer.payload_bytes,
        other_bytes=freezer.reducer.other_bytes + signal_bytes,
        sent=dict(sent),
        parameter_bytes=sum(tensor.nbytes for _, tensor in tensors),
        optimizer_bytes=sum(value.nbytes for value in states if isinstance(value, Tensor)),
        peak_memory_bytes=peak_memory_bytes(),
        cpu_seconds=cpu_seconds,
        wait_seconds=sum(counts[lane].wait_seconds for lane in LANES),
        cache=cache,
    )


def together_of(facts: Facts, deals: Sequence[Deal], shares: Sequence[Share]) -> dict[str, Any]:
    """Return the entries of a report, of what all ranks had and did, in rank order; `deals` the run has had so far."""
    cache: dict[str, Any] = {}
    for share in shares:
        cache = merged(cache, share.cache) if share.cache else cache
    return {
        # Partitions differ in size: what the rank that hands over most does.
        "allreduce_bytes": max(share.allreduce_bytes for share in shares),
        "other_collective_bytes": max(share.other_bytes for share in shares),
        "cache": {**(cache or NOTHING_KEPT), "mode": facts.cache},
        "grid": {
            **facts.shape(),
            "pipeline": facts.schedule,
            "segments": [list(segment) for segment in deals[-1].segments],
            "deals": [{**deal.plain(), "replicas": facts.replicas * facts.parts // deal.parts} for deal in deals],
            "wire_bytes": {lane: sum(share.sent[lane] for share in shares) for lane in LANES},
            "evaluation_wire_bytes": sum(share.sent[EVALUATION] for share in shares),
            "errand_bytes": sum(share.sent[ERRANDS] for share in shares),
            "moved_bytes": sum(share.sent[MOVING] for share in shares),
            "allreduce_bytes": [share.allreduce_bytes for share in shares],
            "parameter_bytes": [share.parameter_bytes for share in shares],
            "optimizer_bytes": [share.optimizer_bytes for share in shares],
            "peak_memory_bytes": [share.peak_memory_bytes for share in shares],
            "cpu_seconds": [share.cpu_seconds for share in shares],
            "wait_seconds": [share.wait_seconds for share in shares],
        },
    }
