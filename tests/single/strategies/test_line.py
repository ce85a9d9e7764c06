from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvfreeze.chain.segments import Boundary
from hvfreeze.data.batches import Batch
from hvfreeze.ranks.wire import LoopWire
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.shared_trunk.line import LANES, Line, Plan

BOUNDARIES = [Boundary((2, n), (n, 1), torch.float32) for n in (10, 7, 5, 3)]
THREE = ((0, 1), (1, 2), (2, 3))


def test_features_come_from_the_rank_that_computes_them() -> None:
    plan = Plan(THREE, ((3,), (2, 3), (), (3,)), ((0,), (1, 4), (), (3,)))
    assert [plan.source_of(depth) for depth in (1, 2, 3)] == [0, 1, 2]
    assert plan.receivers(3) == [0, 1, 3] and plan.receivers(2) == [1]
    assert [plan.place_of(rank) for rank in range(4)] == [0, 1, 2, None]


def test_the_bytes_of_a_batch_are_known_beforehand() -> None:
    heads = (((3,), (2, 3), (), (3,)), ((0,), (1, 4), (), (3,)))
    sent = {how: Plan(THREE, *heads, how).bytes_per_batch(BOUNDARIES, rows=2) for how in ("replay", "direct", "ride")}
    # Both inner boundaries once; from rank 2 to ranks 0, 1 and 3, while rank 1 has its own at depth 2.
    assert all(
        lanes["activations"] == 4 * 2 * (7 + 5) and lanes["features"] == 4 * 2 * 3 * 3 for lanes in sent.values()
    )
    assert sent["replay"]["labels"] == 0
    assert sent["direct"]["labels"] == 8 * 2 * (2 + 1), "from rank 0 to ranks 1 and 3"
    assert sent["ride"]["labels"] == 8 * 2 * (2 * 4 + 1 + 2 + 1), "four over each of two hops, then to ranks 0, 1 and 3"


def line(plan: Plan, seen: list[int]) -> Line:
    def load(batch: Batch) -> Tensor:
        seen.append(int(batch.ids[0]))
        return torch.from_numpy(batch.ids).float()[:, None]

    return Line(
        plan=plan,
        rank=0,
        wire=LoopWire(LANES),
        boundaries=BOUNDARIES,
        run=lambda x, start, stop: x * 10 + stop,
        load=load,
        labels_of=lambda batch: torch.from_numpy(np.stack([batch.ids, -batch.ids])),
        clock=PhaseClock(),
    )


def batch(number: int) -> Batch:
    return Batch(np.array([number]), np.zeros(1, np.int64), torch.zeros(1), 1)


def test_a_line_of_one_serves_what_was_announced_in_order() -> None:
    seen: list[int] = []
    alone = line(Plan(((0, 3),), ((2, 3),), ((1, 0),), "ride"), seen)
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
    idle = line(Plan(((0, 3),), ((),), ((),)), seen)
    idle.begin([batch(1)])
    assert idle.serve().features == {} and idle.forwards == 0 and seen == []
