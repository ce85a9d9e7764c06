"""What the strategy adds to a run's record: what travelled, what was stored, and what each rank had and did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvfreeze.chain.segments import Segment
from hvfreeze.ranks.machine.memory import peak_memory_bytes
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.shared_trunk.features import TrunkFeatures
from hvfreeze.strategies.shared_trunk.line import LANES


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What all ranks know of the run."""

    names: tuple[str, ...]
    """Of the tasks; task i is trained on rank i modulo the number of ranks."""
    classes: tuple[tuple[str, ...], ...]
    """Of each task."""
    segments: tuple[Segment, ...]
    """By rank; those without one are left out."""
    whole: bool
    """Every rank runs the whole trunk: the baseline."""
    labels: str
    cut: int
    """Blocks that are frozen in every model."""
    depth: int
    """Blocks that are frozen in some model."""
    identity: dict[str, Any]
    """What a checkpoint must have been made for."""
    cache: str
    exact: bool
    """Whether stored features have the bits that would be computed."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank had and did."""

    bytes: int
    """Of the training features that it has stored."""
    rows_written: int
    rows_read: int
    exact: bool
    seconds_saved: float
    """By batches that the line did not run for, less what the cache took."""
    trunk_bytes: int
    """Of the parameters and buffers of its segment."""
    forwards: int
    """Training batches that its segment has seen."""
    cpu_seconds: float
    """In training, of all its threads."""
    forward_seconds: float
    """Of its segment and its heads, in training."""
    peak_memory_bytes: int
    """Resident since training began, of the whole process, the program itself included."""
    wait_seconds: float
    """For what other ranks sent."""
    sent: dict[str, int]
    """Bytes by lane, in training."""
    sent_evaluating: int


def share_of(
    training: TrunkFeatures, evaluation: TrunkFeatures, *, trunk_bytes: int, sent: dict[str, int], clock: PhaseClock
) -> Share:
    """Return this rank's."""
    stores = list((training.stores or {}).values())
    took = sum(store.counters.read_seconds + store.counters.write_seconds for store in stores)
    of_a_batch = training.serve_seconds / max(1, training.batches_served)
    counts = training.line.wire.counts
    return Share(
        bytes=sum(store.stored_bytes for store in stores),
        rows_written=sum(store.counters.rows_written for store in stores),
        rows_read=sum(store.counters.rows_read for store in stores),
        exact=all(store.exact for store in [*stores, *(evaluation.stores or {}).values()]),
        seconds_saved=of_a_batch * training.batches_silent - took if stores else 0.0,
        trunk_bytes=trunk_bytes,
        forwards=training.line.forwards,
        cpu_seconds=clock.processor_seconds(),
        forward_seconds=clock.seconds["forward"],
        peak_memory_bytes=peak_memory_bytes(),
        wait_seconds=sum(count.wait_seconds for count in counts.values()),
        sent=sent,
        sent_evaluating=sum(count.bytes_sent for lane, count in counts.items() if lane not in LANES),
    )


def together_of(facts: Facts, shares: list[Share]) -> dict[str, Any]:
    """Return the entries of a report, of what all ranks had and did, in rank order."""
    return {
        "allreduce_bytes": 0,
        "cache": {
            "mode": facts.cache,
            "exact": facts.exact and all(share.exact for share in shares),
            "bytes": sum(share.bytes for share in shares),
            "rows_written": sum(share.rows_written for share in shares),
            "rows_read": sum(share.rows_read for share in shares),
            "seconds_saved_predicted": 0.0,
            "seconds_saved": sum(share.seconds_saved for share in shares) / len(shares),
        },
        "trunk": {
            "mode": "whole" if facts.whole else "split",
            "segments": [list(segment) for segment in facts.segments],
            "labels": facts.labels,
            "wire_bytes": {lane: sum(share.sent[lane] for share in shares) for lane in LANES},
            "evaluation_wire_bytes": sum(share.sent_evaluating for share in shares),
            "trunk_bytes": [share.trunk_bytes for share in shares],
            "forwards": [share.forwards for share in shares],
            "cpu_seconds": [share.cpu_seconds for share in shares],
            "forward_seconds": [share.forward_seconds for share in shares],
            "peak_memory_bytes": [share.peak_memory_bytes for share in shares],
            "wait_seconds": [share.wait_seconds for share in shares],
        },
    }
