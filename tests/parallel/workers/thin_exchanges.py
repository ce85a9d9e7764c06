"""What low rank makes of gradients: checks that `exchanging` runs with its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.ranks.exchange.low_rank.parcel import seed_of
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World
from tests.parallel.workers.known_gradients import (
    SHAPES,
    average,
    backward,
    gradients,
    grads,
    parameters,
    raises,
    same_everywhere,
)

R = 2
MATRICES = [(40, 30), (16, 75), (20, 20)]
THIN_BYTES = 4 * (sum(R * (n + m) for n, m in MATRICES) + 30 + 7)


def low_rank(world: World, named: list[tuple[str, nn.Parameter]], **options: Any) -> Reducer:
    reducer = Reducer(world, compression=f"powersgd:{R}", bucket_bytes=3000, piece_bytes=600, **options)
    reducer.carry(named)
    return reducer


def one_step(reducer: Reducer, named: list[tuple[str, nn.Parameter]], wanted: list[Tensor]) -> list[Tensor]:
    reducer.begin()
    backward(named, wanted)
    reducer.finish()
    return [g.clone() for g in grads(named)]


def check_low_rank_follows_the_paper(world: World) -> None:
    """Compare with algorithm 1 of the paper, written down for all ranks in double precision."""
    named = parameters()
    seen: list[float] = []
    reducer = low_rank(world, named, uncompressed_steps=2, observer=lambda slot, g: seen.append(float(g.abs().sum())))
    right: list[Any] = []
    errors = [[torch.zeros(n, m, dtype=torch.float64) for n, m in MATRICES] for _ in range(world.size)]
    sent, given = [torch.zeros(s, dtype=torch.float64) for s in SHAPES], [torch.zeros(s).double() for s in SHAPES]
    for step in range(6):
        before = reducer.payload_bytes
        seen.clear()
        got = one_step(reducer, named, gradients(world.rank, step))
        own = [float(g.abs().sum()) for g in gradients(world.rank, step)]
        torch.testing.assert_close(torch.tensor(sorted(seen)), torch.tensor(sorted(own)), rtol=1e-4, atol=0)
        if world.size == 1:
            assert reducer.payload_bytes == 0
            continue
        same_everywhere(world, got, "low-rank")
        plain = average(world, step)
        if step < 2:
            assert reducer.payload_bytes - before == 4 * sum(map(math.prod, SHAPES))
            assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(got, plain, strict=True))
            continue
        assert reducer.payload_bytes - before == THIN_BYTES
        assert len(reducer._convoy.low_rank) == 2, "all in one group: none is ahead of another"
        if step == 2:
            right = [torch.randn(m, R, generator=torch.Generator().manual_seed(seed_of(f"p{i}"))).double()
                     for i, (_, m) in zip((0, 2, 4), MATRICES, strict=True)]  # fmt: skip
        all_ranks = [as_matrices(gradients(rank, step, dtype=torch.float64)) for rank in range(world.size)]
        for i, place in enumerate((0, 2, 4)):
            wholes = [all_ranks[rank][i] + errors[rank][i] for rank in range(world.size)]
            left = torch.linalg.qr(torch.stack([whole @ right[i] for whole in wholes]).mean(dim=0)).Q
            right[i] = torch.stack([whole.t() @ left for whole in wholes]).mean(dim=0)
            decompressed = left @ right[i].t()
            for rank in range(world.size):
                errors[rank][i] = wholes[rank] - decompressed
            mine = as_matrices([g.double() for g in got])[i]
            torch.testing.assert_close(mine, decompressed, rtol=1e-3, atol=1e-4)
            kept = reducer.state_dict()["low_rank"][f"p{place}"]["error"]
            torch.testing.assert_close(kept.double(), errors[world.rank][i], rtol=1e-3, atol=1e-3)
        for place in (1, 3):
            torch.testing.assert_close(got[place].double(), plain[place], rtol=1e-5, atol=1e-6)
        sent = [a + b for a, b in zip(sent, plain, strict=True)]
        given = [a + b.double() for a, b in zip(given, got, strict=True)]
    if world.size > 1:
        # What was not given yet is kept by somebody: nothing is lost.
        for i, (all_sent, all_given) in enumerate(zip(as_matrices(sent), as_matrices(given), strict=True)):
            open_ = torch.stack([errors[rank][i] for rank in range(world.size)]).mean(dim=0)
            torch.testing.assert_close(all_given + open_, all_sent, rtol=1e-3, atol=1e-3)


def as_matrices(tensors: list[Tensor]) -> list[Tensor]:
    """Return p0, p2 and p4 as matrices, in the order of memory: p2 lies channels last."""
    return [tensors[0], tensors[2].permute(0, 2, 3, 1).reshape(16, 75), tensors[4]]


def check_gradients_of_low_rank_arrive_whole(world: World) -> None:
    named = parameters()
    reducer = low_rank(world, named, uncompressed_steps=0)
    torch.manual_seed(3)
    base = [torch.randn(40, 2) @ torch.randn(2, 30), torch.randn(30), torch.zeros(16, 3, 5, 5), torch.randn(7)]
    base += [torch.randn(20, 1) @ torch.randn(1, 20)]
    got = one_step(reducer, named, [(world.rank + 1) * g for g in base])
    for mine, g in zip(got, base, strict=True):
        torch.testing.assert_close(mine, g * (world.size + 1) / 2, rtol=1e-3, atol=1e-4)


def check_low_rank_goes_on_from_its_state_and_loses_what_freezes(world: World) -> None:
    named = parameters()
    reducer = low_rank(world, named, uncompressed_steps=2)
    for step in range(4):
        one_step(reducer, named, gradients(world.rank, step))
        other = parameters()
        again = low_rank(world, other, uncompressed_steps=2)
        again.load_state_dict(reducer.state_dict())
        ahead = [one_step(again, other, gradients(world.rank, step + k)) for k in (1, 2)]
        if step == 1:
            one_step(reducer, named, gradients(world.rank, 2))
            straight = [grads(named), one_step(reducer, named, gradients(world.rank, 3))]
            assert all(torch.equal(a, b) for a, b in zip(ahead[1], straight[1], strict=True)), "resumed otherwise"
    if world.size == 1:
        return
    kept = reducer.state_dict()["low_rank"]
    assert set(kept) == {"p0", "p2", "p4"}
    reducer.carry(named[2:])
    now = reducer.state_dict()["low_rank"]
    assert set(now) == {"p2", "p4"} and torch.equal(now["p4"]["error"], kept["p4"]["error"])
    assert torch.equal(now["p2"]["right"], kept["p2"]["right"])
    one_step(reducer, named[2:], gradients(world.rank, 9)[2:])
    reducer.carry(named)
    assert not reducer.state_dict()["low_rank"]["p0"]["error"].any(), "a thawed parameter remembers"
    one_step(reducer, named, gradients(world.rank, 10))


def check_no_error_remembers_what_was_not_finite(world: World) -> None:
    named = parameters()
    reducer = low_rank(world, named, uncompressed_steps=0)
    one_step(reducer, named, gradients(world.rank, 0))
    broken = gradients(world.rank, 1)
    if world.rank == world.size - 1:
        broken[2][0, 0, 0, 0] = math.inf
    one_step(reducer, named, broken)
    assert not reducer.gradients_are_finite()
    one_step(reducer, named, gradients(world.rank, 2))
    assert reducer.gradients_are_finite()


def check_ranks_that_compute_otherwise_are_refused(world: World) -> None:
    if world.size == 1:
        return
    reducer = low_rank(world, parameters(), uncompressed_steps=0)
    if world.rank == world.size - 1:
        reducer._convoy.low_rank[-1]._in_order[-1].right[0, 0] += 1e-6
    raises(reducer.begin, f"rank {world.size - 1} computes other bits than rank 0")
    raises(lambda: Reducer(world, compression="powersgd:0").carry([]), "powersgd:R with R in 1..256")
