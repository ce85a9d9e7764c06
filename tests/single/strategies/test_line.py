from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvfreeze.comm import agreement
from hvfreeze.comm.agreement import TensorLayout
from hvfreeze.comm.point_to_point import Wire
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.local_critics.strategy import LocalCritics
from hvfreeze.strategies.shared_trunk.line import LANES, Line, LinePlan
from tests.single.ranks_in_threads import on_ranks

BOUNDARIES = [TensorLayout((2, n), (n, 1), torch.float32) for n in (10, 7, 5, 3)]
THREE = ((0, 1), (1, 2), (2, 3))


def test_features_come_from_the_rank_that_computes_them() -> None:
    plan = LinePlan(THREE, ((3,), (2, 3), (), (3,)), ((0,), (1, 4), (), (3,)))
    assert [plan.source_of(depth) for depth in (1, 2, 3)] == [0, 1, 2]
    assert plan.receivers(3) == [0, 1, 3] and plan.receivers(2) == [1]
    assert [plan.place_of(rank) for rank in range(4)] == [0, 1, 2, None]


def test_the_bytes_of_a_batch_are_known_beforehand() -> None:
    heads = (((3,), (2, 3), (), (3,)), ((0,), (1, 4), (), (3,)))
    sent = {
        how: LinePlan(THREE, *heads, how).bytes_per_batch(BOUNDARIES, rows=2) for how in ("replay", "direct", "ride")
    }
    # Both inner boundaries once; from rank 2 to ranks 0, 1 and 3, while rank 1 has its own at depth 2.
    assert all(
        lanes["activations"] == 4 * 2 * (7 + 5) and lanes["features"] == 4 * 2 * 3 * 3 for lanes in sent.values()
    )
    assert sent["replay"]["labels"] == 0
    assert sent["direct"]["labels"] == 8 * 2 * (2 + 1), "from rank 0 to ranks 1 and 3"
    assert sent["ride"]["labels"] == 8 * 2 * (2 * 4 + 1 + 2 + 1), "four over each of two hops, then to ranks 0, 1 and 3"


def line(
    plan: LinePlan,
    seen: list[int],
    *,
    rank: int = 0,
    wire: Wire | None = None,
    boundaries: Sequence[TensorLayout] = BOUNDARIES,
) -> Line:
    def load(batch: Batch) -> Tensor:
        seen.append(int(batch.ids[0]))
        return torch.from_numpy(batch.ids).float()[:, None]

    return Line(
        plan=plan,
        rank=rank,
        wire=Wire(LANES) if wire is None else wire,
        boundaries=boundaries,
        run=lambda x, start, stop: x * 10 + stop,
        load=load,
        labels_of=lambda batch: torch.from_numpy(np.stack([batch.ids, -batch.ids])),
        clock=PhaseClock(),
    )


def batch(number: int) -> Batch:
    return Batch(np.array([number]), np.zeros(1, np.int64), torch.zeros(1), 1)


def test_a_line_of_one_serves_what_was_announced_in_order() -> None:
    seen: list[int] = []
    alone = line(LinePlan(((0, 3),), ((2, 3),), ((1, 0),), "ride"), seen)
    batches = [batch(4), batch(5), batch(6)]
    alone.begin(batches)
    for expected in (4, 5):
        assert alone.next is batches[expected - 4]
        served = alone.serve()
        assert {depth: x.item() for depth, x in served.features.items()} == {
            2: expected * 100 + 12,
            3: expected * 1000 + 123,
        }
        assert served.labels is not None and served.labels.flatten().tolist() == [-expected, expected]
    alone.begin([batch(9)])
    assert alone.serve().features[3].item() == 9123 and alone.next is None
    assert seen == [4, 5, 9] and alone.forwards == 3


def test_where_nobody_has_a_head_nothing_is_computed() -> None:
    seen: list[int] = []
    idle = line(LinePlan(((0, 3),), ((),), ((),)), seen)
    idle.begin([batch(1)])
    assert idle.serve().features == {} and idle.forwards == 0 and seen == []


Address = tuple[int, int, str, int]
"""From, to, lane and number."""


class Between(Wire):
    """The wire of one of several lines in threads; `expected` are messages that it has begun to receive."""

    def __init__(self, rank: int, mail: dict[Address, SimpleQueue[Tensor]]) -> None:
        super().__init__(LANES)
        self.rank, self.mail = rank, mail
        self.expected: Counter[tuple[int, str, int]] = Counter()
        self.early = 0

    def put(self, tensor: Tensor, *, to: int, lane: str, seq: int = 0) -> None:
        self.mail.setdefault((self.rank, to, lane, seq), SimpleQueue()).put(tensor.clone())

    def expect(self, shape: Sequence[int], *, dtype: torch.dtype, source: int, lane: str, seq: int = 0) -> None:
        self.expected[source, lane, seq] += 1

    def get(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, source: int, lane: str, seq: int = 0
    ) -> Tensor:
        if self.expected[source, lane, seq]:
            self.expected[source, lane, seq] -= 1
            self.early += 1
        tensor = self.mail.setdefault((source, self.rank, lane, seq), SimpleQueue()).get(timeout=20)
        assert tuple(tensor.shape) == tuple(shape)
        return tensor


def test_ranks_of_local_critics_meet_while_the_first_one_computes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ROUND_SECONDS", 0.0)

    def begin(world: World) -> int:
        met: list[str] = []
        gather = world.allgather_object

        def counted(value: Any, *, name: str) -> list[Any]:
            met.append(name)
            return gather(value, name=name)

        monkeypatch.setattr(world, "allgather_object", counted)
        # Three forward passes.
        features = SimpleNamespace(move=lambda cuts: None, beginning_epoch=lambda batches: iter(range(3)))
        critics: Any = SimpleNamespace(
            world=world,
            features=(features, features) if world.rank == 0 else None,
            cut=1,
            _began=False,
            _finish_learning=lambda: None,
        )
        LocalCritics.begin_epoch(critics, [])
        return len(met)

    assert on_ranks(2, begin) == [4, 4]


@pytest.mark.parametrize("served", [0, 1, 2, 6])
def test_what_a_rank_has_begun_to_receive_comes_however_early_the_line_is_ended(served: int) -> None:
    plan = LinePlan(THREE, ((3,), (2, 3), (3,)), ((0,), (1,), (2,)))
    mail: dict[Address, SimpleQueue[Tensor]] = {}
    wires = [Between(rank, mail) for rank in range(3)]
    barrier = threading.Barrier(3)

    def work(rank: int) -> list[float]:
        own = line(plan, [], rank=rank, wire=wires[rank], boundaries=[TensorLayout((1, 1), (1, 1), torch.float32)] * 4)
        found = []
        for first in (0, 10):
            own.begin([batch(first + number) for number in range(6)])
            found += [float(own.serve().features[3][0, 0]) for _ in range(served)]
            own.finish()
            # As in training: no rank begins anew before all have ended.
            barrier.wait(timeout=20)
        return found

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    assert found == [[1000 * (first + n) + 123 for first in (0, 10) for n in range(served)]] * 3
    assert not any(wire.expected.total() for wire in wires), "a receive was started that no rank sends"
    assert all(queue.empty() for queue in mail.values()), "a message was left on the wire"
    assert not served or all(wire.early for wire in wires)
